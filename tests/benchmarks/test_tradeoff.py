"""The figures that `precision_assignment` draws, and the networks that it trains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.training.images import tradeoff
from tools.models.resnet import ResNet
from tools.models.squeezenet import SqueezeNet

pytestmark = pytest.mark.example


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
    row = tradeoff.table(runs).splitlines()[-1].strip("| ").split(" | ")
    assert row[-4:] == ["30.0 ± 28.3", "40.0 ± 14.1", "nan ± nan", "1/2"]


@pytest.mark.parametrize(
    ("model", "last_features"),
    [
        (SqueezeNet(0.25, stem_stride=2), (8, 2, 2, 10)),
        (ResNet(8, (1, 1, 1, 1), stem_stride=2), (8, 2, 2, 64)),
    ],
)
def test_a_stem_of_stride_2_quarters_what_is_computed(model, last_features):
    """The last features are 2 x 2; with stride 1, they are 4 x 4."""

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
