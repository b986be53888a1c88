"""Pictures of weights, loss curves, step times on an H200, and words of a matrix.

    .venv/bin/python -m benchmarks front_pictures

The pictures are drawn from stored records. Nothing is measured.
"""

import json
from collections.abc import Sequence

import numpy as np

from benchmarks import ROOT, pictures, records

RECORD = ROOT / "docs/evidence/first_device_nvidia_h200.json"
SIGN, EXPONENT, FRACTION, RESIDUAL, LOST = (
    "#d55e00",
    "#e69f00",
    "#0072b2",
    "#009e73",
    "#bbbbbb",
)
STORED = (
    ("AdamW, float32 master", (16, 32, 32, 32), "14 bytes"),
    ("kahan_adamw", (16, 16, 16, 16), "8 bytes"),
    ("lowbit_adamw", (16, 8, 8.5, 8.5), "5.13 bytes"),
    ("factored_adamw", (16, 8, 4.5, 0.1), "3.57 bytes"),
)
"""The bits of each stored array per parameter of a large matrix: the parameter, the
master or residual, and both moments with their scales."""
CURVES = {
    "float32": "float32, 12 bytes",
    "lowbit": "lowbit_adamw, 5.13 bytes",
    "Kahan": "kahan_adamw, 8 bytes",
    "bfloat16, nearest": "plain bfloat16, 6 bytes",
}
STEPS_OF_SHAKESPEARE, WINDOW = 2000, 5
STEPS = (
    "optax, float32 master",
    "kahan_adamw",
    "lowbit_adamw",
    "flashoptim_jax",
)


@pictures.panels(3.7, ratios=(1, 1.3), stack=True, columns=4)
def draw_bits(record, top, bottom):
    """Draw the bits of a weight, and the bits that each optimizer stores."""
    del record
    _row(top, 1, [(1, SIGN), (8, EXPONENT), (23, FRACTION)])
    _row(top, 0, [(1, SIGN), (8, EXPONENT), (7, FRACTION), (8, RESIDUAL), (8, LOST)])
    for x, y, text in (
        (0.5, 1.6, "sign"),
        (5, 1.6, "exponent"),
        (20.5, 1.6, "fraction of a float32 weight"),
        (8, -0.6, "bfloat16 parameter"),
        (20, -0.6, "8-bit residual"),
        (28, -0.6, "not stored"),
    ):
        top.text(x, y, text, ha="center", va="center", fontsize=9)
    top.set(xlim=(-0.5, 32.5), ylim=(-0.9, 1.9))
    top.axis("off")
    labels = ("parameter", "master or residual", "first moment", "second moment")
    colors = (FRACTION, RESIDUAL, "#56b4e9", "#cc79a7")
    for y, (_, bits, size) in enumerate(STORED):
        left = 0.0
        for width, color, label in zip(bits, colors, labels, strict=True):
            style = {"color": color, "edgecolor": "white", "height": 0.66}
            bottom.barh(y, width, left=left, label=None if y else label, **style)
            left += width
        bottom.text(left + 1, y, size, va="center", fontsize=10)
    bottom.set_yticks(range(len(STORED)), [name for name, *_ in STORED])
    bottom.set(xlabel="bits per parameter, to scale", xlim=(0, 130), ylim=(3.6, -0.6))
    bottom.set_xticks(range(0, 129, 16))
    return (
        "The model reads bfloat16. The optimizer stores the next bits of each weight."
    )


def _row(axes, y: float, fields: Sequence) -> None:
    """Draw one square per bit."""
    colors = [color for width, color in fields for _ in range(width)]
    for place, color in enumerate(colors):
        axes.barh(y, 0.9, 0.66, left=place + 0.05, color=color)


@pictures.panels(3.2, ratios=(1.2, 1), columns=2)
def draw_curves(record, whole, end):
    """Draw the training loss of each format, and its difference from float32."""
    looks = pictures.looks(CURVES)
    curves = {
        name: np.array([run["curve"] for run in record["runs"][name]["each"].values()])
        for name in CURVES
    }
    seeds, points = curves["float32"].shape
    steps = STEPS_OF_SHAKESPEARE / points * np.arange(1, points + 1)
    average = lambda row: np.convolve(row, np.ones(WINDOW) / WINDOW, "valid")
    for name, label in CURVES.items():
        look = {"color": looks[name]["color"], "lw": 4 if name == "float32" else 1.5}
        look |= {"alpha": 0.35} if name == "float32" else {}
        whole.plot(steps, curves[name].mean(0), label=label, **look)
        gaps = np.array(list(map(average, curves[name] - curves["float32"])))
        pictures.band(end, steps[WINDOW - 1 :], gaps, **look)
    whole.set(xlabel="step", ylabel="training loss, nats per character", ylim=(1.5, 3))
    end.set(xlabel="step", ylabel="minus the float32 loss", ylim=(-0.008, 0.03))
    final = {
        name: record["runs"][name]["gaps"]["training"]
        for name in CURVES
        if name != "float32"
    }
    ours = max(abs(x) for name in ("lowbit", "Kahan") for x in final[name]["values"])
    return (
        f"{seeds} seeds on Shakespeare: lowbit_adamw and kahan_adamw end within "
        f"{ours:.3f} of float32; plain bfloat16 ends "
        f"{final['bfloat16, nearest']['mean']:.3f} above it."
    )


@pictures.panels(2.3, ratios=(1, 1), sharey=True)
def draw_steps(record, matrices, gpt2):
    """Draw milliseconds per billion parameters."""
    jobs = {
        j["name"]: j["trials"] for j in record["jobs"] if j["section"] == "step_times"
    }
    for axes, trial, title in (
        (matrices, "16x4096", "16 matrices of 4096 x 4096"),
        (gpt2, "gpt2", "the 148 arrays of GPT-2 124M"),
    ):
        for y, name in enumerate(STEPS):
            figures = jobs[name][trial]["figures"]
            time = figures["ps_per_parameter"]
            look = pictures.looks([name])[name]
            axes.barh(y, time, color=look["color"], height=0.62)
            axes.text(time, y, f" {time:.1f}", va="center")
        axes.set_yticks(range(len(STEPS)), STEPS)
        axes.set(title=title, xlabel="ms per billion parameters (lower is better)")
        axes.set_ylim(len(STEPS) - 0.5, -0.5)
        axes.margins(x=0.15)
    return None


@pictures.panels(3.5, ratios=(1, 1), sharey=True, columns=4)
def draw_words(record, good, bad):
    """Draw the words and blocks of a small matrix, and two cuts between devices."""
    del record
    rows, columns = 16, 8
    for axes, cut, title in (
        (good, 8, "cut after 8 rows: all are whole"),
        (bad, 6, "cut after 6 rows: some are divided"),
    ):
        for row, column in np.ndindex(rows, columns):
            color = "#cfe3f1" if row < cut else "#f6e3c5"
            axes.add_patch(_box(column, row, 1, 1, fc=color, ec="white", lw=1.5))
        for row, column in np.ndindex(rows // 4, columns):
            look = {"ec": RESIDUAL, "lw": 1.2, "fc": "none"}
            place = (column + 0.12, 4 * row + 0.12, 0.76, 3.76)
            axes.add_patch(_box(*place, label="word: 4 rows", **look))
        for row, column in np.ndindex(rows // 8, columns // 4):
            look = {"ec": "black", "lw": 2, "fc": "none", "label": "block: 8 x 4"}
            axes.add_patch(_box(4 * column, 8 * row, 4, 8, **look))
        axes.plot(
            (-0.4, columns + 0.4),
            (cut, cut),
            color=SIGN,
            lw=3,
            label="cut",
        )
        axes.set(title=title, xlim=(-0.5, columns + 0.5), ylim=(rows + 0.3, -0.3))
        axes.axis("off")
    return (
        "A word holds 8 bits of each of 4 rows. A block of 8 rows and 4 columns shares "
        "a scale."
    )


def _box(x, y, width, height, **look):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **look)


def main(argv: list[str] | None = None) -> None:
    records.Options(__doc__).parse_args(argv)
    shakespeare = records.load(ROOT / "benchmarks/training/shakespeare.json")
    h200 = json.loads(RECORD.read_text())
    for draw, record, name in (
        (draw_bits, None, "bits_of_a_weight"),
        (draw_curves, shakespeare, "loss_curves"),
        (draw_steps, h200, "h200_steps"),
        (draw_words, None, "words_and_blocks"),
    ):
        path = pictures.picture_of(name)
        draw(record, path)
        print(path.relative_to(ROOT))
