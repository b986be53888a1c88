"""nanoGPT's protocols for Shakespeare at a tiny size, and dropout."""

import argparse
import json
import string
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import records
from benchmarks.device import shakespeare_runs
from benchmarks.device.job import Job
from benchmarks.training import shakespeare
from benchmarks.training.text import shakespeare_rows
from benchmarks.training.text.shakespeare_rows import POINTS, VOCABULARY, Protocol
from tools.models.gpt import GPT

pytestmark = pytest.mark.standard_promotion  # optax's

TINY = Protocol(
    GPT(1, 16, 2, 8, vocabulary=VOCABULARY, dropout=0.2), 2, 200, evaluations=4
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(string.printable[:VOCABULARY] * 10)
    return path


def test_a_run_has_all_losses_and_is_not_trained_again(path, tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "CPU", TINY)
    args = argparse.Namespace(seeds=1, rows=["float32"], text=path)
    folder = tmp_path / "runs"
    shakespeare._train_all(args, folder, {"runs": {}})
    run = json.loads((folder / "float32_0.json").read_text())
    assert (len(run["curve"]), len(run["validations"])) == (POINTS, 4)
    assert run["validation"] == run["validations"][-1] < np.log(VOCABULARY)
    assert run["best"] == min(run["validations"])
    assert run["training"] < run["curve"][0]

    monkeypatch.setattr(shakespeare, "train", lambda *args: pytest.fail("trained"))
    shakespeare._train_all(args, folder, {"runs": {}})
    runs = shakespeare._gathered(folder, {"runs": {}})
    assert runs["float32"]["validation"]["values"] == [run["validation"]]
    last = records.shown(runs["float32"]["validation"], 5)
    assert f"float32: validation = {last}" in records.figures({"runs": runs})


def test_a_run_without_time_stops_and_has_its_last_step(path, monkeypatch):
    monkeypatch.setattr(shakespeare_runs, "SMALL", TINY)
    monkeypatch.setattr(Job, "say", lambda *args, **message: None)
    job = Job(True, None, frozenset(), str(path), time.monotonic(), has_device=True)
    found = shakespeare_runs.measure(job, "float32")
    assert (found["step"], found["steps"]) == (4, 200)
    assert (len(found["curve"]), len(found["validations"])) == (2, 1)


class MeanOfTargets(NamedTuple):
    """A model whose loss is the mean of the numbers that it should predict."""

    context: int

    def loss(self, params, tokens):
        return jnp.mean(tokens[:, 1:], dtype=jnp.float32)


@pytest.mark.parametrize("windows", [1, 67, 70])
@pytest.mark.parametrize("rest", [1, 8])
def test_validation_predicts_each_held_out_character_once(windows, rest):
    """Only the last characters, fewer than the context, are left out."""
    held_out = np.arange(windows * 8 + rest)
    loss = shakespeare_rows.validation_loss(MeanOfTargets(8), {}, held_out)
    assert loss == pytest.approx(held_out[1 : windows * 8 + 1].mean(), rel=1e-6)


def test_dropout_is_only_used_with_a_key():
    model = GPT(2, 16, 2, 8)
    params = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 256)
    loss = lambda rate, key=None: float(
        model._replace(dropout=rate).loss(params, tokens, key)
    )
    first, second = jax.random.split(jax.random.key(2))
    assert loss(0.5) == loss(0.0)
    assert loss(0.0, first) == pytest.approx(loss(0.0), rel=1e-5)
    assert len({loss(0.0), loss(0.5, first), loss(0.5, second)}) == 3


def test_dropout_keeps_the_mean():
    model = GPT(1, 16, 2, 8, dropout=0.2)
    found = model._dropped(jnp.ones(100_000, jnp.bfloat16), jax.random.key(0))
    assert found.dtype == jnp.bfloat16
    assert jnp.mean(found == 0) == pytest.approx(0.2, abs=0.01)
    assert set(np.unique(found.astype(np.float32))) == {0.0, 1.25}
