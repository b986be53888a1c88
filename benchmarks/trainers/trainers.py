"""Other libraries' trainers, with optax's AdamW and with ours: loss and bytes.

    .ci/trainers                             # an environment, and the tests
    .venv-trainers/bin/python -m benchmarks trainers

Runs ``tests/trainers``, whose tests leave what they found, and writes the record and
the page. With ``TUNIX`` in the environment, a checkout of Tunix at the tag of the
installed version, its own tests run too.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks import ROOT, records

NEEDS = ("tunix", "numpyro", "haiku", "keras", "haliax", "optimistix", "jaxopt")

PAGE = ROOT / "docs" / "integrations.md"
RECORD = records.path_of("benchmarks.trainers.trainers")
MARK = "<!-- From here on: python -m benchmarks trainers --draw -->\n"
OWN_TESTS = "Tunix own tests"


def found_by_the_tests(some: str) -> tuple[int, dict[str, dict]]:
    """The status of the tests, and a row for each trainer."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "-rs"]
        status = subprocess.run(
            [*command, "--dist", "worksteal", "tests/trainers", "-k", some],
            cwd=ROOT,
            env=os.environ | {"TRAINERS_ROWS": folder},
        ).returncode
        notes = [json.loads(x.read_text()) for x in pathlib.Path(folder).iterdir()]
    return status, merged(notes)


def merged(notes: list[dict]) -> dict[str, dict]:
    """A row for each trainer, from what its tests left."""
    rows = {}
    for note in sorted(notes, key=lambda note: note["trainer"].lower()):
        row = rows.setdefault(note.pop("trainer"), {})
        for key, found in note.items():
            row[key] = row.get(key, {}) | found if isinstance(found, dict) else found
    return rows


def _cell(row: dict, name: str) -> str:
    found = row["ours"][name]
    if "error" in found:
        return "fails"
    return f"{found['loss'] / row['float32']['loss'] - 1:+.1%}; {found['bytes']:.2f}"


def _restored(row: dict) -> str:
    """Where a restored run went on as it should, with every optimizer."""
    passed = [x.split(": ") for x in row.get("restored", ())]
    places = sorted({place for place, _ in passed})
    complete = [p for p in places if sum(x == p for x, _ in passed) == len(row["ours"])]
    return ", ".join(complete)


def table(rows: dict[str, dict]) -> str:
    names = list(next(iter(rows.values()))["ours"])
    heads = ["trainer", "version", "lines", "loss; bytes"]
    lines = []
    for trainer, row in rows.items():
        usual = f"{row['float32']['loss']:.4f}; {row['float32']['bytes']:.2f}"
        version = f"{row['package']} {row['version']}"
        ours = [_cell(row, name) for name in names]
        lines.append(
            [trainer, version, len(row["lines"]), usual, *ours, _restored(row)]
        )
    return records.table(
        [*heads, *(f"`{name}`" for name in names), "restored on"], lines
    )


def _limits(rows: dict[str, dict]) -> list[str]:
    """What does not work, trainer by trainer."""
    lines = []
    for trainer, row in rows.items():
        said = [*row["does_not_work"]]
        said += [f"`{n}`: {x['error']}" for n, x in row["ours"].items() if "error" in x]
        lines += [f"- {trainer}: {each}." for each in said]
    return lines


def _own_tests(row: dict | None) -> list[str]:
    if not row:
        return ["Not run: they are in no archive of the registry."]
    lines = []
    for name, found in row.items():
        lines.append(f"- `{name}`: {found['passed']} pass.")
        for test, error in found["failed"].items():
            lines.append(f"    - `{test}`: {error}")
    return lines


def drawn(record: dict) -> str:
    """The page: what a person wrote, and the record."""
    rows = dict(record["rows"])
    own = rows.pop(OWN_TESTS, None)
    changes = [
        f"{trainer}:\n\n```python\n" + "\n".join(row["lines"]) + "\n```\n"
        for trainer, row in rows.items()
    ]
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items())
    parts = [
        PAGE.read_text().partition(MARK)[0] + MARK,
        f"{record['date']}, {record['ran']}, Python {record['python']}, {versions}.\n",
        table(rows) + "\n",
        "## What does not work\n",
        "\n".join(_limits(rows) or ["Nothing, but for what is below."]) + "\n",
        "## Tunix' own tests\n",
        "\n".join(_own_tests(own)) + "\n",
        "## The lines to change\n",
        "\n".join(changes),
    ]
    return "\n".join(parts).rstrip() + "\n"


def main(argv: list[str]) -> int:
    """Runs the tests; writes the record and the page, unless this is only a check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draw", action="store_true", help="only write the page again")
    parser.add_argument("--check", action="store_true", help="the record into runs/")
    parser.add_argument("-k", default="", help="run some tests; other rows stay")
    args = parser.parse_args(argv)
    status = 0
    if not args.draw:
        status, rows = found_by_the_tests(args.k)
        if args.k:
            rows = records.load(RECORD)["rows"] | rows
        path = records.path_of("benchmarks.trainers.trainers", args.check)
        records.save(path, args, records.ran_here(), rows=rows)
    if not args.check:
        PAGE.write_text(drawn(records.load(RECORD)))
        print(f"wrote {PAGE}")
    return status
