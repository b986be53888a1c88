"""The figures of the pages match the records.

Each function reads one record and yields the figures of its page: a dictionary keyed by
a table's row and column, a dictionary keyed by labels, or a text on the page.
Labels are those of a list ("label: figure") in one row or paragraph, or those of the
rows of one table, whose figures are then in one column.
"""

import collections
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import lowbit_optax
from benchmarks.papers import narrow_clicks
from benchmarks.papers.halted_descent import RATES
from benchmarks.papers.lpmm_states import CODES
from benchmarks.papers.microbatches import SMALL
from benchmarks.papers.rounded_passes import ORDERS
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
from tests.helpers.places import ROOT

BITS = (12, 10, 8)


def _percent(found, digits):
    mean, std = (100 * found[key] for key in ("mean", "std"))
    return f"{mean:.{digits}f}% ± {std:.{digits}f}%"


def _by_bits(figure, found, name, digits=3):
    of_bits = {f"{bits} bits, {name}": found[f"{bits} bits, {name}"] for bits in BITS}
    return {(row, figure): shown(x, digits) for row, x in of_bits.items()}


def _memory_profile(record):
    peaks = {name: found["peak"] for name, found in record["cases"].items()}
    change = lambda name: f"{1 - peaks[name] / peaks['float32 master']:.0%}"
    falls = f"The peak falls by {change('16 extra bits, release')}"
    yield f"{falls} with 16 extra bits and release"
    yield f"by {change('lowbit_sgd')} with `lowbit_sgd`"
    yield f"by {change('lowbit_sgd, release')} with `lowbit_sgd` and release"


def _operator_bytes(record):
    rows = record["rows"]
    assert all(row["fused_moved"] == row["least"] for row in rows.values())
    split = [row for bits, row in rows.items() if bits != "0"]
    shares = [row["least"] / row["moved"] for row in split]
    launches = [row["launches"] for row in split]
    needed = f"only {min(shares):.0%} to {max(shares):.0%} of the bytes that they move"
    yield f"in {min(launches)} to {max(launches)} kernels, and {needed} are needed"


def _forward_error(record):
    ends = {}
    for name in ("float16", "+8, stochastic"):
        found = record["errors"][name]["16-bit part"]
        ends[name] = [f"{x['mean']:.2e}".replace("e-0", "e-") for x in found]
    first = f"is {ends['float16'][0]} in float16, and {ends['+8, stochastic'][0]} with"
    yield f"After one addition, the error {first} 8 extra bits"
    last = [each[-1] for each in ends.values()]
    after = "After 1,000 additions, the error is"
    yield f"{after} {last[0]} in float16, and {last[1]} with 8 extra bits"


EXTRA_BITS = {"0": "float8", "4": "float8, +4", "8": "float8, +8"}
TOWARD_ZERO, TO_NEAREST = "float8, toward zero: loss", "float8, nearest: loss"


def _float8_weights(record):
    found = {name: shown(each) for name, each in record["held_out"].items()}
    zero = {x: found.get(f"{y}: toward zero", "") for x, y in EXTRA_BITS.items()}
    nearest = {x: found.get(f"{y}: default") for x, y in EXTRA_BITS.items()}
    nearest["0"] = found["float8: nearest"]
    yield {(bits, TOWARD_ZERO): figure for bits, figure in zero.items()}
    yield {(bits, TO_NEAREST): figure for bits, figure in nearest.items()}
    yield f"In float32, the held-out loss is {found['float32']}"
    means = {name: each["mean"] for name, each in record["held_out"].items()}
    higher = means["float8, +8: toward zero"] - means["float32"]
    yield f"the loss ends {higher:.2f} higher with 8 extra bits"


def _float16_clicks(record):
    found = record["gaps_to_float32"]["auc"]
    of = lambda name: _percent(found[name], 3)
    head = "float16: AUC"
    yield {("0", head): of("float16"), ("8", head): of("float16, +8")}


def _digit_gan(found):
    gap = lambda name: shown(found["gaps_to_float32"][name], 1)
    head = "bfloat16: Fréchet distance"
    yield {("0", head): gap("bfloat16"), ("8", head): gap("bfloat16, +8")}
    yield f"generated and real digits is {shown(found['distance']['float32'], 1)}"
    yield f"halves of the real digits is only {found['distance_of_halves']:.1f}."


def _t5_release(found):
    peak = lambda batch, mode: found["memory"][batch][mode]["peak"]
    changes = {x: 1 - peak(x, "with") / peak(x, "without") for x in found["memory"]}
    of = [f"by {change:.0%} at batch size {x}" for x, change in changes.items()]
    assert len(of) == 2
    yield f"release lowers the peak {' and '.join(of)}"
    yield f"Release changes the loss of a small model by {shown(found['gap'], 5)}"
    yield f"{found['memory']['8']['with']['gradients'] / 2**30:.2f} GiB"


def _least_squares(record):
    of = lambda name, digits=2: shown(record["final"][name], digits)
    rows = {
        "float32": of("float32", 3),
        "nearest": of("nearest: only weights"),
        "Kahan": of("weights by Kahan"),
        "stochastic": of("weights stochastic"),
    }
    yield {(row, "least squares: loss"): figure for row, figure in rows.items()}
    shares = record["shares"].items()
    yield {("loss", count): shown(found, 2) for count, found in shares}
    ends = f"the loss ends at {of('nearest: all but weights', 3)}"
    yield f"float32 weights, but rounded activations and gradients, {ends}"


def _halted_descent(record):
    weights, passes = record["weights"], record["passes"]
    row = lambda d, bits: [weights[f"{d}, {bits} bits, {x}"] for x in RATES]
    ratios = lambda d, bits: [
        x for each in row(d, bits) for x in each["distance to bound"]["values"]
    ]
    for bits in narrow_clicks.BITS:
        one, of_one = row(1, bits), ratios(1, bits)
        starts = [each["starts"] for each in one]
        moved = sum(x["changed"] for x in starts) / sum(x["all"] for x in starts)
        corrected = [each["distance to corrected bound"] for each in one]
        cells = {
            "1 weight: below bound": f"{np.mean(np.less(of_one, 1)):.0%}",
            "moved within R": f"{moved:.0%}",
            "distance / bound": f"{min(of_one):.2f}",
            "/ corrected bound": f"{min(corrected):.2f}",
            "10 weights: distance / bound": f"{min(ratios(10, bits)):.1f}",
        }
        for rate in (RATES[0], RATES[-1]):
            name = f"10, {bits} bits, {rate}"
            found, mean = weights[name]["distance"], passes[name]["distance"]["mean"]
            exact = passes[f"10, 32 bits, {rate}"]["distance"]
            yield {
                (f"{bits}", f"weights rounded, a = {rate}"): shown(found, 3),
                (f"{bits}", f"passes rounded, a = {rate}"): _power(mean),
                ("32", f"passes rounded, a = {rate}"): _power(exact["mean"]),
            }
        yield {(f"{bits}", head): figure for head, figure in cells.items()}
    yield f"{record['options']['seeds']} seeds"
    rounded = [x["most"] for name, x in passes.items() if "32 bits" not in name]
    yield f"over 32 orders of the examples is at most {max(rounded):.2f} times"
    assert ORDERS == 32
    for each in weights.values():
        assert each["distance to corrected bound"] > 1
        assert each["starts, corrected"]["changed"] == 0


def _power(x):
    return f"{x:.1e}".replace("e-0", "e-")


def _lpmm_bounds(record):
    rows, lemma = record["theorem"], record["lemma"]
    ratios = lambda rounding, loss: [
        each[loss]["mean"] / each["bound"] for each in rows[rounding].values()
    ]
    nearest = ratios("nearest", "of the average")
    yield f"none of {len(rows['stochastic'])} combinations"
    of_average = max(ratios("stochastic", "of the average"))
    yield f"which the theorem bounds, is at most {of_average:.1%}"
    of_iterates = max(ratios("stochastic", "of the iterates"))
    yield f"which the proof also bounds, is at most {of_iterates:.0%}"
    above = f"{sum(x > 1 for x in nearest)} of the {len(nearest)} combinations"
    yield f"{above} exceed the bound, by a factor of up to {max(nearest):.0f}"
    for bits, n in itertools.product((*BITS, 6), (1, 16)):
        name = f"{bits} bits, N={n}, b=0, a={1 / 72:.4g}"
        bound = rows["stochastic"][name]["bound"]
        loss = {x: found[name]["of the iterates"]["mean"] for x, found in rows.items()}
        cells = {"bound": bound, **loss}
        yield {(f"{bits}", f"N = {n}: {x}"): f"{y:.4f}" for x, y in cells.items()}
    errors = {n: x["error of the mean"] for n, x in lemma.items()}
    errors = {n: x / (lemma[n]["standard error"] or 1) for n, x in errors.items()}
    stochastic = [name for name in lemma if "stochastic" in name]
    square = max(lemma[x]["mean square divided by its bound"] for x in stochastic)
    most = f"at most {max(errors[x] for x in stochastic):.1f} standard errors"
    yield f"differs by {most}, and their mean square is at most {square:.0%}"
    largest = max(x for n, x in errors.items() if "nearest, N=16" in n)
    yield f"of 16 gradients differs by up to {largest:.0f} standard errors"
    yield f"after {record['options']['steps']:,} updates"
    yield f"{record['options']['seeds']} seeds"


def _narrow_clicks(record):
    gaps = record["gaps_to_float32"]["auc"]
    yield {
        (f"{bits}", method): _percent(gaps[f"{method}, {bits} bits"], 2)
        for bits in narrow_clicks.BITS
        for method in narrow_clicks.METHODS
    }


def _sixteen_bit_clicks(record):
    found = record["gaps_to_float32"]["auc"]
    yield {(name, "AUC"): _percent(gap, 2) for name, gap in found.items()}
    assert len(found["nearest"]["values"]) == 10
    assert max(found["nearest"]["values"]) < min(found["stochastic"]["values"])
    assert all(x["std"] > abs(x["mean"]) for n, x in found.items() if n != "nearest")


def _sixteen_bit_network(record):
    found = record["optimizers"].items()
    gaps = {name: each["gaps_to_float32"] for name, each in found}
    accuracy = {x: _percent(y, 1) for x, y in gaps["AdamW"]["accuracy"].items()}
    loss = lambda name, run: shown(gaps[name]["loss"][f"bfloat16, {run}"], 4)
    rows = {"float32": "float32 weights"} | {x: x for x in ROUNDED}
    yield {(row, "16-bit unit: loss"): loss("SGD", x) for row, x in rows.items()}
    yield f"by {loss('AdamW', 'nearest')} with rounding to nearest"
    together = "with stochastic rounding and Kahan summation together"
    yield f"by {loss('AdamW', 'stochastic + Kahan')} {together}"
    kahan = "With Kahan summation, the accuracy of AdamW differs from float32 by"
    yield f"{kahan} {accuracy['float16, Kahan']} without a loss scale"
    yield f"and by {accuracy['float16, Kahan, 2^6']} with a loss scale of 2^6"
    sgd = gaps["SGD"]["loss"]
    assert all(abs(sgd[f"float16, {x}"]["mean"]) < 0.0012 for x in ROUNDED)


ROUNDED = "nearest", "stochastic", "Kahan"


def _kahan_parts(record):
    found = record["gaps_to_stochastic"]["Kahan: all"]
    changes = f"changes the loss by {shown(found, 4)}"
    over = f"over {len(found['values'])} seeds"
    kahan = "Compared with stochastic rounding, Kahan summation in all layers"
    yield f"{kahan} {changes} {over}"


def _cancelled_updates(record):
    found = record["gaps_to_float32"].items()
    yield {(name, "clicks: AUC"): _percent(gap, 2) for name, gap in found}
    mean = lambda runs, count: sum(run[count] for run in runs) / len(runs)
    layers = record["cancelled"].items()
    first, last = ({x: f"{mean(y, i):.0%}" for x, y in layers} for i in (8, -1))
    yield f"cancels {first['embeddings']} of the updates of embeddings at step 800"
    yield f"and {last['embeddings']} at step 4,900"
    yield f"the share grows from {first['linear']} to {last['linear']}"


def _text_roundings(record):
    found = record["gaps_to_float32"]
    accuracy, loss = found["encoder"]["accuracy"], found["GRU"]["loss"]
    yield {(x, "encoder: accuracy"): _percent(gap, 2) for x, gap in accuracy.items()}
    yield {(x, "GRU: loss"): shown(gap, 4) for x, gap in loss.items()}


def _bin_changes(record):
    found, head = record["held_out"], "Figure 4: loss"
    yield {("float32", head): shown(found["float32"])}
    for x in ("nearest", "stochastic"):
        yield _by_bits(head, found, x)
    step, steps = {}, record["options"]["steps"]
    for name, runs in record["steps_moved"].items():
        last = max(i for run in runs for i, x in enumerate(run) if x) + 1
        step[name] = f"{last * steps // len(runs[0]):,}"
    first, second, third = (f"{step[f'{bits} bits, nearest']}" for bits in BITS)
    yield f"after {first} of {steps:,} steps with 12 bits, {second} with 10 bits"
    yield f"and {third} with 8 bits"
    assert {x for n, x in step.items() if "stochastic" in n} == {f"{steps:,}"}


def _demotion_orders(record):
    found = record["assignments"]
    low = {name: each["low_ratio"]["mean"] for name, each in found.items()}
    names = "float32", "uniform", "operator-based", "operator-based, outputs"
    rows = {name: name for name in (*names, "uniform, promotion")}
    rows |= {x: f"{x}, 0.15" for x in ("random", "increasing")}
    rows |= {"decreasing": "decreasing, 0.6"}
    yield {
        (row, head): figure
        for row, name in rows.items()
        for head, figure in {
            "elements in 8 bits": f"{low[name]:.2f}",
            "accuracy, %": shown(found[name]["accuracy"], 1),
        }.items()
    }
    promoted = found["operator-based, outputs, promotion"]["accuracy"]["mean"]
    yield f"assignment with outputs rises to {promoted:.1f}%"
    saves = low["decreasing, 0.6"] / low["operator-based"]
    yield f"saves {saves:.1f} times as much memory"
    # Promoting an element from 8 to 16 bits adds half of its final 16 bits.
    cost = (low["uniform"] - low["uniform, promotion"]) / 2
    promoted = [each for name, each in found.items() if name.endswith("promotion")]
    least = min(each["accuracy"]["mean"] for each in promoted)
    yield f"costs {cost:.0%} of the memory"
    yield f"an accuracy of at least {least:.1f}%"
    diverged = [found[f"only group {i}"]["diverged"] for i in range(8)]
    assert diverged == [0, 0, 0, 0, 0, 1, record["options"]["seeds"], 0]


OVERFLOW_HEADS = {
    "1": "first",
    "2": "second",
    "3": "third",
    "4": "fourth",
    "5": "fifth",
}


def _overflow_spikes(record):
    cases = dict(record["cases"])
    trained = cases.pop("decreasing, 0.6")
    seeds, first = record["options"]["seeds"], []
    for name, found in cases.items():
        assert found["diverged"] == seeds
        row = name.partition(", 0.")[0]
        cells = {head: found["from 1%"].get(k) for k, head in OVERFLOW_HEADS.items()}
        cells |= {
            "10%": found["from 10%"],
            "lowest loss": found["from the lowest loss"],
        }
        yield {(row, x): shown(y, 0) if y else "" for x, y in cells.items()}
        yield {(row, "step"): shown(found["step"], 0)}
        first += found["first"]
        assert min(found["from 1%"]["2"]["values"]) > 0
    assert set(first) == {"dot_general.4", "dot_general.5"}
    yield f"In all {len(first)} runs, two tensors exceed 1% before training diverges"
    yield "The first one is always the output of layer 5 or 6"
    least = min(min(x["from 1%"]["1"]["values"]) for x in cases.values())
    yield f"at least {least:.0f} steps before"
    ratios = trained["largest ratio"]["values"]
    assert trained["diverged"] == 0
    large = sum(x > 0.1 for x in ratios)
    exceeds = f"although a ratio exceeds 10% in {large} of {seeds} runs"
    yield f"{exceeds}, and reaches {max(ratios):.0%} in one"


def _microbatches(record):
    found, head = record["held_out"], "Table 2: loss"
    yield {("float32", head): shown(found["float32, N=1"])}
    yield _by_bits(head, found, "nearest")
    stochastic = {f"{x} bits, stochastic": found[f"{x} bits, N=1"] for x in BITS}
    yield _by_bits(head, stochastic, "stochastic")
    values = {name: each["values"] for name, each in found.items()}
    of = lambda bits, n: gaps(values, f"{bits} bits, N=1")[f"{bits} bits, N={n}"]
    yield f"and the loss changes by {shown(of(8, 16))}"
    for gap in (of(bits, n) for bits in (12, 10) for n in (4, 16)):
        assert abs(gap["mean"]) < gap["std"]
    below = record["shares_below"]
    small = {n: below[f"8 bits, N={n}"][SMALL.index(1 / 8)] for n in (1, 16)}
    yield f"With 8 bits, {small[1]:.0%} of the updates are smaller"
    yield f"{small[16]:.0%} are smaller"


def _lpmm_states(found):
    gap = lambda name: shown(found["gaps_to_float32"][name], 4)
    codes = {f"{c} {b}": gap(f"SGD, 12 bits, {c} {b}") for c, b in CODES}
    yield f"the loss differs from float32 by {codes['dynamic 8']}"
    yield f"With a linear code, it differs by {codes['linear 8']}"
    adam = "the loss of Adam with 8-bit weights"
    yield f"{adam} differs from float32 by {gap('Adam, 8 bits')}"
    bits = {name.removeprefix("LPMM-"): x for name, x in found["bits"].items()}
    text = {name: f"{x:.2f}" for name, x in bits.items()}
    less = f"{1 - bits['Adam, 8 bits'] / bits['Adam, float32']:.0%} less"
    instead = f"bits per parameter instead of {text['Adam, float32']}"
    yield f"stores {text['Adam, 8 bits']} {instead}, which is {less}"


def _largest_gpt(record):
    times: dict[str, list[float]] = {}
    for search, found in record["largest"].items():
        what = {"depth": "layers", "width": "width"}[search]
        base = found["float32"]["parameters"]
        for row, each in found.items():
            assert each["peak"] <= record["room"] < each["peak of the next"]
            ratio = each["parameters"] / base
            times.setdefault(row, []).append(ratio)
            cell = f"{each['parameters'] / 1e9:.2f} ({ratio:.1f} times)"
            yield {(row, f"largest {what}"): f"{each[what]:,}"}
            yield {(row, f"{search}: billion parameters"): cell}
    least = {row: f"at least {min(x):.1f} times" for row, x in times.items()}
    yield f"With 8-bit weights, the model is {least['LPMM, 8 bits']} as large"
    yield f"with gradient release, {least['LPMM, 8 bits, release']}"


def _lpmm_text(record):
    loss = record["gaps_to_float32"]["loss"]
    for x in ("nearest", "stochastic"):
        yield _by_bits("Table 4, text: loss minus float32", loss, x, 4)


def _loss_scales(record):
    found = {name.partition(",")[0]: each for name, each in record["rules"].items()}
    digits = {"float32": 3, "no scale": 1, "Backoff": 3, "LogNormal": 3}
    loss = {name: shown(found[name]["final_loss"], n) for name, n in digits.items()}
    vanished = found["no scale"]["vanished"]["mean"]
    yield f"{vanished:.0%} of the gradients are zero without a loss scale"
    yield f"the loss ends at {loss['no scale']}"
    yield f"match the float32 loss of {loss['float32']}"
    yield f"Backoff ends at {loss['Backoff']}, and LogNormal at {loss['LogNormal']}"
    rate = {name: each["overflow_rate_after"]["mean"] for name, each in found.items()}
    assert rate["LogNormal"] == 0
    yield f"overflows in {rate['Backoff']:.2%} of the steps"
    yield f"After the first {record['options']['settled']} steps, LogNormal never"


def _regularizers(record):
    found = record["strengths"]["1e-05"]
    left = {name: _percent(each["off"], 1) for name, each in found.items()}
    yield f"{left['in the loss']} of the norm of these weights is left"
    assert left["master"] == left["float32"]
    yield f"float32 master, {left['master']} is left, as in float32"
    yield f"{found['in the loss']['lost']['mean']:.0%} of these gradients are lost"


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
PAGES = {
    "memory_efficient": "memory_profile operator_bytes forward_error float8_weights "
    "float16_clicks digit_gan t5_release",
    "bfloat16": "least_squares halted_descent narrow_clicks kahan_parts "
    "cancelled_updates text_roundings sixteen_bit_clicks sixteen_bit_network",
    "assignments": "demotion_orders overflow_spikes",
    "lpmm": "bin_changes microbatches lpmm_states lpmm_text lpmm_bounds largest_gpt",
    "openseq2seq": "loss_scales regularizers",
}
PAGE_OF = {name: page for page, names in PAGES.items() for name in names.split()}
OF_PAPERS = sorted(path.stem for path in (ROOT / "benchmarks/papers").glob("*.json"))
FIGURES = [
    *(
        (f"papers/{name}", f"claims/{PAGE_OF[name]}", globals()[f"_{name}"])
        for name in OF_PAPERS
    ),
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


def _tables(text):
    """Yields the cells of each table, keyed by row and column."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [line[1:-1].split("|") for line in block.splitlines()]
        (_, *heads), _, *rows = [[x.strip() for x in line] for line in lines]
        pairs = ((row[0], zip(heads, row[1:], strict=True)) for row in rows)
        yield {(row, x): cell for row, cells in pairs for x, cell in cells}


def _is_in(text, figures):
    if isinstance(figures, str):
        return " ".join(figures.split()) in " ".join(text.split())
    if isinstance(next(iter(figures)), tuple):
        return any(figures.items() <= table.items() for table in _tables(text))
    for table in _tables(text):
        if any(
            figures.items()
            <= {row: x for (row, y), x in table.items() if y == head}.items()
            for head in {head for _, head in table}
        ):
            return True
    items = [re.escape(f"{label}: {figure}") for label, figure in figures.items()]
    items = [re.compile(rf"(?<![\w+]){item}(?![.,]?\w)") for item in items]
    lines = re.sub(r"\n(?=[^|\n])", " ", text).splitlines()
    return any(all(x.search(line) for x in items) for line in lines)


@pytest.mark.parametrize(("record", "page", "figures"), FIGURES)
def test_the_figures_of_the_page_match_the_record(record, page, figures):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = json.loads((ROOT / "benchmarks" / f"{record}.json").read_text())
    for each in figures(found):
        assert _is_in(text, each), each


def test_the_answer_describes_every_experiment():
    text = (ROOT / "docs" / "accuracy.md").read_text()
    table = next(t for t in _tables(text) if any(head == LOWBIT for _, head in t))
    cells = [cell for (_, head), cell in table.items() if head == LOWBIT]
    assert len(cells) == 6
    for cell in cells:
        mean, deviation = map(float, cell.split(" ± "))
        assert mean < deviation
    assert _is_in(text, "by less than the standard deviation of this difference")


def test_the_savings_of_kahan_summation_are_those_of_its_report():
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)}
    total = lowbit_optax.memory_report(lowbit_optax.kahan_adamw(1e-3), params).total
    kahan, master = total.total / total.size, total.float32_master / total.size
    page = (ROOT / "docs" / "claims" / "bfloat16.md").read_text()
    assert _is_in(page, f"`kahan_adamw` stores {kahan:.0f} bytes per parameter")
    assert _is_in(page, f"{1 - kahan / 12:.0%} less than float32 AdamW (12 bytes)")
    both = f"a float32 master ({master:.0f} bytes)"
    assert _is_in(page, f"{1 - kahan / master:.0%} less than AdamW with {both}")


def test_verdicts_are_counted():
    text = (ROOT / "docs" / "claims.md").read_text()
    counts = re.findall(r"^- \*\*([\w ]+)\*\* \((\d+)\)", text, re.MULTILINE)
    verdicts = re.findall(r" \| ([\w ]+) \|$", text, re.MULTILINE)
    assert len(counts) == 4
    found = collections.Counter(verdicts) - collections.Counter(["verdict"])
    assert found == {verdict: int(count) for verdict, count in counts}
