"""`precision_assignment` makes each run for its flags exactly once."""

import argparse
import json
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import records
from benchmarks.training import precision_assignment
from benchmarks.training.images import cifar_data, mixed_training
from lowbit_optax import precision

pytestmark = [pytest.mark.example, pytest.mark.standard_promotion]


class Network(nn.Module):
    """A network with BatchNorm, like the real ones, that compiles in seconds."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(4, (4, 4), (4, 4))(images)
        x = nn.relu(nn.BatchNorm(not train)(x))
        return nn.Dense(10)(x.mean((1, 2)))


def test_equal_runs_of_a_model_train_once_with_two_compilations(
    tmp_path, monkeypatch, capsys
):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (48, 32, 32, 3)).astype(np.uint8)
    digits = "digits", *[(images, np.arange(48) % 10)] * 2
    monkeypatch.setattr(cifar_data, "load_images", lambda *_: digits)
    monkeypatch.setattr(precision_assignment, "MODEL", Network())
    monkeypatch.setattr(records, "ROOT", tmp_path)
    traced, trained = [], []
    augment, train = mixed_training.crop_and_flip, precision_assignment.train

    def counted(*args):
        traced.append("step")
        return augment(*args)

    def recorded(run, *rest):
        trained.append(run)
        return train(run, *rest)

    monkeypatch.setattr(mixed_training, "crop_and_flip", counted)
    monkeypatch.setattr(precision_assignment, "train", recorded)
    few = ["--batch-size", "16", "--epochs", "1"]
    few += ["--train-size", "48", "--test-size", "48"]
    precision_assignment.main(["--ratios", "0", "1", *few])

    record = json.loads((tmp_path / "runs" / "precision_assignment.json").read_text())
    found = record["figures"]
    names = ["r = 0, promotion", "r = 1, promotion", "r = 0", "r = 1"]
    names += [*precision_assignment.BASELINES, "float32"]
    assert [*found["training loss"]] == names
    assert all(np.isfinite(x["mean"]) for x in found["training loss"].values())
    ratios = {name: x["mean"] for name, x in found["low-precision ratio"].items()}
    for name in ("r = 0, promotion", "r = 0", "float32"):
        assert ratios[name] == 0
    assert ratios["r = 1"] > 0.9
    assert not any(x["mean"] for x in found["diverged"].values())
    assert len(traced) == 2, "one step in float32, one for all assignments"
    assert len(trained) < len(names), "r = 0 twice is one run"
    assert "diverged: r = 1, promotion = 0.0" in capsys.readouterr().out


@pytest.mark.parametrize("is_promoted", [False, True])
def test_a_run_with_promotion_stands_for_one_without_if_nothing_was_promoted(
    is_promoted, monkeypatch
):
    trained = []

    def train(run, dataset, args, seed):
        trained.append((run.promotes, seed))
        return {"training loss": 0.0}, is_promoted and run.promotes

    trainer = precision_assignment.Trainer("a model", None, *[None] * 3)
    run = precision_assignment.Run(trainer, np.zeros(3), True)
    runs = {"with": run, "without": run._replace(promotes=False)}
    dataset = cifar_data.Dataset("digits", *[cifar_data.Split([], [])] * 2)
    for name, found in (
        ("runs_of", lambda *_: runs),
        ("make_trainer", lambda *_: trainer),
        ("train", train),
    ):
        monkeypatch.setattr(precision_assignment, name, found)
    monkeypatch.setattr(cifar_data, "load", lambda args: dataset)
    args = argparse.Namespace(ratios=[], seeds=2, batch_size=1)
    precision_assignment.measure(args)
    both = [(True, 0), (False, 0), (True, 1), (False, 1)]
    assert trained == (both if is_promoted else both[::2])


def test_seeds_whose_loss_is_nan_have_diverged_and_are_in_all_means(monkeypatch):
    state = argparse.Namespace(ratio_sum=1.0, step=2, assignment=np.zeros(3))
    trainer = precision_assignment.Trainer("a model", None, *[None] * 3)
    run = precision_assignment.Run(trainer, state.assignment, False)
    dataset = cifar_data.Dataset("digits", *[cifar_data.Split([], [])] * 2)
    ends = {0: 0.5, 1: np.nan, 2: 0.25, 3: 0.25}
    fit = lambda step, state, dataset, args, seed: (state, ends[seed])
    accuracies = iter((0.9, 0.1, 0.9, 0.9))
    for module, name, found in (
        (precision_assignment, "runs_of", lambda *_: {"run": run}),
        (precision_assignment, "make_trainer", lambda *_: trainer),
        (cifar_data, "load", lambda args: dataset),
        (mixed_training, "init_state", lambda *_: state),
        (mixed_training, "start", lambda *_: state),
        (mixed_training, "fit", fit),
        (mixed_training, "evaluate", lambda *_: next(accuracies)),
    ):
        monkeypatch.setattr(module, name, found)
    args = argparse.Namespace(ratios=[], seeds=4, batch_size=1)
    record = precision_assignment.measure(args)
    found = {x: each["run"] for x, each in record["figures"].items()}
    assert found["diverged"]["values"].tolist() == [0, 1, 0, 0]
    assert found["diverged"]["mean"] == 0.25
    assert found["accuracy, %"]["mean"] == pytest.approx(70)
    assert found["low-precision ratio"]["mean"] == 0.5
    assert np.isnan(found["training loss"]["mean"])
    shown = records.figures(record)
    assert "figures: accuracy, %: run = 70.00000 ± 40.00000" in shown
    assert "figures: training loss: run = nan ± nan" in shown
    assert "figures: diverged: run = 0.25000 ± 0.50000" in shown


def test_all_high_precision_trains_like_float32_nearly():
    """fp(6, 9) has 10 significant bits; loss scaling and rounding change the loss."""
    model = Network()
    args = argparse.Namespace(
        batch_size=16, epochs=2, learning_rate=0.1, weight_decay=5e-4
    )
    trainer = precision_assignment.make_trainer(model, args, 4, flip=False)
    images = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3), np.uint8)
    labels = np.arange(16, dtype=np.int32) % 10

    def losses(assignment, tx):
        state = mixed_training.init_state(model, tx, seed=0)
        state = mixed_training.start(state, assignment, promotes=True)
        found = []
        for _ in range(4):
            state, loss = trainer.step(state, jax.random.key(1), images, labels)
            found.append(float(loss))
        return found

    high, low = (precision.demote(trainer.plan, ratio) for ratio in (0, 1))
    exact = losses(None, trainer.float32)
    assert losses(high, trainer.mixed) == pytest.approx(exact, rel=0.01)
    assert losses(low, trainer.mixed) != losses(high, trainer.mixed)


def test_a_run_keeps_the_initial_state():
    """The step donates its state, but the next run needs the initial state again."""
    model = Network()
    tx = mixed_training.make_optimizer(lambda step: 0.1, 5e-4, period=None)
    step = mixed_training.make_train_step(model, flip=False)
    state = mixed_training.init_state(model, tx, seed=0)
    images, labels = np.zeros((4, 32, 32, 3), np.uint8), np.zeros(4, np.int32)
    results = [
        step(
            mixed_training.start(state, None, False), jax.random.key(0), images, labels
        )
        for _ in range(2)
    ]
    chex.assert_trees_all_equal(*results)
    assert isinstance(state, mixed_training.MixedState)


def test_a_stem_of_stride_2_quarters_what_is_computed():
    """From 2 x 2 features at the end, where stride 1 leaves 4 x 4."""
    model, last_features = precision_assignment.MODEL, (8, 2, 2, 64)

    def traced(model):
        images = jnp.zeros((8, 32, 32, 3))
        run = lambda key: model.init_with_output(key, images, train=True)[0]
        with jax.numpy_dtype_promotion("standard"):
            jaxpr = jax.make_jaxpr(run)(jax.random.key(0))
        (logits,) = jaxpr.out_avals
        assert logits.shape == (8, 10)
        return str(jaxpr)

    batch, height, width, channels = last_features
    twice = batch, 2 * height, 2 * width, channels
    for network, features in (
        (model, last_features),
        (model.clone(stem_stride=1), twice),
    ):
        assert f"f32[{','.join(map(str, features))}]" in traced(network)
