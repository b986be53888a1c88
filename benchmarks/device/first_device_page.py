"""The records of ``first_device`` as tables, and as a page of the documentation."""

import math
import textwrap
from collections.abc import Callable, Iterator

from benchmarks import ROOT, records

PAGE = ROOT / "docs" / "hardware.md"
RECORDS = ROOT / "docs" / "evidence"
MARK = "<!-- From here on: python -m benchmarks first_device --draw -->\n"


def draw() -> int:
    """Write the page of the records that are kept."""
    PAGE.write_text(drawn())
    print(f"wrote {PAGE}")
    return 0


def drawn() -> str:
    """The page: what a person wrote, and the records, devices first."""
    kept = [records.load(path) for path in sorted(RECORDS.glob("first_device_*.json"))]
    kept.sort(key=is_rehearsal)
    parts = [
        f"## {record['ran'][0].upper()}{record['ran'][1:]}\n\n{rendered(record)}\n"
        for record in kept
    ]
    return PAGE.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(parts)


def article(name: str) -> str:
    """The name with its article."""
    return f"{'an' if name.startswith('H') else 'a'} {name}"


def is_rehearsal(record: dict) -> bool:
    return "not run" in record["ran"]


def is_good(record: dict) -> bool:
    """Whether nothing failed, and no bit differs that must not."""
    bad = [each for job in record["jobs"] for each in _failures(job)]
    return not bad


def rendered(record: dict) -> str:
    """The record as Markdown."""
    lines = [_origin(record), ""]
    if is_rehearsal(record):
        lines += [compiled_table(record), ""]
    else:
        for title, table in (
            ("Do kernels give the reference's bits?", bits_table),
            ("How long is a step?", times_table),
            ("Does a GPT-2 124M train?", training_table),
            ("How long is the first compile?", compile_table),
        ):
            lines += [f"### {title}", "", table(record), ""]
    bad = [each for job in record["jobs"] for each in _failures(job)]
    left = [f"{_name(j)}: {j['reason']}" for j in record["jobs"] if _is_left(j)]
    lines += [_list("Failed", bad), _list("Not run, or not to the end", left)]
    return "\n".join(lines).rstrip()


def _origin(record: dict) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items())
    said = [record["date"][:10], f"Python {record['python']}", versions]
    said += [f"{n} {record[n]}" for n in ("driver", "ptxas") if record.get(n)]
    said += [f"{record['processors']} processors"]
    took = f"{record['elapsed_seconds'] / 60:.1f} minutes"
    lines = textwrap.wrap("; ".join(said) + ".", 98, break_on_hyphens=False)
    return "\n".join([f"`{record['command']}`, {took}.", *lines])


def _list(title: str, items: list[str]) -> str:
    if not items:
        return f"{title}: nothing.\n"
    return "\n".join([f"{title}:", "", *(f"- {x}" for x in items), ""])


def _name(job: dict) -> str:
    return f"{job['section']}/{job['name']}"


def _is_left(job: dict) -> bool:
    return job["status"] not in ("done", "failed")


def _failures(job: dict) -> Iterator[str]:
    """What went wrong in a job, a line each."""
    if job["status"] == "failed" and not job["trials"]:
        yield f"{_name(job)}: {_first_line(job['reason'])}"
    for trial, found in job["trials"].items():
        where = f"{_name(job)}, {trial}"
        if "error" in found:
            yield f"{where}: {_first_line(found['error'])}"
            continue
        figures = found["figures"]
        if figures.get("exact") and figures["parameters"] + figures["state"]:
            yield f"{where}: {figures['parameters'] + figures['state']} numbers differ"
        if figures.get("finite") is False:
            yield f"{where}: a loss is not finite"
        elif figures.get("last_loss", 0) > figures.get("first_loss", 0):
            yield f"{where}: the loss rose"


def _first_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _jobs(record: dict, section: str) -> list[dict]:
    return [job for job in record["jobs"] if job["section"] == section]


def _cell(found: dict | None, show: Callable[[dict], str]) -> str:
    if found is None:
        return "not run"
    return "failed" if "error" in found else show(found["figures"])


def bits_table(record: dict) -> str:
    """Elements that differ from the reference, by family, launcher and leaves."""
    jobs = _jobs(record, "bits")
    trials = list(dict.fromkeys(t for job in jobs for t in job["trials"]))
    launchers = list(dict.fromkeys(t.partition(", ")[2] for t in trials))
    kinds = list(dict.fromkeys(t.partition(", ")[0] for t in trials))

    def show(figures: dict) -> str:
        count = figures["parameters"] + figures["state"]
        if count == 0 or figures["exact"]:
            return str(count)
        return f"({count}; {figures['furthest']:.0e})"

    rows = [
        [
            job["name"],
            launcher,
            *(_cell(job["trials"].get(f"{kind}, {launcher}"), show) for kind in kinds),
        ]
        for job in jobs
        for launcher in launchers
    ]
    return (
        "The table counts the numbers and words that differ from XLA's on the CPU\n"
        "after two steps. A count is in brackets if roots and quotients may be\n"
        "rounded differently. The figure next to it is the largest distance of a\n"
        "parameter, relative to the largest parameter of its leaf.\n\n"
    ) + records.table(["family", "by", *kinds], rows)


def times_table(record: dict) -> str:
    """Steps and copies."""
    rows = []
    for job in _jobs(record, "step_times"):
        for leaves in ("16x4096", "gpt2"):
            found = job["trials"].get(leaves)
            show = lambda key, digits: lambda f: f"{f[key]:.{digits}f}"
            per = lambda key: lambda f: f"{f[key] / f['parameters']:.2f}"
            rows.append(
                [
                    job["name"],
                    leaves,
                    _cell(found, per("stored_bytes")),
                    _cell(found, per("moved_bytes")),
                    _cell(found, show("ps_per_parameter", 2)),
                    _cell(found, show("gb_per_s", 0)),
                ]
            )
    return (
        "Picoseconds of a step per parameter. Medians of seven measurements of 0.1 s;\n"
        "`gpt2` in loops of 20 steps on the device, `16x4096` called from Python\n"
        "without waiting. GB/s: the bytes that a step moves at least, by its time.\n\n"
    ) + records.table(
        ["AdamW", "leaves", "stored B", "moved B", "step, ps", "GB/s"], rows
    )


def training_table(record: dict) -> str:
    """Rows of training."""
    rows = []
    for job in _jobs(record, "training"):
        found = job["trials"].get("GPT-2")
        peak = lambda f: f"{f['peak_bytes'] / 2**30:.2f}" if f["peak_bytes"] else "?"
        rows.append(
            [
                job["name"],
                _cell(found, lambda f: f"{f['first_loss']:.2f}"),
                _cell(found, lambda f: f"{f['last_loss']:.3f}"),
                _cell(found, lambda f: f"{f['tokens_per_second']:,.0f}"),
                _cell(found, lambda f: f"{f['stored_bytes'] / 2**30:.2f}"),
                _cell(found, peak),
                _program_cell(job, "step", "compile"),
            ]
        )
    heads = ["AdamW", "first loss", "last ten", "tokens/s", "stored GiB", "peak GiB"]
    return records.table([*heads, "compile, s"], rows)


def _program_cell(job: dict, program: str, stage: str) -> str:
    found = [p for p in job["programs"] if p["program"] == program]
    return f"{found[-1]['seconds'][stage]:.1f}" if found else "not run"


def compile_table(record: dict) -> str:
    """Seconds of each stage."""
    stages = ("trace", "lower", "compile")
    rows = [
        [job["name"], *(_program_cell(job, "step", stage) for stage in stages)]
        for job in _jobs(record, "first_compile")
    ]
    return (
        "Times are in seconds, for an optimizer step on GPT-2's 148 leaves.\n\n"
    ) + records.table(["AdamW", *stages], rows)


def compiled_table(record: dict) -> str:
    """What each job's programs took to compile."""
    rows = []
    # Exact: the sums of Python 3.11 and 3.12 differ in their last digits.
    seconds = lambda program: math.fsum(program["processor"].values())
    for job in record["jobs"]:
        spent = list(map(seconds, job["programs"]))
        slowest = max(job["programs"], key=seconds, default=None)
        rows.append(
            [
                f"`{_name(job)}`",
                job["status"],
                len(spent),
                f"{math.fsum(spent):.1f}",
                f"{max(spent):.1f}: {slowest['program']}" if slowest else "",
            ]
        )
    return (
        "Seconds of processor time to trace, lower and compile.\n\n"
    ) + records.table(["job", "", "programs", "all", "the longest"], rows)
