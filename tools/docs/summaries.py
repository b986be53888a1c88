"""Put a summary table in front of each group of an API page.

This is a hook of MkDocs; see ``mkdocs.yml``. A group is a run of ``::: name`` lines.
"""

import functools
import re
from typing import Any

import griffe

_GROUP = re.compile(r"^::: \S+(?:\n+::: \S+)*", re.MULTILINE)
_ROLE = re.compile(r":\w+:`([^`]+)`")


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Return the text of a page with its summary tables."""
    del kwargs
    if page.file.src_uri.startswith("api/"):
        return with_summaries(markdown)
    return markdown


def with_summaries(markdown: str) -> str:
    r"""Insert a table of names and first lines before each group of directives.

    >>> print(with_summaries("Text.\n\n::: griffe.load"))
    Text.
    <BLANKLINE>
    | name | summary |
    |---|---|
    | [`load`][griffe.load] | Load and return a Griffe object. |
    <BLANKLINE>
    ::: griffe.load
    """

    def table(group: re.Match[str]) -> str:
        names = re.findall(r"^::: (\S+)", group[0], re.MULTILINE)
        rows = "\n".join(
            f"| [`{name.rpartition('.')[2]}`][{name}] | {_first_line(name)} |"
            for name in names
        )
        return f"| name | summary |\n|---|---|\n{rows}\n\n{group[0]}"

    return _GROUP.sub(table, markdown)


def _first_line(name: str) -> str:
    package, _, rest = name.partition(".")
    found = _package(package)[rest]
    target = found.final_target if found.is_alias else found
    if not target.docstring:
        raise ValueError(f"{name} has no docstring")
    line = target.docstring.value.partition("\n")[0]
    return _ROLE.sub(r"`\1`", line).replace("``", "`").replace("|", r"\|")


@functools.cache
def _package(name: str) -> Any:
    return griffe.load(name, search_paths=["."])
