"""The figures that `precision_assignment` draws, and the networks that it trains."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.training.images import tradeoff
from tools.models.resnet import ResNet
from tools.models.shufflenet import ShuffleNet, shuffle_channels
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


def test_a_line_has_the_means_over_seeds_in_the_order_of_the_ratios(tmp_path):
    path = tmp_path / "figure.png"
    runs = [
        _run(ratio=r, promotion=True, seed=s, low_ratio=r - s / 10, last_accuracy=a)
        for r, s, a in ((1, 0, 0.2), (0.5, 0, 0.4), (1, 1, 0.3), (0.5, 1, 0.5))
    ]
    runs.append(_run(ratio=0.5, model="squeezenet"))
    figure = tradeoff.plot(path, "title", runs)
    left, right = figure.axes
    assert (left.get_title(), right.get_title()) == ("resnet", "squeezenet")
    line = _line(left, "decreasing, promotion")
    np.testing.assert_allclose(line.get_xdata(), [0.45, 0.95])
    np.testing.assert_allclose(line.get_ydata(), [45, 25])
    (band,) = left.collections
    extents = band.get_paths()[0].get_extents()
    np.testing.assert_allclose([extents.ymin, extents.ymax], [20, 50])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 200_000


def test_baselines_are_markers_and_float32_is_a_dashed_line(tmp_path):
    runs = [_run("float32"), _run("uniform", low_ratio=0.98, best_accuracy=0.6)]
    figure = tradeoff.plot(tmp_path / "figure.png", "title", runs, "best")
    (axes,) = figure.axes
    float32 = _line(axes, "float32")
    assert float32.get_linestyle() == "--"
    np.testing.assert_allclose(float32.get_ydata(), [50, 50])
    (marker,) = (
        line
        for line in axes.get_lines()
        if line.get_marker() == tradeoff.BASELINES["uniform"][1]
    )
    np.testing.assert_allclose(marker.get_xydata(), [[0.98, 60]])


def test_a_run_that_diverged_stays_in_the_means_and_is_marked(tmp_path):
    lost = {"last_accuracy": 0.1, "best_accuracy": 0.3, "train_loss": None}
    runs = [_run(ratio=1, **lost), _run(ratio=1, seed=1, last_accuracy=0.5)]
    figure = tradeoff.plot(tmp_path / "figure.png", "title", runs)
    line = _line(figure.axes[0], "decreasing, no promotion")
    np.testing.assert_allclose(line.get_ydata(), [30])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "loss not finite" in labels

    row = tradeoff.table(runs).splitlines()[-1].split("  ")
    cells = [cell.strip() for cell in row if cell.strip()]
    assert cells[-4:] == ["30.0 ± 28.3", "40.0 ± 14.1", "nan", "1/2"]


@pytest.mark.parametrize("models", [1, 2, 3])
def test_the_legend_is_inside_of_the_figure(tmp_path, models):
    names = ["float32", "uniform", "operator_based", "operator_based_outputs"]
    runs = [
        _run(name, ratio, promotion, model=model)
        for model in ["resnet", "squeezenet", "shufflenet"][:models]
        for name, ratio, promotion in [
            *((name, None, False) for name in names),
            *(("demote", r, p) for r in (0, 1) for p in (False, True)),
        ]
    ]
    figure = tradeoff.plot(tmp_path / "figure.png", "title", runs)
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 6
    box, whole = legend.get_window_extent(), figure.bbox
    assert box.xmin >= whole.xmin
    assert box.xmax <= whole.xmax


def test_merging_does_not_mix_runs_that_differ(tmp_path):
    paths = [tmp_path / f"{name}.json" for name in "abc"]
    common = {"epochs": 5}
    for path, seed, epochs in zip(paths, (0, 1, 2), (5, 5, 7), strict=True):
        document = {"settings": {"epochs": epochs}, "runs": [_run(seed=seed)]}
        path.write_text(json.dumps(document))
    runs = tradeoff.merged(paths[:2], common)
    assert [run["seed"] for run in runs] == [0, 1]
    with pytest.raises(ValueError, match="epochs 7, not 5"):
        tradeoff.merged(paths, common)
    with pytest.raises(ValueError, match="two files"):
        tradeoff.merged([paths[0], paths[0]], common)


def test_shuffling_interleaves_the_halves_of_the_channels():
    x = jnp.arange(12).reshape(2, 1, 1, 6)
    np.testing.assert_array_equal(shuffle_channels(x)[0, 0, 0], [0, 3, 1, 4, 2, 5])
    np.testing.assert_array_equal(shuffle_channels(x)[1, 0, 0], [6, 9, 7, 10, 8, 11])


@pytest.mark.parametrize(
    ("model", "last_features"),
    [
        (SqueezeNet(0.25, stem_stride=2), (8, 2, 2, 10)),
        (ShuffleNet(0.25, (1, 2, 1), stem_stride=2), (8, 2, 2, 256)),
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
