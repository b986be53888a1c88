"""Draw the formulas of the pages.

This is a hook of MkDocs; see ``mkdocs.yml``. Pages write formulas as LaTeX in ``math``
fences, which GitHub draws, too. The built pages contain them as MathML, which browsers
draw without scripts.
"""

from typing import Any

import latex2mathml.converter
from pymdownx.superfences import SuperFencesException


def on_config(config: Any) -> Any:
    """Let a fence with the language ``math`` contain a formula."""
    fence = {"name": "math", "class": "math", "format": as_mathml}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def as_mathml(latex: str, *args: Any, **kwargs: Any) -> str:
    r"""Return the MathML of a formula.

    >>> as_mathml("x").endswith('display="block"><mrow><mi>x</mi></mrow></math>')
    True
    >>> as_mathml(r"\unknown")
    Traceback (most recent call last):
    pymdownx.superfences.SuperFencesException: latex2mathml cannot convert \unknown
    """
    del args, kwargs
    mathml = latex2mathml.converter.convert(latex, display="block")
    if "\\" in mathml or "&<" in mathml:  # a command or an `&` that is not converted
        raise SuperFencesException(f"latex2mathml cannot convert {latex}")
    return mathml
