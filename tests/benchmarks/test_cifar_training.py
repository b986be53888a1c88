"""Optimizers of the runs on CIFAR-10, and their steps."""

import argparse
import functools
import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import records
from benchmarks.training import cifar_optimizers
from benchmarks.training.images import cifar_data, training_loop
from tools.models.resnet import ResNet, cast_weights

pytestmark = [pytest.mark.example, pytest.mark.standard_promotion]

# One block per stage keeps compilation short.
WIDTH, BLOCKS = 8, (1, 1)


def test_the_tables_have_mean_and_spread_over_seeds(tmp_path, monkeypatch, capsys):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (64, 32, 32, 3)).astype(np.uint8)
    digits = "digits", *[(images, np.arange(64) % 10)] * 2
    monkeypatch.setattr(cifar_data, "load_images", lambda *_: digits)
    small = functools.partial(ResNet, blocks=BLOCKS)
    monkeypatch.setattr(cifar_optimizers, "ResNet", small)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    few = ["--test-size", "32", "--batch-size", "32", "--width", str(WIDTH)]
    few += ["--epochs", "1", "--seeds", "2", "--optimizer", "lowbit_sgd"]
    cifar_optimizers.main(few)
    (path,) = (tmp_path / "runs" / "cifar_optimizers").iterdir()
    record = json.loads(path.read_text())
    assert record["dataset"] == "digits"
    found = record["figures"]["test accuracy, %"]["lowbit_sgd"]
    assert found["mean"] == pytest.approx(np.mean(found["values"]))
    assert len(found["values"]) == 2
    printed = capsys.readouterr().out
    both = f"{found['mean']:.5f} ± {found['std']:.5f}"
    assert f"test accuracy, %: lowbit_sgd = {both}" in printed


def _scaled_network(name, loss_scale):
    """The initial state of a float16 network, and its step on four noisy images."""
    model = ResNet(WIDTH, BLOCKS, dtype=jnp.float16)
    options = argparse.Namespace(loss_scale=loss_scale, dtype="float16")
    tx = cifar_optimizers.build(name, 0.1, options, seed=0)
    dtype = jnp.float32 if name == "sgd" else jnp.float16
    store = functools.partial(cast_weights, dtype=dtype)
    state = training_loop.init_state(model, tx, store, seed=0)
    step = training_loop.make_train_step(model, flip=False)
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    labels = np.arange(4, dtype=np.int32)
    return state, lambda state: step(state, jax.random.key(1), images, labels)


@pytest.mark.parametrize("name", ["master_copy_sgd", "sgd"])
def test_a_step_that_overflows_leaves_the_network_as_it_was(name):
    # The scale begins above float16's largest number, and overflows halve it.
    state, step = _scaled_network(name, "backoff")
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
    state, step = _scaled_network("master_copy_sgd", "backoff")
    text = str(jax.make_jaxpr(step)(state))
    convolutions = re.findall(r":(\w+)\[[\d,]*\] = conv_general_dilated", text)
    assert len(convolutions) > 15
    assert set(convolutions) == {"f16"}
