"""The figures in the README match the records of the measurements."""

import json
import re

from benchmarks.records import shown
from benchmarks.training import equivalence
from tests.helpers.places import ROOT

README = (ROOT / "README.md").read_text()
EVIDENCE = ROOT / "docs" / "evidence"


def _rows(head: str) -> dict[str, list[str]]:
    """Return the rows of the table whose header begins with ``head``, by first cell."""
    (block,) = re.findall(
        rf"^\| ?{head}.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE
    )
    rows = [row.strip("| ").split(" | ") for row in block.splitlines()]
    return {name: cells for name, *cells in rows}


def _jobs(record: str, section: str) -> dict[str, dict]:
    """Return the figures of each finished job for GPT-2, by its name."""
    jobs = json.loads((EVIDENCE / record).read_text())["jobs"]
    done = [x for x in jobs if x["section"] == section and x["status"] == "done"]
    return {
        job["name"]: trial["figures"]
        for job in done
        for name, trial in job["trials"].items()
        if name in ("gpt2", "GPT-2")
    }


def test_the_sentence_about_losses_matches_the_verdicts():
    path = ROOT / "benchmarks" / "training" / "equivalence.json"
    rows = json.loads(path.read_text())["rows"]
    text = " ".join(README.split())
    for name in equivalence.SECOND, "kahan_adamw":
        assert rows[name]["verdict"] == "equivalent"
    same = f"are equivalent to float32 within {equivalence.MARGIN} nats"
    assert f"`lowbit_adamw` and `kahan_adamw` {same}" in text
    assert rows["plain bfloat16"]["verdict"] == "worse"
    assert f"plain bfloat16 is {rows['plain bfloat16']['mean']:.3f} worse" in text


STEPS = _jobs("first_device_nvidia_h200.json", "step_times")
RUNS = _jobs("first_device_nvidia_h200_second.json", "training")
BOTH = "optax, float32 master", "lowbit_adamw"


def test_the_first_table_matches_the_records():
    rows = _rows("\\| AdamW, float32 master")
    path = ROOT / "benchmarks" / "training" / "shakespeare.json"
    runs = json.loads(path.read_text())["runs"]
    loss = rows["loss minus the float32 loss, nats"]
    assert loss[1] == shown(runs["lowbit"]["gaps"]["validation"], 4)
    assert len(runs["lowbit"]["gaps"]["validation"]["values"]) == 4
    assert "four seeds" in loss[2]
    stored = [STEPS[x]["stored_bytes"] / STEPS[x]["parameters"] for x in BOTH]
    assert rows["bytes per parameter"][:2] == [f"{x:.3g}" for x in stored]
    for name, text in (
        (
            "GPT-2 124M: weights and state, GiB",
            lambda x: f"{x['stored_bytes'] / 2**30:.2f}",
        ),
        (
            "GPT-2 124M: peak, mostly activations, GiB",
            lambda x: f"{x['peak_bytes'] / 2**30:.2f}",
        ),
        ("GPT-2 124M: tokens per second", lambda x: f"{x['tokens_per_second']:,.0f}"),
    ):
        assert rows[name][:2] == [text(RUNS[x]) for x in BOTH]


def test_times_of_other_libraries_match_the_record():
    rows = _rows("AdamW \\| bytes")
    names = (*BOTH, "flashoptim_jax")
    times = [f"{STEPS[x]['ps_per_parameter']:.2f}" for x in names]
    assert [cells[1] for cells in rows.values()][:3] == times
    assert {cells[1] for cells in rows.values()} == {*times, "not measured"}


def test_bytes_of_other_libraries_match_the_page_of_the_peers():
    peers = (ROOT / "docs" / "peers.md").read_text()
    for name, cells in _rows("AdamW \\| bytes").items():
        assert f"| {float(cells[0]):.2f} |" in peers, name
