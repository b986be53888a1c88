"""`precision_assignment` makes each run for its flags exactly once."""

import json
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.training import precision_assignment
from benchmarks.training.images import mixed_training, training_loop
from tools.models.resnet import ResNet
from tools.models.squeezenet import SqueezeNet

pytestmark = [pytest.mark.example, pytest.mark.standard_promotion]


class Network(nn.Module):
    """A network with BatchNorm, like the real ones, that compiles in seconds."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(4, (4, 4), (4, 4))(images)
        x = nn.relu(nn.BatchNorm(not train)(x))
        return nn.Dense(10)(x.mean((1, 2)))


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    monkeypatch.setitem(precision_assignment.MODELS, "resnet", lambda width: Network())


FEW = ["--dataset", "digits", "--train-size", "64", "--test-size", "32"]
FEW += ["--batch-size", "16", "--epochs", "1", "--steps", "2", "--models", "resnet"]


def test_all_assignments_of_a_model_train_with_two_compilations(
    tmp_path, monkeypatch, capsys
):
    traced, trained = [], []
    augment, train = mixed_training.crop_and_flip, precision_assignment.train

    def counted(*args):
        traced.append("step")
        return augment(*args)

    def recorded(trainer, job, *rest):
        trained.append(job)
        return train(trainer, job, *rest)

    monkeypatch.setattr(mixed_training, "crop_and_flip", counted)
    monkeypatch.setattr(precision_assignment, "train", recorded)
    argv = ["--ratios", "0", "1", "--output-dir", str(tmp_path), *FEW]
    runs = precision_assignment.main(argv)

    names = [run["assignment"] for run in runs]
    assert names == ["demote"] * 4 + list(precision_assignment.BASELINES)
    assert all(np.isfinite(run["train_loss"]) for run in runs)
    ratios = {
        (run["assignment"], run["ratio"], run["promotion"]): run["low_ratio"]
        for run in runs
    }
    assert ratios["demote", 0, True] == ratios["demote", 0, False] == 0
    assert ratios["demote", 1, False] > 0.9
    assert ratios["float32", None, False] is None
    assert len(traced) == 2, "one step in float32, one for all assignments"
    assert len(trained) == len(set(trained)) < len(runs), "r = 0 twice is one run"
    printed = capsys.readouterr().out
    assert "decreasing, no promotion" in printed

    written = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert written == runs


def test_a_run_without_promotion_is_no_stand_in_for_one_with_it():
    on = precision_assignment.Job("resnet", "demote", "decreasing", 0.5, True, 0)
    off = on._replace(promotion=False)

    def run(job, promoted):
        return job._asdict() | {"fingerprint": "f", "promoted": promoted}

    repeated = precision_assignment.repeated
    assert repeated(off, "f", [run(on, promoted=False)])["promotion"] is False
    assert repeated(off, "f", [run(on, promoted=True)]) is None
    assert repeated(on, "f", [run(off, promoted=False)]) is None
    assert repeated(off, "other", [run(off, promoted=False)]) is None
    assert repeated(off._replace(seed=1), "f", [run(off, promoted=False)]) is None


def test_all_high_precision_trains_like_float32_nearly():
    """fp(6, 9) has 10 significant bits; loss scaling and rounding change the loss."""
    model = Network()
    args = precision_assignment.parse_args(["--batch-size", "16", "--epochs", "2"])
    trainer = precision_assignment.make_trainer(model, args, 4, flip=False)
    job = precision_assignment.Job("resnet", "demote", "decreasing", 0, True, 0)
    images = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3), np.uint8)
    labels = np.arange(16, dtype=np.int32) % 10

    def losses(assignment, tx):
        state = mixed_training.init_state(model, tx, seed=0)
        state = mixed_training.start(state, assignment, promotes=True)
        found = []
        for _ in range(4):
            state, (loss, _) = trainer.step(state, jax.random.key(1), images, labels)
            found.append(float(loss))
        return found

    high = precision_assignment.assign(trainer.plan, job)
    low = precision_assignment.assign(trainer.plan, job._replace(ratio=1.0))
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
    assert isinstance(state, training_loop.TrainState)


def _run(assignment="demote", ratio=None, promotion=False, seed=0, **found):
    order = "decreasing" if assignment == "demote" else None
    return {
        "model": "resnet",
        "assignment": assignment,
        "order": order,
        "ratio": ratio,
        "promotion": promotion,
        "seed": seed,
        "low_ratio": None if assignment == "float32" else (ratio or 0.5),
        "last_accuracy": 0.5,
        "best_accuracy": 0.5,
        "train_loss": 1.0,
    } | found


def test_a_run_that_diverged_stays_in_the_means_and_is_marked():
    lost = {"last_accuracy": 0.1, "best_accuracy": 0.3, "train_loss": np.nan}
    runs = [_run(ratio=1, **lost), _run(ratio=1, seed=1, last_accuracy=0.5)]
    row = precision_assignment.table(runs).splitlines()[-1].strip("| ").split(" | ")
    assert row[-4:] == ["30.0 ± 28.3", "40.0 ± 14.1", "nan ± nan", "1/2"]


@pytest.mark.parametrize(
    ("model", "last_features"),
    [
        (SqueezeNet(0.25, stem_stride=2), (8, 2, 2, 10)),
        (ResNet(8, (1, 1, 1, 1), stem_stride=2), (8, 2, 2, 64)),
    ],
)
def test_a_stem_of_stride_2_quarters_what_is_computed(model, last_features):
    """From 2 x 2 features at the end, where stride 1 leaves 4 x 4."""

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
