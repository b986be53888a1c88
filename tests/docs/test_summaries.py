"""The summaries on the pages ``choosing`` and ``hardware`` match their records."""

import json
import re

import pytest

from benchmarks.front import fit
from benchmarks.records import shown
from tests.helpers.places import ROOT

FIGURE = r"-?[\d,]*\d(?:\.\d+)?(?: ± \d\.\d+)?"


def _record(path):
    return json.loads((ROOT / path).read_text())


def _rows(page, head):
    """Returns the rows of the table with the first header ``head``, without links."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", (ROOT / "docs" / page).read_text())
    (block,) = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    rows = (re.split(r" ?\| ", row.strip("|")) for row in block.splitlines())
    return [[cell.strip(" |") for cell in row] for row in rows]


def _trials(section):
    jobs = []
    for name in ("", "_second"):
        path = f"docs/evidence/first_device_nvidia_h200{name}.json"
        jobs += [job for job in _record(path)["jobs"] if job["section"] == section]
    return {
        job["name"]: {name: found["figures"] for name, found in job["trials"].items()}
        for job in jobs
        if job["trials"]
    }


STEPS = _trials("step_times")


@pytest.mark.parametrize(
    ("row", "run", "step"),
    [
        (0, "lowbit", "lowbit_adamw"),
        (1, "Kahan", "kahan_adamw"),
        (2, None, None),
        (3, "LPMM, 12 bits", "lpmm_adam, 12 bits"),
        (4, "factored", None),
    ],
)
def test_choosing_quotes_the_records(row, run, step):
    name, stored, fits, loss, time, _ = _rows("choosing.md", "optimizer")[row]
    bytes_of = _record("benchmarks/front/fit.json")["bytes_per_parameter"]
    label = name.partition(",")[0]
    for found in re.findall(FIGURE, fits):
        key = f"{label}, release" if f"{found} with release" in fits else label
        assert found == f"{fit.billions(bytes_of[key], 24):.1f}"
    runs = _record("benchmarks/training/shakespeare.json")["runs"]
    absent = "not measured"
    assert loss == (shown(runs[run]["gaps"]["validation"], 4) if run else absent)
    gpt2 = STEPS[step]["gpt2"] if step else None
    assert time == (f"{gpt2['ps_per_parameter']:.2f}" if step else absent)
    if step:
        found = STEPS[step]["16x4096"]
        assert float(stored) == round(found["stored_bytes"] / found["parameters"], 2)


def test_times_of_the_h200_match_the_records():
    launchers = _record("docs/evidence/launchers_h200.json")["rows"]
    of_triton = {
        "lowbit_adamw": ("triton", "gpt2 triton"),
        "kahan_adamw": ("kahan triton",),
        "sr_adamw, error into 8-bit mu": ("error triton",),
        "lpmm_adam, 12 bits": ("lpmm triton",),
    }
    for name, launcher, *cells in _rows("hardware.md", "AdamW step"):
        step = name.replace("`", "")
        if launcher == "Triton":
            times = [float(x) for x in cells if x]
            expected = [launchers[key]["ps"] for key in of_triton[step]]
            assert times == pytest.approx(expected, abs=0.0051)
            continue
        found = [STEPS[step][key]["ps_per_parameter"] for key in ("16x4096", "gpt2")]
        assert cells == [f"{time:.2f}" for time in found], step


def test_runs_of_gpt_2_match_the_records():
    runs = {name: found["GPT-2"] for name, found in _trials("training").items()}
    names = "lowbit_adamw", "optax, float32 master", "lowbit_adamw, released"
    stored, peak, speed, loss = (
        [show(runs[name]) for name in names]
        for show in (
            lambda x: f"{x['stored_bytes'] / 2**30:.2f}",
            lambda x: f"{x['peak_bytes'] / 2**30:.2f}",
            lambda x: f"{x['tokens_per_second']:,.0f}",
            lambda x: f"{x['last_loss']:.3f}",
        )
    )
    page = " ".join((ROOT / "docs/hardware.md").read_text().split())
    for text in (
        f"`lowbit_adamw` needs {stored[0]} GiB for parameters and state",
        f"optax with a float32 master needs {stored[1]} GiB",
        f"peak memory falls from {peak[1]} to {peak[0]} GiB",
        f"throughput rises from {speed[1]} to {speed[0]} tokens per second",
        f"the loss is {loss[0]} with `lowbit_adamw` and {loss[1]} with the float32",
        f"and [release](ideas/release.md), the loss is {loss[2]}",
        f"With release, peak memory rises to {peak[2]} GiB",
        f"throughput falls to {speed[2]} tokens per second",
    ):
        assert text in page
