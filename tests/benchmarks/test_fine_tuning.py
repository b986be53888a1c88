"""The benchmark ``fine_tuning``, with the smallest model and few steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.training import fine_tuning
from benchmarks.training.compute_optimal import held_out_windows
from benchmarks.training.text import kept_runs
from benchmarks.training.text.stdlib_text import Text
from lowbit_optax import lpmm
from tools.models.gpt import GPT

pytestmark = pytest.mark.standard_promotion

PLAN = fine_tuning.Plan(GPT(1, 64, 2, 16), first_steps=3, steps=3, batch=2)
NAMES = ("float32", "8 bits", "LoRA")
SMALL = fine_tuning.SIZES["small"].model


def words(seed):
    drawn = np.random.default_rng(seed).integers(97, 123, 2000).astype(np.uint8)
    return Text(drawn[:1500], drawn[1500:])


def test_runs_are_complete_and_none_is_repeated(tmp_path):
    texts = words(0), words(1)
    run = lambda known: fine_tuning.train_all(
        PLAN, NAMES, (1e-3,), 2, tmp_path, known, texts
    )
    run({})
    found = kept_runs.complete(tmp_path, {})
    assert all(list(runs) == [0, 1] for runs in found.values())
    losses = [x["held_out"] for runs in found.values() for x in runs.values()]
    assert len(set(losses)) == len(losses) == 6
    times = {x: x.stat().st_mtime_ns for x in tmp_path.iterdir()}
    run(found)
    assert {x: x.stat().st_mtime_ns for x in tmp_path.iterdir()} == times
    assert len(list(tmp_path.glob("start_*.npz"))) == 2


def test_the_rate_0_shows_the_loss_before_fine_tuning():
    weights, loss = PLAN.model.init(jax.random.key(0)), jax.jit(PLAN.model.loss)
    windows = held_out_windows(PLAN.model, words(1))
    rounded = lpmm.dequantize(fine_tuning.quantized(4, weights))
    for name, of_row in (("float32", weights), ("4 bits", rounded)):
        row = fine_tuning.FULL[name]
        found = fine_tuning.tuned(PLAN, row, 0.0, 0, weights, words(1))
        wanted = np.mean([loss(of_row, tokens) for tokens in windows])
        assert found == pytest.approx(wanted, rel=1e-6)


def test_updates_are_compared_with_the_spacing_of_codes():
    weights = {"w": jnp.ones((64, 64))}
    sizes = fine_tuning.update_sizes(PLAN._replace(steps=1000), weights)
    assert sizes["spacings"]["6 bits"] == pytest.approx(1 / 31, rel=0.01)
    assert sizes["spacings"]["4 bits"] == pytest.approx(1 / 7, rel=0.01)
    assert sizes["sums of rates"]["0.001"] == pytest.approx(0.5, rel=0.01)


def test_runs_are_paired_by_rate_and_seed():
    ends = {
        "float32, 0.001": [1.0, 2.0, 3.0],
        "float32, 0.0001": [1.5, 2.5, 3.5],
        "8 bits, 0.001": [1.75, 2.5, 3.25],
        "8 bits, 0.0001": [1.5, 2.75],
        "LoRA, 0.001": [2.0, 2.0, 2.0],
        "LoRA, 0.0001": [3.0, 3.0, 3.0],
    }
    found = {
        name: {seed: {"held_out": x} for seed, x in enumerate(each)}
        for name, each in ends.items()
    }
    record = {"margin": 0, **fine_tuning.figures(found, SMALL)}
    row = record["rows"]["8 bits"]
    gaps = {rate: each["gap"]["pairs"] for rate, each in row["rates"].items()}
    assert gaps == {"0.0001": [0.0, 0.25], "0.001": [0.75, 0.5, 0.25]}
    assert row["rates"]["0.001"]["gap"]["verdict"] == "not finished"
    # Both rates have the mean 2.125 over the first two seeds, so the first rate counts.
    assert (row["best"], record["rows"]["LoRA"]["best"]) == ("0.0001", "0.001")
    assert row["minus_lora"]["pairs"] == [-0.5, 0.75]
    assert "gap" not in record["rows"]["float32"]["rates"]["0.001"]
    assert fine_tuning._recorded(record) == found
    assert fine_tuning.text(record).count("\n") == 4


def test_lora_starts_from_the_quantized_weights_and_has_equal_bytes():
    weights = SMALL.init(jax.random.key(0))
    rank = fine_tuning.rank_of(SMALL)
    rows = fine_tuning.rows_of(SMALL)
    room = fine_tuning.bytes_of(rows["8 bits"], SMALL)
    assert fine_tuning.bytes_of(rows["LoRA"], SMALL) >= room
    assert fine_tuning.bytes_of(fine_tuning.lora(rank - 1), SMALL) < room
    tx = rows["LoRA"].build(1e-3)
    added, _, fixed = rows["LoRA"].start(tx, weights)
    merged = fine_tuning.merged(added, fixed)
    for got, want in zip(
        jax.tree.leaves(merged), jax.tree.leaves(lpmm.dequantize(fixed)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "most"),
    [("float32", 12.01), ("float8", 1.75), ("8 bits", 1.85), ("6 bits", 1.6)],
)
def test_rows_have_the_bytes_of_their_names(name, most):
    size = fine_tuning.bytes_of(fine_tuning.FULL[name], SMALL)
    count = fine_tuning.model_size(SMALL)
    assert count == 217_664
    assert most - 0.2 < size / count < most
    if name.endswith("bits"):
        stored = fine_tuning.quantized(int(name[0]), SMALL.init(jax.random.key(0)))
        assert stored["layers"]["qkv"].bits == int(name[0])
        assert stored["norm"].dtype == jnp.float32
