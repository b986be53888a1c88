"""Convert docstrings to Markdown for the API reference.

mkdocstrings uses griffe to read the sources, and this is an extension of griffe. See
``mkdocs.yml``.
"""

import re

import griffe

# Matches :func:`lowbit_optax.step` and :class:`TrainState`.
_ROLE = re.compile(r":(?:func|class|meth|mod):`([^`]+)`")
_PROMPT = re.compile(r"^( *)>>> ")


class DocstringsAsMarkdown(griffe.Extension):
    """Fences doctests, and links the names that the reference documents."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Rewrite the docstring of one object."""
        del kwargs
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Fence the doctests of a docstring, and turn its roles into links.

    >>> as_markdown("Doubles. >>> is not at the start of a line here.")
    'Doubles. >>> is not at the start of a line here.'
    >>> as_markdown(">>> 1 + 1").splitlines()
    ['```pycon', '>>> 1 + 1', '```']
    >>> print(as_markdown("See :func:`step`."))
    See <autoref identifier="lowbit_optax.step" optional><code>step</code></autoref>.
    """
    text = _ROLE.sub(_link, text)
    lines: list[str] = []
    is_inside = False
    for line in text.splitlines():
        prompt = _PROMPT.match(line)
        if prompt and not is_inside:
            lines.append(f"{prompt[1]}```pycon")
            is_inside = True
        elif is_inside and not line.strip():
            lines.append("```")
            is_inside = False
        elif not is_inside and line.endswith("::"):
            line = line[:-1]
        lines.append(line)
    if is_inside:
        lines.append("```")
    return "\n".join(lines)


def _link(role: re.Match[str]) -> str:
    """Return a link to a name, or the name as code if the reference lacks it."""
    name = role[1]
    is_whole = name.startswith(("lowbit_optax", "pallas_kernels"))
    target = name if is_whole else f"lowbit_optax.{name}"
    return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'
