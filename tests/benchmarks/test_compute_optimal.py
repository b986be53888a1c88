"""The runs, records and curves of a GPT trained to the end of its schedule."""

import sys

import jax
import numpy as np
import optax
import pytest

from benchmarks import ROOT
from benchmarks.training import compute_optimal
from benchmarks.training.text import stdlib_text
from benchmarks.training.text.optimal_rows import ROWS, loss_and_grads
from tools.models.gpt import GPT

pytestmark = pytest.mark.standard_promotion  # optax's

MODEL = GPT(1, 32, 2, 16)
SETTINGS = {"steps": 12, "batch_size": 2, "learning_rate": 1e-2}


def test_a_run_has_curves_and_is_the_same_again(monkeypatch):
    monkeypatch.setattr(compute_optimal, "POINTS", 4)
    monkeypatch.setattr(compute_optimal, "TAIL", 2)
    random = np.random.default_rng(0)
    text = stdlib_text.Text(*random.integers(0, 64, (2, 5000), np.uint8))
    train = lambda: compute_optimal.train("lowbit", 0, MODEL, text, SETTINGS)
    run = train()
    assert train() == run
    assert (len(run["losses"]), len(run["held_out"])) == (4, 2)
    assert run["losses"][-1] < run["losses"][0]


@pytest.mark.parametrize(
    ("options", "name"),
    [([], "compute_optimal"), (["--large"], "compute_optimal_large")],
)
def test_each_size_has_a_record(options, name, monkeypatch):
    monkeypatch.setattr(compute_optimal.records, "load", lambda path: sys.exit(path))
    with pytest.raises(SystemExit) as found:
        compute_optimal.main([*options, "--draw"])
    assert found.value.code == ROOT / "benchmarks" / "training" / f"{name}.json"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", "float32"),
        ("lowbit", "bfloat16"),
        # In float8, small gradients would be 0.
        ("float8, 8 extra bits", "bfloat16"),
        ("MXFP8, 8 extra bits", "float32"),
        ("LPMM, 12 bits", "float32"),
    ],
)
def test_gradients_have_16_bits_or_more(name, dtype):
    row = ROWS[name]
    tx = row.build(optax.constant_schedule(1e-3))

    def grads(master, tokens):
        params, _ = row.start(tx, master)
        return loss_and_grads(MODEL.loss, params, tokens)[1]

    tokens = np.zeros((2, MODEL.context + 1), np.int32)
    found = jax.eval_shape(grads, MODEL.init(jax.random.key(0)), tokens)
    assert found["embedding"].dtype == dtype
