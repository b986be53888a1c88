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


def _line(axes, label):
    (line,) = (line for line in axes.get_lines() if line.get_label() == label)
    return line


@pytest.fixture
def drawn(monkeypatch):
    """``drawn(runs)``: the axes that a panel is drawn into."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots()

    def draw(runs):
        tradeoff.draw_panel(axes, runs)
        return axes

    yield draw
    pyplot.close(figure)


def test_a_line_has_the_means_over_seeds_in_the_order_of_the_ratios(drawn):
    runs = [
        _run(ratio=r, promotion=True, seed=s, low_ratio=r - s / 10, last_accuracy=a)
        for r, s, a in ((1, 0, 0.2), (0.5, 0, 0.4), (1, 1, 0.3), (0.5, 1, 0.5))
    ]
    axes = drawn(runs)
    line = _line(axes, "decreasing, promotion")
    np.testing.assert_allclose(line.get_xdata(), [0.45, 0.95])
    np.testing.assert_allclose(line.get_ydata(), [45, 25])
    (band,) = axes.collections
    extents = band.get_paths()[0].get_extents()
    np.testing.assert_allclose([extents.ymin, extents.ymax], [20, 50])


def test_baselines_are_markers_and_float32_is_a_dashed_line(drawn):
    axes = drawn([_run("float32"), _run("uniform", low_ratio=0.98, last_accuracy=0.6)])
    float32 = _line(axes, "float32")
    assert float32.get_linestyle() == "--"
    np.testing.assert_allclose(float32.get_ydata(), [50, 50])
    (marker,) = (
        line
        for line in axes.get_lines()
        if line.get_marker() == tradeoff.BASELINES["uniform"][1]
    )
    np.testing.assert_allclose(marker.get_xydata(), [[0.98, 60]])


def test_a_run_that_diverged_stays_in_the_means_and_is_marked(drawn):
    lost = {"last_accuracy": 0.1, "best_accuracy": 0.3, "train_loss": np.nan}
    runs = [_run(ratio=1, **lost), _run(ratio=1, seed=1, last_accuracy=0.5)]
    axes = drawn(runs)
    line = _line(axes, "decreasing, no promotion")
    np.testing.assert_allclose(line.get_ydata(), [30])
    assert "loss not finite" in axes.get_legend_handles_labels()[1]

    row = tradeoff.table(runs).splitlines()[-1].strip("| ").split(" | ")
    assert row[-4:] == ["30.0 ± 28.3", "40.0 ± 14.1", "nan ± nan", "1/2"]


@pytest.mark.parametrize("models", [1, 2])
def test_each_model_has_a_panel_of_one_picture(tmp_path, models):
    names = ["resnet", "squeezenet"][:models]
    runs = [_run("float32", model=model) for model in names]
    tradeoff.plot(tmp_path / "figure.png", runs)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


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
        with jax.numpy_dtype_promotion("standard"):
            init = jax.make_jaxpr(lambda key: model.init(key, images, train=True))
            apply = jax.eval_shape(
                lambda key: model.init_with_output(key, images, train=True)[0],
                jax.random.key(0),
            )
            return str(init(jax.random.key(0))), apply.shape

    def shape(features):
        return f"f32[{','.join(map(str, features))}]"

    text, logits = traced(model)
    assert logits == (8, 10)
    assert shape(last_features) in text
    batch, height, width, channels = last_features
    text, logits = traced(model.clone(stem_stride=1))
    assert logits == (8, 10)
    assert shape((batch, 2 * height, 2 * width, channels)) in text
