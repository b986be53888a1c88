"""``python -m benchmarks rehearsal``, and the example that it rehearses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.places import ROOT, run_python

pytest.importorskip("orbax.checkpoint")

from benchmarks.training import rehearsal
from benchmarks.training.large_model import same_bits

pytestmark = pytest.mark.example

EXAMPLE = ROOT / "examples" / "large_model.py"
MARKER = re.compile(r"# --8<-- \[(start|end):(\w+)\]\n\n*")


def test_a_run_that_is_killed_and_resumed_loses_nothing(tmp_path):
    phases = rehearsal.measure(tmp_path, steps=4, sizes={})
    print(rehearsal.table(phases))
    assert rehearsal.is_faithful(phases)
    change = {x.job.name: x.state_change for x in phases if x.job.source}
    assert 0 < change["resumed"] < 2**-8, "moments are rounded to bfloat16"
    assert change["float16"] == 0, "moments are decoded to float32"
    assert phases[0].losses[16] < phases[0].losses[1] - 1, "it should learn"
    compared = {x.job.name: x for x in phases if x.bits is not None}
    # The last checkpoint of the killed run is incomplete.
    steps = {name: (min(x.losses), max(x.losses)) for name, x in compared.items()}
    assert steps == {
        "killed": (1, 6),
        "resumed": (5, 8),
        "released": (9, 12),
        "float16": (13, 16),
    }


def test_a_lost_moment_or_count_is_a_change():
    state = {"count": np.int32(7), "mu": np.float32([1, -1]), "nu": np.float32([2, 2])}
    assert same_bits.largest_change(state, state) == 0
    for name, old in state.items():
        lost = {**state, name: 0 * old}
        assert same_bits.largest_change(state, lost) == 1
        broken = {**state, name: np.nan * old}
        assert not same_bits.largest_change(state, broken) <= rehearsal.MOST_CHANGE


def test_one_differing_bit_is_counted(tmp_path):
    rows = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
    weights = np.ones((16, 4), np.float32)

    def tree():
        return {"w": jax.device_put(weights, rows), "count": jnp.int32(3)}

    same_bits.keep(tree(), tmp_path / "kept")
    assert same_bits.differing(tree(), [tmp_path / "kept"]) == 0
    weights[9, 2] = np.nextafter(np.float32(1), np.float32(2))
    assert same_bits.differing(tree(), [tmp_path / "kept"]) == 1


def test_the_page_includes_every_section_of_the_example():
    page = (ROOT / "docs" / "large_model.md").read_text()
    included = re.findall(r"^examples/large_model.py:(\w+)$", page, re.M)
    marked = [name for kind, name in MARKER.findall(EXAMPLE.read_text())]
    assert marked == [name for name in included for _ in range(2)]
    assert not re.search(r"^(def|class) ", page, re.M)


def test_the_example_trains_and_continues(tmp_path):
    printed = ""
    for options in ("lowbit_adamw 4", "kahan_adamw 8 --source lowbit_adamw"):
        command = [EXAMPLE, tmp_path / "run", *options.split()]
        ended = run_python(*command, PYTHONPATH=str(ROOT))
        assert ended.returncode == 0, ended.stderr
        printed += ended.stdout
    assert re.findall(r"step (\d): loss \d", printed) == ["4", "8"]
