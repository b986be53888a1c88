"""Whether the figures of a record stand on a page."""

import re


def tables(text):
    """Yields the cells of each table, keyed by row and column."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [line[1:-1].split("|") for line in block.splitlines()]
        (_, *heads), _, *rows = [[x.strip() for x in line] for line in lines]
        pairs = ((row[0], zip(heads, row[1:], strict=True)) for row in rows)
        yield {(row, x): cell for row, cells in pairs for x, cell in cells}


def has_figures(text, figures):
    """Tells whether a text has all figures.

    Args:
      text: a page.
      figures: a dictionary keyed by a table's row and column, a dictionary keyed by
        labels, or a text. Labels are those of a list ("label: figure") in one row or
        paragraph, or those of the rows of one table, whose figures are then in one
        column.
    """
    if isinstance(figures, str):
        return " ".join(figures.split()) in " ".join(text.split())
    if isinstance(next(iter(figures)), tuple):
        return any(figures.items() <= table.items() for table in tables(text))
    for table in tables(text):
        if any(
            figures.items()
            <= {row: x for (row, y), x in table.items() if y == head}.items()
            for head in {head for _, head in table}
        ):
            return True
    items = [re.escape(f"{label}: {figure}") for label, figure in figures.items()]
    items = [re.compile(rf"(?<![\w+]){item}(?![.,]?\w)") for item in items]
    lines = re.sub(r"\n(?=[^|\n])", " ", text).splitlines()
    return any(all(x.search(line) for x in items) for line in lines)
