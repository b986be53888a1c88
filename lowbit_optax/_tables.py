"""Tables for reports, as text for terminals and as HTML for notebooks."""

import dataclasses
import html
from collections.abc import Sequence

_ROWS_SHOWN = 12
_NAMES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with a title above it and notes below it.

    Args:
      title: one line of text.
      rows: rows of cells; the first row is the header.
      notes: lines of text.
      totals: the number of rows at the end, such as sums, that a short table keeps.
    """

    title: str
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    totals: int = 0

    def __str__(self) -> str:
        return "\n".join([self.title, *aligned(self.rows), *self.notes])

    def short(self) -> "Table":
        """Return a table with at most 12 rows, and a note that counts hidden rows."""
        head, *rows = self.rows
        body = rows[: len(rows) - self.totals]
        more = len(body) - _ROWS_SHOWN
        if more <= 0:
            return self
        kept = [head, *body[:_ROWS_SHOWN], *rows[len(body) :]]
        hidden = f"{more} more rows are hidden; print the report to see all of them"
        return dataclasses.replace(self, rows=kept, notes=[hidden, *self.notes])

    def html(self) -> str:
        """Return the table as HTML."""
        tags = ["th", *["td"] * (len(self.rows) - 1)]
        rows = "".join(
            f"<tr>{''.join(f'<{tag}>{html.escape(x)}</{tag}>' for x in row)}</tr>"
            for tag, row in zip(tags, self.rows, strict=True)
        )
        notes = html.escape("\n".join(self.notes))
        caption = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table>{caption}{rows}</table><pre>{notes}</pre>"


class Tabular:
    """A report that terminals and notebooks show as a table.

    ``print`` shows all rows, and ``repr`` only the first ones.
    """

    def table(self) -> Table:
        """Return the report as a :class:`Table`."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return str(self.table().short())

    def _repr_html_(self) -> str:
        return self.table().short().html()


class Explanation(dict[str, str]):
    """A mapping from the path of each parameter to a text; ``repr`` groups equal texts.

    >>> Explanation({"['w']": "a kernel", "['v']": "a kernel", "['b']": "XLA"})
    2 leaves  a kernel  ['w'], ['v']
    1 leaf    XLA       ['b']
    """

    def __repr__(self) -> str:
        return "\n".join(aligned(self._rows(), to_left=3))

    def _repr_html_(self) -> str:
        return Table("", [("leaves", "updated by", "paths"), *self._rows()]).html()

    def _rows(self) -> list[tuple[str, str, str]]:
        groups: dict[str, list[str]] = {}
        for name, text in self.items():
            # Texts of updates in a backward pass differ only after these words.
            groups.setdefault(text.partition(", update ")[0], []).append(name)
        count = lambda names: f"{len(names)} {'leaf' if len(names) == 1 else 'leaves'}"
        return [(count(names), text, some(names)) for text, names in groups.items()]


def aligned(rows: Sequence[Sequence[str]], to_left: int = 1) -> list[str]:
    """Return the lines of a table whose first ``to_left`` columns are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < to_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def some(names: Sequence[str]) -> str:
    """Return the first names, and the number of remaining names."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
