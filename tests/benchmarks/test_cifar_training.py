"""Optimizers and flags of the runs on CIFAR-10, and their steps and bytes."""

import argparse
import functools
import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowbit_optax
from benchmarks import records
from benchmarks.training import accuracy_tables, cifar_optimizers
from benchmarks.training.images import cifar_data, optimizer_choice, training_loop
from lowbit_optax.states.checkpoints import storage_formats
from tools.models.resnet import ResNet

pytestmark = [pytest.mark.example, pytest.mark.standard_promotion]

# One block per stage keeps compilation short. The large leaves have 9216 parameters.
WIDTH, BLOCKS = 16, (1, 1)
QUANTIZED = 16 * 32 * 9 + 32 * 32 * 9


def test_extra_bits_are_stored_by_the_rounding_that_is_asked_for():
    options = _options(bits=8, rounding="toward_zero", microbatches=2)
    tx = optimizer_choice.build("extra_bits_adamw", 1e-3, options, seed=0)
    params = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    assert " toward_zero_8_bits_" in storage_formats(tx, params)["params"]


def _flags(row):
    """The names and the texts of the options of a row."""
    words = accuracy_tables.ROWS[row].split()
    names = [flag.removeprefix("--").replace("-", "_") for flag in words[::2]]
    return dict(zip(names, words[1::2], strict=True))


def test_the_options_of_the_rows_and_of_the_command_reach_the_runs(
    tmp_path, monkeypatch
):
    runs = []
    train = lambda args, dataset, *run: runs.append((args, *run)) or {"figure": 0.0}
    empty = cifar_data.Dataset("digits", *[cifar_data.Split([], [])] * 2)
    monkeypatch.setattr(cifar_optimizers, "train", train)
    monkeypatch.setattr(cifar_data, "load", lambda args: empty)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    every = ["--rows", *accuracy_tables.ROWS]
    accuracy_tables.main([*every, "--width", "8", "--compute-dtype", "bfloat16"])
    for row, (args, optimizer, seed) in zip(accuracy_tables.ROWS, runs, strict=True):
        flags = _flags(row)
        for name, text in flags.items():
            value = getattr(args, name)
            assert value == type(value)(text), (row, name)
        assert (optimizer, seed) == (flags["optimizer"], 0)
        assert (args.width, args.compute_dtype) == (8, "bfloat16")
        assert row.startswith(optimizer)
        if optimizer.endswith("sgd"):
            assert args.learning_rate == pytest.approx(0.025 * args.microbatches)
    args, *_ = runs[list(accuracy_tables.ROWS).index("lpmm_sgd-10-n4")]
    found = args.bits, args.rounding, args.microbatches, args.batch_size
    assert found == (10, "stochastic", 4, 32)


def test_the_tables_refuse_the_options_of_their_rows(monkeypatch, capsys):
    monkeypatch.setattr(records, "run", lambda *_: None)
    of_rows = set().union(*map(_flags, accuracy_tables.ROWS))
    assert of_rows <= set(accuracy_tables.OF_ROWS)
    for flags in (["--batch-size", "16"], ["--compare"], ["--loss-scale", "backoff"]):
        with pytest.raises(SystemExit):
            accuracy_tables.main(flags)
        assert f"{flags[0]} is an option of the rows" in capsys.readouterr().err


def _options(**others):
    given = {"weight_decay": 5e-4, "bits": 12, "rounding": "stochastic"}
    given |= {"microbatches": 1, "loss_scale": None, "dtype": "float32"}
    return argparse.Namespace(**given | others)


def _network(name, options, rate=0.1, width=WIDTH, compute=jnp.float32):
    """The initial state of a network, and its step on four noisy images."""
    model = ResNet(width, BLOCKS, dtype=compute)
    tx = optimizer_choice.build(name, rate, options, seed=0)
    store = optimizer_choice.weight_storage(name, options)
    state = training_loop.init_state(model, tx, store, seed=0)
    step = training_loop.make_train_step(model, flip=False)
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    labels = np.arange(4, dtype=np.int32)
    return state, lambda state: step(state, jax.random.key(1), images, labels)


@pytest.mark.parametrize("name", ["sgd", "lpmm_sgd"])
def test_microbatches_update_the_weights_every_nth_step(name):
    rates = []

    def rate(count):
        jax.debug.callback(lambda c: rates.append(int(c)), count)
        return 0.1

    state, step = _network(name, _options(microbatches=2), rate)
    read = lambda state: jax.device_get(lowbit_optax.lpmm.dequantize(state.params))
    params = [read(state)]
    for _ in range(4):
        state, _ = step(state)
        params.append(read(state))
    chex.assert_trees_all_equal(params[0], params[1])
    chex.assert_trees_all_equal(params[2], params[3])
    for before, after in ((0, 2), (2, 4)):
        with pytest.raises(AssertionError):
            chex.assert_trees_all_equal(params[before], params[after])
    jax.effects_barrier()
    assert max(rates) == 1, "the schedule counts updates"


def test_bytes_a_parameter_are_of_the_arrays_that_the_codes_stand_for():
    state, _ = _network("lpmm_sgd", _options(microbatches=2))
    leaves = jax.tree.leaves(jax.eval_shape(lowbit_optax.lpmm.dequantize, state.params))
    size = sum(leaf.size for leaf in leaves)
    # Weights, momenta and sums have 12, 8 and 8 bits; small leaves are float32.
    least = QUANTIZED * 28 / 8 + 3 * 4 * (size - QUANTIZED)
    found = training_loop.bytes_per_parameter(state) * size
    assert least < found < 1.15 * least  # with scales, counts and blanks


def test_the_tables_have_mean_and_spread_over_seeds(tmp_path, monkeypatch, capsys):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (64, 32, 32, 3)).astype(np.uint8)
    digits = "digits", *[(images, np.arange(64) % 10)] * 2
    monkeypatch.setattr(cifar_data, "load_images", lambda *_: digits)
    small = functools.partial(ResNet, blocks=BLOCKS)
    monkeypatch.setattr(cifar_optimizers, "ResNet", small)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    row = "lpmm_sgd-8-nearest"
    few = ["--test-size", "32", "--width", str(WIDTH), "--epochs", "1"]
    accuracy_tables.main(["--rows", row, "--seeds", "2", *few])
    record = json.loads((tmp_path / "runs" / "accuracy_tables.json").read_text())
    assert record["dataset"] == "digits"
    found = record["figures"]["test accuracy, %"][row]
    assert found["mean"] == pytest.approx(np.mean(found["values"]))
    assert len(found["values"]) == 2
    printed = capsys.readouterr().out
    assert f"| {row} | {found['mean']:.3f} ± {found['std']:.3f} |" in printed


def _scaled_network(name, loss_scale, **others):
    options = _options(loss_scale=loss_scale, dtype="float16", **others)
    return _network(name, options, width=8, compute=jnp.float16)


@pytest.mark.parametrize(("name", "microbatches"), [("master_copy_sgd", 1), ("sgd", 2)])
def test_a_step_that_overflows_leaves_the_network_as_it_was(name, microbatches):
    # The scale begins above float16's largest number, and overflows halve it.
    state, step = _scaled_network(name, "backoff", microbatches=microbatches)
    large = state.opt_state._replace(scale=jnp.float32(2.0**24))
    state = state.replace(opt_state=large)
    before = jax.device_get(state)
    state, loss = step(state)
    after = jax.device_get(state)
    assert np.isfinite(loss)
    assert after.opt_state.skipped == 1
    assert after.opt_state.scale == 2.0**23
    for part in ("params", "batch_stats"):
        chex.assert_trees_all_equal(getattr(after, part), getattr(before, part))
    chex.assert_trees_all_equal(
        after.opt_state.inner_state, before.opt_state.inner_state
    )
    for _ in range(20):
        state, _ = step(state)
    assert 1 < state.opt_state.skipped < 15
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(jax.device_get(state.params), before.params)


def test_gradients_of_float16_training_are_float16():
    state, step = _scaled_network("master_copy_sgd", 1024.0)
    text = str(jax.make_jaxpr(step)(state))
    convolutions = re.findall(r":(\w+)\[[\d,]*\] = conv_general_dilated", text)
    assert len(convolutions) > 15
    assert set(convolutions) == {"f16"}
