"""The figures of the pages match the records.

Each function reads one record and yields the figures of its page, in a form that
``has_figures`` accepts. The pages of the papers are in ``test_claims``.
"""

import json

import numpy as np
import pytest
from scipy import stats

from benchmarks.records import gaps, shown
from benchmarks.training import (
    best_rates,
    digit_moments,
    equivalence,
    fine_tuning,
    pareto,
    reinforcement,
    rounding_errors,
    trends,
    weight_patches,
)
from tests.helpers.page_figures import has_figures, tables
from tests.helpers.places import ROOT


def _pareto(record):
    runs = record["runs"]
    linear = pareto.excess(runs, "linear")
    bits = {name: each["bits"] for name, each in runs.items()}
    percent = {name: f"{shown(each, 0)}%" for name, each in linear.items()}
    assert f"{bits['nearest, 8']:.0f}" == f"{bits['stochastic, 8']:.0f}" == "33"
    yield "With 33 bits per parameter"
    yield f"by {percent['nearest, 8']} with rounding to nearest"
    yield f"by {percent['stochastic, 8']} with stochastic rounding"
    exceeds = f"exceeds the float32 loss by {percent['+8, 8']}"
    yield f"With 8 extra bits ({bits['+8, 8']:.0f} bits per parameter), it {exceeds}"
    yield f"in each of {len(runs) - 1} formats"


def _precision_memory(record):
    yield f"{record['ratios']['0.5']['stored']:,.0f} MiB of temporary memory"
    yield f"and {record['float32']:,.0f} MiB if all are float32"


def _large_models(record):
    peak = lambda case: f"{record['llama_8b'][case]['peak'] / 2**30:.2f} GiB"
    master, released = "float32 master, 8 H200s", "lowbit_adamw, release, 8 H200s"
    yield f"needs {peak(master)} per device with a float32 master, and {peak(released)}"


def _fine_tuning_memory(record):
    gib = lambda size: f"{size / 2**30:.1f}"
    for bits, step in record["compiled"].items():
        small, large = (record["stored"][x][bits] for x in ("8B", "70B"))
        yield {
            (
                f"{bits} bits",
                "bytes per parameter",
            ): f"{small['bytes_per_parameter']:.2f}",
            (f"{bits} bits", "8B: peak of a step, GiB"): gib(step["peak"]),
            (f"{bits} bits", "70B: weights and state, GiB"): gib(large["stored"]),
        }
        yield f"contains {gib(step['carries'])} GiB of activations"


def _large_training(record):
    of = lambda name: record["steps"][f"8 H200s, {name}"]
    gib = lambda size: f"{size / 2**30:.2f} GiB"
    temporary = lambda name: gib(of(name)["temporary"])
    total = lambda name: sum(of(name)["exchanged"].values())
    exchanged = lambda name: f"{total(name) / 2**30:.1f} GiB"
    yield f"`lowbit_adamw` step needs {temporary('lowbit_adamw')} of temporary memory"
    yield f"released step needs {temporary('lowbit_adamw_released')}, because"
    both = temporary("float32"), exchanged("float32")
    yield f"float32 step needs {both[0]}, and exchanges {both[1]} between devices"
    yield f"The `lowbit_adamw` step exchanges {exchanged('lowbit_adamw')}"


SMALL_TEXT = "2 layers, 3 seeds"
MIDDLE = "217,664 parameters, 2 seeds"
LARGEST = "1,025,408 parameters"
START_TIMES = "float32, initial weights times 1 + 2^-20"
ERROR = '`sr_adamw(error_feedback="mu", moments=block_quantized(8))`'
EIGHT_BIT = "`sr_adamw(moments=block_quantized(8))`"
# The rows of the table of formats, and the runs of each model.
COMPARED = {
    "Shakespeare, 4 seeds": {
        "`lowbit_adamw`": "lowbit",
        "`kahan_adamw`": "Kahan",
        "`sr_adamw`": "stochastic",
        "`lpmm_adam`, 12 bits": "LPMM, 12 bits",
        "`factored_adamw`": "factored",
        "`factored_adamw(bits=0)`": "factored, no extra bits",
        "plain bfloat16": "bfloat16, nearest",
    },
    SMALL_TEXT: {
        "`lowbit_adamw`": "8 extra bits",
        EIGHT_BIT: "stochastic",
        ERROR: "error into mu",
        "float16, 8 extra bits": "float16, 8 extra bits",
        "plain bfloat16": "bfloat16, nearest",
    },
    MIDDLE: {
        START_TIMES: "float32, start times 1 + 2^-20",
        "`lowbit_adamw`": "lowbit",
        EIGHT_BIT: "stochastic",
        ERROR: "error into mu",
        "float8, 8 extra bits": "float8, 8 extra bits",
        "MXFP8, 8 extra bits": "MXFP8, 8 extra bits",
        "`lpmm_adam`, 12 bits": "LPMM, 12 bits",
        "`factored_adamw`": "factored",
        "`factored_adamw(bits=0)`": "factored, no extra bits",
        "flashoptim-jax": "flashoptim-jax",
        "torchao AdamW8bit": "torchao AdamW8bit, stochastic",
        "torchao AdamW4bit": "torchao AdamW4bit, stochastic",
        "plain bfloat16": "bfloat16, nearest",
    },
    LARGEST: {
        START_TIMES: "float32, start times 1 + 2^-20",
        "`lowbit_adamw`": "lowbit",
        ERROR: "error into mu",
        "plain bfloat16": "bfloat16, nearest",
    },
}
ROWS = dict.fromkeys(row for rows in COMPARED.values() for row in rows)


def _compared(model, end):
    """Returns the figures of one model, and checks which cells are empty."""

    def figures(record):
        runs, rows = record["runs"], COMPARED[model]
        gap = lambda row: shown(runs[rows[row]]["gaps"][end], 4)
        yield {(row, model): gap(row) if row in rows else "" for row in ROWS}
        for row, name in rows.items():
            # GPT-2's embeddings are not the same share of the other models.
            if model == MIDDLE or row not in COMPARED[MIDDLE]:
                size = f"{runs[name]['bytes_per_parameter']:.2f}"
                yield {(row, "bytes per parameter"): size}
        seeds = {n: len(x[end]["values"]) for n, x in runs.items()}
        if model == LARGEST:
            assert seeds == dict.fromkeys(runs, 1) | {"float32": 3, "lowbit": 3}
        else:
            assert model.endswith(f", {seeds['float32']} seeds")
        if "parameters" in record:
            assert model.startswith(f"{record['parameters']:,}")
            yield f"{record['tokens_per_parameter']:.1f} bytes of text per parameter"

    return figures


_gpt_formats = _compared(SMALL_TEXT, "held-out loss")
_compute_optimal_large = _compared(LARGEST, "held_out")


def _compute_optimal(record):
    yield from _compared(MIDDLE, "held_out")(record)
    gap = record["runs"]["factored, all in float32"]["gaps"]["held_out"]
    yield f"Even with all arrays in float32, it ends {shown(gap, 4)} above AdamW"


def _shakespeare(record):
    yield from _compared("Shakespeare, 4 seeds", "validation")(record)
    found = {n: x["gaps"]["validation"] for n, x in record["runs"].items()}
    below = lambda name: f"{-found[name]['mean']:.4f}"
    yield f"lowers the loss on Shakespeare by {below('float32, Nesterov')}"
    yield f"as high lowers it by {below('float32, rate times 1.25')}"
    above = [name for name, x in found.items() if min(x["values"]) > 0]
    assert {"LPMM, 12 bits", "bfloat16, nearest"} <= set(above)


def _four_bit_muon(record):
    runs = record["runs"]
    gap = {n: x["gaps"]["held-out loss"] for n, x in runs.items()}
    ends = {name: f"{shown(x, 4)} above" for name, x in gap.items()}
    yield f"The 4-bit codes of this package end {ends['4 bits']} float32"
    yield f"the least possible error ends {ends['4 bits, least error']}"
    yield f"The {runs['MuonQ']['bits']:.2f}-bit codes of [MuonQ]"
    yield f"(https://arxiv.org/abs/2605.11396) end {ends['MuonQ']}"
    few = [n for n, x in runs.items() if x["bits"] <= 4.5]
    assert few
    assert min(gap[name]["mean"] for name in few) > 0.005


def _digit_moments(record):
    runs = record["runs"]
    values = {name: x["training"]["values"] for name, x in runs.items()}
    found = {n: shown(x, 5) for n, x in gaps(values, digit_moments.BASE).items()}
    yield f"{shown(runs[digit_moments.BASE]['training'], 5)} nats"
    differs = f"the loss differs from this value by {found['8 bits, the default']}"
    yield f"With the default 8-bit moments, {differs}"
    yield f"and with `factored_adamw` by {found['factored, 4-bit mu']}"


def _rounding_errors(record):
    assert (str(rounding_errors.RATES[0]), record["options"]["seeds"]) == ("0.001", 8)
    of = lambda name, rate="0.001": shown(record["linear"][name][rate], 2)
    mu = "error into mu"
    yield f"multiplies the excess loss of float32 by {of('bfloat16, stochastic')}"
    yield f"multiplies it by {of(f'bfloat16, {mu}')}"
    both = [of(f"bfloat16, {name}", "1e-05") for name in ("stochastic", mu)]
    yield f"the factor is {both[0]} without it and {both[1]} with it"
    yield f"the factor is {of('float8, stochastic')} with stochastic rounding"
    yield f"{of(f'float8, {mu}')} with error feedback"
    yield f"{of('float8, 8 extra bits')} with 8 extra bits"


def _resnet_cifar(record):
    end = "accuracy, %"
    of = lambda name: shown(record["gaps_to_float32"][end][name], 2)
    yield f"test accuracy is {shown(record[end]['float32'], 2)}%"
    differs = "the accuracy differs by"
    yield f"With float16 weights and no extra bits, {differs} {of('float16')}"
    yield f"it differs by {of('float8')} points without extra bits"
    yield f"by {of('float8, 4 extra bits')} with 4 extra bits"
    yield f"by {of('float8, 8 extra bits')} with 8."


def _reinforcement(record):
    yield from reinforcement.table(record).splitlines()
    yield f"Without training, the reward is {reinforcement.idle(record)}."
    changed = record["runs"]["1e-06"]["lowbit"]["changed"]
    yield f"one in {round(1 / changed, -1):.0f} of the sampler's weights"


def _weight_patches(record):
    yield from weight_patches.table(record).splitlines()
    assert all(run["is_equal"] for run in record["runs"].values())
    assert record["runs"]["3e-06"]["steps"] == 500
    assert record["runs"]["3e-06"]["largest"] < 0.05


def _best_rates(record):
    yield from best_rates.text(record).splitlines()


def _equivalence(record):
    yield from equivalence.text(record).splitlines()
    pairs = record["rows"]["lowbit_adamw"]["pairs"]
    low, high = stats.ttest_1samp(pairs, 0).confidence_interval(0.9)
    yield f"from {low:.4f} to {high:+.4f}"
    yield f"standard deviation of {np.std(pairs, ddof=1):.4f}."
    pairs = pairs + record["rows"][equivalence.SECOND]["pairs"]
    low, high = stats.ttest_1samp(pairs, 0).confidence_interval()
    yield f"{len(pairs)} pairs together have a mean of {np.mean(pairs):.4f}"
    yield f"({low:.4f} to {high:+.4f})"


def _trends(record):
    yield from trends.text(record).splitlines()
    (low, high) = record["by size"]["lowbit_adamw"]["interval of value"]
    yield f"from {low:+.3f} to {high:+.3f} for `lowbit_adamw`"
    (one, other, plain) = [x["pairs"]["1025408"][0] for x in record["by size"].values()]
    below = f"{-one:.3f} and {-other:.3f} below float32"
    yield f"ended {below}, and plain bfloat16 ended {plain:.3f} above"
    kahan = record["by length"]["kahan_adamw"]
    yield f"by {kahan['slope']:.3f} if the bytes grow tenfold"
    yield f"it ends {np.mean(kahan['pairs']['400']):.3f} above float32"
    trend = "by size", trends.LATER, "by length"
    lines = [each for x in trend for each in record[x].items()]
    above = [name for name, x in lines if x["interval of slope"][0] > 0]
    assert len(lines) == 7
    assert above == ["kahan_adamw"]
    assert all(x["interval of slope"][1] > 0 for _, x in lines)


def _fine_tuning(record):
    yield from fine_tuning.text(record).splitlines()
    rows, sums = record["rows"], record["sums of rates"]
    gap = lambda name, rate: rows[name]["rates"][rate]["gap"]
    mean = lambda name, rate: gap(name, rate)["mean"]
    apart = lambda name, rate: mean(name, rate) - mean("float32, factored", rate)
    yield f"factors of rank {record['rank']}, keeps"
    yield f"weights of 8 bits end {mean('8 bits', '0.001'):.4f} nats above float32"
    low, high = gap("8 bits", "0.001")["interval"]
    best = f"{mean('8 bits', '0.001'):.4f} above float32 at the best rate"
    yield f"**8 bits** end {best} (95% interval {low:.4f} to {high:.4f})"
    yield f"and {-rows['8 bits']['minus_lora']['mean']:.2f} below LoRA, which"
    assert gap("8 bits", "0.001")["verdict"] == "equivalent"
    yield f"are equivalent to float32 within {record['margin']} nats"
    both = mean("6 bits", "0.001"), mean("float8", "0.001")
    yield f"**float8** end {both[0]:.3f} and {both[1]:.3f} above float32"
    yield f"raises the loss by {mean('4 bits', '0'):.2f} before the first step"
    yield f"and by {mean('4 bits', '0.001'):.2f} after"
    lost = mean("8 bits, errors lost", "0.001") - mean("8 bits", "0.001")
    yield f"it ends {lost:.4f} higher"
    yield f"it is {sums['1e-05']:.3f} here"
    of = record["spacings"]
    yield f"{of['8 bits']:.4f} with 8 bits, {of['6 bits']:.4f} with 6 bits"
    yield f"and {of['4 bits']:.2f} with 4 bits"
    small = [apart(f"{bits} bits", "1e-05") for bits in (8, 6, 4)]
    yield f'8 bits end {small[0]:.3f} above "float32, factored", 6 bits {small[1]:.3f}'
    yield f"and 4 bits {small[2]:.2f}."
    assert {row["best"] for row in rows.values()} == {"0.001"}


def _muon_momentum(record):
    gap = {n: shown(x["gaps"]["held-out loss"], 4) for n, x in record["runs"].items()}
    yield f"the loss ends {gap['8 bits, the default']} above float32"
    yield f"With a bfloat16 momentum, it ends {gap['bfloat16 momentum']} above"
    yield f"8-bit codes of AdamW, it ends {gap['companded, stochastic']} above"


LOWBIT = "`lowbit` minus float32"
PLAIN = "plain bfloat16 minus float32"


def _answer(row, end, base="float32", lowbit="lowbit", plain=None, digits=4):
    """Returns the figures of a row of the page that answers the question."""

    def figures(record):
        runs = record["runs"]
        values = {x: run[end]["values"] for x, run in runs.items()}
        found = {"float32 loss": shown(runs[base][end], digits)}
        found["seeds"] = f"{len(runs[base][end]['values'])}"
        for head, name in ((LOWBIT, lowbit), (PLAIN, plain)):
            if name:
                several = len(values[name]) > 1
                gap = runs[name].get("gaps", {}).get(end)
                gap = gap or gaps({x: values[x] for x in (base, name)}, base)[name]
                found[head] = shown(gap, digits) + ("" if several else " (one seed)")
        yield {(row, head): figure for head, figure in found.items()}

    return figures


NEAREST = "bfloat16, nearest"
ANSWERS = {
    "shakespeare": _answer(
        "nanoGPT on Shakespeare, 804,096 parameters", "validation", plain=NEAREST
    ),
    "compute_optimal_large": _answer(
        "GPT with 1,025,408 parameters", "held_out", plain=NEAREST
    ),
    "compute_optimal": _answer(
        "GPT with 217,664 parameters", "held_out", plain=NEAREST
    ),
    "gpt_formats": _answer(
        *("GPT with 2 layers of width 64", "held-out loss"),
        lowbit="8 extra bits",
        plain=NEAREST,
    ),
    "muon_momentum": _answer(
        *("GPT of width 64 with Muon", "held-out loss"),
        base="float32, and weights",
        lowbit="8 bits, the default",
    ),
    "digit_moments": _answer(
        *("digits, two hidden layers of width 256", "training"),
        base=digit_moments.BASE,
        lowbit="8 bits, the default",
        digits=5,
    ),
}
FIGURES = [
    *((f"training/{name}", "accuracy", each) for name, each in ANSWERS.items()),
    ("training/pareto", "accuracy_records", _pareto),
    (
        "training/gpt_formats",
        "accuracy_records",
        _compared(SMALL_TEXT, "held-out loss"),
    ),
    ("training/compute_optimal", "accuracy_records", _compute_optimal),
    ("training/compute_optimal_large", "accuracy_records", _compute_optimal_large),
    ("training/muon_momentum", "accuracy_records", _muon_momentum),
    ("training/four_bit_muon", "accuracy_records", _four_bit_muon),
    ("training/digit_moments", "accuracy_records", _digit_moments),
    ("training/rounding_errors", "accuracy_records", _rounding_errors),
    ("training/resnet_cifar", "accuracy_records", _resnet_cifar),
    ("training/shakespeare", "accuracy_records", _shakespeare),
    ("training/reinforcement", "reinforcement", _reinforcement),
    ("training/weight_patches", "patches", _weight_patches),
    ("training/best_rates", "reinforcement", _best_rates),
    ("training/equivalence", "accuracy", _equivalence),
    ("training/trends", "accuracy", _trends),
    ("training/fine_tuning", "fine_tuning", _fine_tuning),
    ("programs/large_models", "memory", _large_models),
    ("programs/fine_tuning_memory", "fine_tuning", _fine_tuning_memory),
    ("programs/large_training", "large_model", _large_training),
    ("programs/precision_memory", "ideas/precision", _precision_memory),
]


@pytest.mark.parametrize(("record", "page", "figures"), FIGURES)
def test_the_figures_of_the_page_match_the_record(record, page, figures):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = json.loads((ROOT / "benchmarks" / f"{record}.json").read_text())
    for each in figures(found):
        assert has_figures(text, each), each


def test_the_answer_describes_every_experiment():
    text = (ROOT / "docs" / "accuracy.md").read_text()
    table = next(t for t in tables(text) if any(head == LOWBIT for _, head in t))
    cells = [cell for (_, head), cell in table.items() if head == LOWBIT]
    assert len(cells) == 6
    for cell in cells:
        mean, deviation = map(float, cell.split(" ± "))
        assert mean < deviation
    assert has_figures(text, "by less than the standard deviation of this difference")
