"""The figures of the pages about the papers match their records.

Each function reads one record and yields the figures of its page, in a form that
``has_figures`` accepts.
"""

import collections
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowbit_optax
from benchmarks.papers import narrow_clicks
from benchmarks.papers.halted_descent import RATES
from benchmarks.papers.lpmm_states import CODES
from benchmarks.papers.microbatches import SMALL
from benchmarks.papers.rounded_passes import ORDERS
from benchmarks.records import gaps, shown
from tests.helpers.page_figures import has_figures
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


@pytest.mark.parametrize("name", OF_PAPERS)
def test_the_figures_of_the_page_match_the_record(name):
    text = (ROOT / "docs" / "claims" / f"{PAGE_OF[name]}.md").read_text()
    found = json.loads((ROOT / "benchmarks" / "papers" / f"{name}.json").read_text())
    for each in globals()[f"_{name}"](found):
        assert has_figures(text, each), each


def test_the_savings_of_kahan_summation_are_those_of_its_report():
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)}
    total = lowbit_optax.memory_report(lowbit_optax.kahan_adamw(1e-3), params).total
    kahan, master = total.total / total.size, total.float32_master / total.size
    page = (ROOT / "docs" / "claims" / "bfloat16.md").read_text()
    assert has_figures(page, f"`kahan_adamw` stores {kahan:.0f} bytes per parameter")
    assert has_figures(page, f"{1 - kahan / 12:.0%} less than float32 AdamW (12 bytes)")
    both = f"a float32 master ({master:.0f} bytes)"
    assert has_figures(page, f"{1 - kahan / master:.0%} less than AdamW with {both}")


def test_verdicts_are_counted():
    text = (ROOT / "docs" / "claims.md").read_text()
    counts = re.findall(r"^- \*\*([\w ]+)\*\* \((\d+)\)", text, re.MULTILINE)
    verdicts = re.findall(r" \| ([\w ]+) \|$", text, re.MULTILINE)
    assert len(counts) == 4
    found = collections.Counter(verdicts) - collections.Counter(["verdict"])
    assert found == {verdict: int(count) for verdict, count in counts}
