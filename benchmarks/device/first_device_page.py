"""Render the records of ``first_device`` as Markdown.

``section`` renders the records of one device. ``drawn`` renders the records in
``docs/evidence`` in ``docs/hardware_h200.md``.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator

from benchmarks import ROOT, records

PAGE = ROOT / "docs" / "hardware_h200.md"
RECORDS = ROOT / "docs" / "evidence"
MARK = "<!-- From here on: python -m benchmarks first_device --draw -->\n"


def draw() -> int:
    """Render the records in ``docs/evidence`` again, and write the page."""
    PAGE.write_text(drawn())
    print(f"wrote {PAGE}")
    return 0


def drawn() -> str:
    """Return the page: its unchanged handwritten part, and a section for each device.

    If several records come from the same device, the section shows the newest result
    of each job. The page has no section for rehearsals, which measure nothing.
    """
    kept = [records.load(path) for path in RECORDS.glob("first_device_*.json")]
    by_device: dict[str, list[dict]] = {}
    for record in sorted(kept, key=lambda record: record["date"]):
        if not is_rehearsal(record):
            by_device.setdefault(record["ran"], []).append(record)
    sections = [
        f"## {device[0].upper()}{device[1:]}\n\n{section(group)}\n"
        for device, group in by_device.items()
    ]
    return PAGE.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(sections)


def article(name: str) -> str:
    """Return the name with its indefinite article."""
    return f"{'an' if name.startswith('H') else 'a'} {name}"


def is_rehearsal(record: dict) -> bool:
    """Return whether the programs were only compiled."""
    return "not run" in record["ran"]


def is_good(record: dict) -> bool:
    """Return whether no job failed and every result that must be exact is exact."""
    return not any(_errors(record["jobs"])) and not any(inexact(record["jobs"]))


def inexact(jobs: list[dict]) -> Iterator[str]:
    """Return a line for each trial that differs although it must be exact."""
    for job in jobs:
        for trial, found in job["trials"].items():
            figures = found.get("figures", {})
            if figures.get("exact") and _differing(figures):
                yield f"{_name(job)}, {trial}: {_differing(figures)} numbers differ"


def section(group: list[dict]) -> str:
    """Return the records of one device, oldest first, as Markdown."""
    jobs, last = list(_newest(group)), group[-1]
    if is_rehearsal(last):
        parts = [_filled(f"`{last['command']}`: {compilation(last)}")]
    else:
        parts = [_origin(group), *_tables(jobs)]
    parts += [_list("These trials failed", _errors(jobs))]
    if unfinished := [f"`{_name(job)}`" for job in jobs if _is_unfinished(job)]:
        parts.append(_filled(f"These jobs did not finish: {', '.join(unfinished)}."))
    return "\n\n".join(filter(None, parts))


def _newest(group: list[dict]) -> Iterable[dict]:
    """Return the newest result of each job. Jobs without a result replace nothing."""
    found: dict[str, dict] = {}
    for record in group:
        for job in record["jobs"]:
            if job["trials"] or _name(job) not in found:
                found[_name(job)] = job
    return found.values()


def _tables(jobs: list[dict]) -> Iterator[str]:
    """Return a heading and a table for each section with results."""
    for section, title, table in (
        ("bits", "Are the results equal to those on a CPU?", bits_table),
        ("step_times", "How long does a step take?", times_table),
        ("training", "Does a GPT-2 124M train?", training_table),
        ("first_compile", "How long does the first compilation take?", compile_table),
        ("shakespeare_runs", "How do formats train on Shakespeare?", text_table),
    ):
        ran = [job for job in jobs if job["section"] == section and job["trials"]]
        if ran:
            yield f"### {title}\n\n{table(ran)}"


def _origin(group: list[dict]) -> str:
    """Return the commands of the records, and the software that they ran with."""
    commands = [
        f"- `{record['command']}`: {record['elapsed_seconds'] / 60:.1f} minutes"
        for record in group
    ]
    software = map(_filled, dict.fromkeys(map(_software, group)))
    return "\n".join([*commands, "", *software])


def _software(record: dict) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items())
    parts = [record["date"][:10], f"Python {record['python']}", versions]
    parts += [f"{n} {record[n]}" for n in ("driver", "ptxas") if record.get(n)]
    return "; ".join([*parts, f"{record['processors']} processors"]) + "."


def _filled(text: str) -> str:
    return textwrap.fill(text, 98, break_on_hyphens=False, break_long_words=False)


def _list(title: str, items: Iterable[str]) -> str:
    lines = [f"- {item}" for item in items]
    return "\n".join([f"{title}:", "", *lines]) if lines else ""


def _name(job: dict) -> str:
    return f"{job['section']}/{job['name']}"


def _is_unfinished(job: dict) -> bool:
    return job["status"] not in ("done", "failed")


def _errors(jobs: list[dict]) -> Iterator[str]:
    """Return a line for each trial that raised an error or did not train."""
    for job in jobs:
        if job["status"] == "failed" and not job["trials"]:
            yield f"{_name(job)}: {_first_line(job['reason'])}"
        for trial, found in job["trials"].items():
            where = f"{_name(job)}, {trial}"
            if "error" in found:
                yield f"{where}: {_first_line(found['error'])}"
                continue
            figures = found["figures"]
            if figures.get("finite") is False:
                yield f"{where}: a loss is not finite"
            elif figures.get("last_loss", 0) > figures.get("first_loss", 0):
                yield f"{where}: the loss rose"


def _differing(figures: dict) -> int:
    return figures["parameters"] + figures["state"]


def _first_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _cell(found: dict | None, show: Callable[[dict], str]) -> str:
    if found is None:
        return "not run"
    return "failed" if "error" in found else show(found["figures"])


def bits_table(jobs: list[dict]) -> str:
    """Return a table of how many values differ from the reference."""
    trials = list(dict.fromkeys(t for job in jobs for t in job["trials"]))
    implementations = list(dict.fromkeys(t.partition(", ")[2] for t in trials))
    kinds = list(dict.fromkeys(t.partition(", ")[0] for t in trials))

    def cell(job: dict, implementation: str) -> str:
        found = [job["trials"].get(f"{kind}, {implementation}") for kind in kinds]
        if not all(found):
            return "not run"
        if any("error" in each for each in found):
            return "failed"
        return str(sum(_differing(each["figures"]) for each in found))

    rows = [[job["name"], *(cell(job, x) for x in implementations)] for job in jobs]
    text = (
        "The table counts the numbers in parameters and state that differ from XLA's "
        "results on the CPU after two steps, over four sets of leaves."
    )
    return f"{_filled(text)}\n\n" + records.table(["format", *implementations], rows)


def times_table(jobs: list[dict]) -> str:
    """Return a table of the bytes and times of steps."""
    show = lambda key, digits: lambda f: f"{f[key]:.{digits}f}"
    per = lambda key: lambda f: f"{f[key] / f['parameters']:.2f}"
    rows = []
    for job in jobs:
        matrices, gpt2 = map(job["trials"].get, ("16x4096", "gpt2"))
        sizes = (_cell(matrices, per(f"{x}_bytes")) for x in _BYTES)
        row = [job["name"], ", ".join(sizes)]
        for found in (matrices, gpt2):
            row += [_cell(found, show("ps_per_parameter", 2))]
            row += [_cell(found, show("gb_per_s", 0))]
        rows.append(row)
    text = (
        "Bytes are per parameter. Times are in milliseconds per billion parameters, "
        "and are medians of seven measurements of 0.1 s. The step on 16 matrices of "
        "4096 x 4096 is called from Python. The step on GPT-2's 148 leaves runs in a "
        "loop on the device. "
        "GB/s is the number of bytes that a step must move, divided by its time."
    )
    heads = ["AdamW", "bytes stored, moved"]
    heads += ["16 matrices, ms", "16 matrices, GB/s", "GPT-2, ms", "GPT-2, GB/s"]
    return f"{_filled(text)}\n\n" + records.table(heads, rows)


_BYTES = ("stored", "moved")


def training_table(jobs: list[dict]) -> str:
    """Return a table of losses, speed and memory of the training runs."""
    rows = []
    for job in jobs:
        found = job["trials"].get("GPT-2")
        peak = lambda f: f"{f['peak_bytes'] / 2**30:.2f}" if f["peak_bytes"] else "?"
        rows.append(
            [
                job["name"],
                _cell(found, lambda f: f"{f['first_loss']:.2f}, {f['last_loss']:.3f}"),
                _cell(found, lambda f: f"{f['tokens_per_second']:,.0f}"),
                _cell(found, lambda f: f"{f['stored_bytes'] / 2**30:.2f}"),
                _cell(found, peak),
                _seconds(job, "compile"),
            ]
        )
    return records.table(
        [
            "AdamW",
            "loss, first step and last ten",
            "tokens per second",
            "parameters and state, GiB",
            "peak memory, GiB",
            "seconds to compile",
        ],
        rows,
    )


def compile_table(jobs: list[dict]) -> str:
    """Return a table of the seconds of each stage of a compilation."""
    stages = ("trace", "lower", "compile")
    rows = [[job["name"], *(_seconds(job, stage) for stage in stages)] for job in jobs]
    return (
        "Times are seconds for one optimizer step on GPT-2's 148 leaves.\n\n"
    ) + records.table(["AdamW", *stages], rows)


def text_table(jobs: list[dict]) -> str:
    """Return a table of the losses on the characters of Shakespeare."""
    heads = {
        "training": "training loss, last tenth",
        "validation": "last validation loss",
        "best": "best validation loss",
    }
    rows = []
    for job in jobs:
        (found,) = job["trials"].values()
        row = [job["name"], _cell(found, _steps)]
        row += [_cell(found, lambda f: f"{f['ms_per_step']:.2f}")]
        row += [_cell(found, lambda f, key=key: f"{f[key]:.4f}") for key in heads]
        rows.append(row)
    text = (
        "Each row trains nanoGPT's GPT for the characters of Shakespeare once, with "
        "nanoGPT's options for one GPU, and computes in bfloat16. Every 250 steps, it "
        "measures the validation loss on all whole windows of the held-out text. "
        "nanoGPT reports a best loss of 1.4697, measured on samples of this text. A "
        "row that would not have ended in time stopped early. Its losses cannot be "
        "compared with those of complete rows."
    )
    heads = ["format", "steps", "ms per step", *heads.values()]
    return f"{_filled(text)}\n\n" + records.table(heads, rows)


def _steps(figures: dict) -> str:
    step, steps = figures["step"], figures["steps"]
    return f"{step:,}" if step == steps else f"incomplete: {step:,} of {steps:,}"


def _seconds(job: dict, stage: str) -> str:
    found = [p for p in job["programs"] if p["program"] == "step"]
    return f"{found[-1]['seconds'][stage]:.1f}" if found else "not run"


def compilation(record: dict) -> str:
    """Describe how long the programs of a rehearsal took to compile."""
    # fsum is exact: sums of Python 3.11 and 3.12 differ in their last digits.
    spent = {
        (_name(job), program["program"]): math.fsum(program["processor"].values())
        for job in record["jobs"]
        for program in job["programs"]
    }
    if not spent:
        return "No program was compiled."
    return (
        f"jax {record['versions']['jax']} compiled {len(spent)} programs of "
        f"{len(record['jobs'])} jobs and ran none of them. Compilation used "
        f"{math.fsum(spent.values()) / 60:.1f} minutes of processor time."
    )
