"""The figures of ``docs/claims.md`` and of other pages are those of the records.

A function of a record gives the texts that its page must have.
"""

import json

import pytest
from places import ROOT

from benchmarks.papers.float8_weights import ROUNDINGS, SIZES
from benchmarks.papers.lpmm_states import CODES
from benchmarks.papers.microbatches import SMALL
from benchmarks.papers.t5_release import MODES as T5_MODES
from benchmarks.records import gaps, shown
from benchmarks.training import compute_optimal, pareto, reinforcement


def _percent(found, digits):
    mean, std = (100 * found[key] for key in ("mean", "std"))
    return f"{mean:.{digits}f}% ± {std:.{digits}f}%"


def _memory_profile(record):
    cases = record["cases"]
    master = cases["float32 master"]["peak"]
    share = lambda name: f"{cases[name]['peak'] / master - 1:+.0%}"
    yield f"by gradient release: {share('16 extra bits, release')}"
    low, released = share("lowbit_sgd"), share("lowbit_sgd, release")
    yield f"`lowbit_sgd` {low}, by release {released}"


def _operator_bytes(record):
    rows = record["rows"]
    assert all(row["fused_moved"] == row["least"] for row in rows.values())
    split = [row for bits, row in rows.items() if bits != "0"]
    shares = [row["least"] / row["moved"] for row in split]
    launches = [row["launches"] for row in split]
    yield f"{min(launches)} to {max(launches)} kernels"
    yield f"{min(shares):.0%} to {max(shares):.0%}"


def _forward_error(record):
    errors = record["errors"]
    first = lambda name: 1e4 * errors[name]["16-bit part"][0]["mean"]
    last = lambda name: errors[name]["joined"][-1]["mean"]
    yield f"{first('+8, toward zero'):.2f}e-4 against {first('float16'):.2f}e-4"
    eight, none = 1e6 * last("+8, toward zero"), 1e3 * last("float16")
    yield f"{eight:.1f}e-6 against {none:.1f}e-3"


def _float8_weights(record):
    found = record["held_out"]
    of = lambda name: shown(found[name]) if name in found else ""
    yield f"float32 {of('float32')}; float16 with 8 bits"
    kinds = (*ROUNDINGS.values(), "default")
    for size in SIZES:
        losses = " | ".join(of(f"{size}: {kind}") for kind in kinds)
        yield f"| {size} | {losses} |"
    yield f"| float8 |  | {of('float8: nearest')} | {of('float8: stochastic')} |"


def _float16_clicks(record):
    found = record["gaps_to_float32"]["auc"]
    yield f"float16 {_percent(found['float16'], 3)}"
    yield f"with 8 extra bits {_percent(found['float16, +8'], 3)}"


def _digit_gan(found):
    gaps = found["gaps_to_float32"]
    yield f"float32 ({shown(found['distance']['float32'], 1)})"
    yield f"to nearest {shown(gaps['bfloat16'], 1)}"
    yield f"8 extra bits {shown(gaps['bfloat16, +8'], 1)}"
    yield f"is {found['distance_of_halves']:.1f}."


def _t5_release(found):
    for batch, become in (("8", "GiB become"), ("32", "become")):
        without, released = (found["memory"][batch][m]["peak"] for m in T5_MODES)
        sizes = f"{without / 2**30:.2f} {become} {released / 2**30:.2f}"
        yield f"{sizes} ({released / without - 1:+.0%})"
    yield f"a small one {shown(found['loss']['with'])}"
    yield f"without {shown(found['gap'], 5)}"


def _least_squares(record):
    final = record["final"]
    yield f"float32 {shown(final['float32'])}"
    yield f"all but weights rounded {shown(final['nearest: all but weights'])}"
    yield f"only weights {shown(final['nearest: only weights'], 2)}"
    yield f"Stochastic {shown(final['weights stochastic'], 2)}"
    yield f"Kahan {shown(final['weights by Kahan'], 2)}"


def _kahan_parts(record):
    for name in ("nearest", "Kahan: output", "Kahan: output, hidden", "Kahan: all"):
        yield shown(record["gaps_to_stochastic"][name], 4)


def _cancelled_updates(record):
    for name in ("nearest", "stochastic", "Kahan"):
        yield f"{name} {_percent(record['gaps_to_float32'][name], 2)}"


def _text_roundings(record):
    gaps = record["gaps_to_float32"]
    for name in ("nearest", "stochastic", "Kahan"):
        yield f"{name} {_percent(gaps['encoder']['accuracy'][name], 2)}"
        yield f"{name} {shown(gaps['GRU']['loss'][name], 4)}"


def _bin_changes(record):
    found = record["held_out"]
    yield f"float32 {shown(found['float32'])}"
    for rounding in ("nearest", "stochastic"):
        means = [found[f"{bits} bits, {rounding}"] for bits in (12, 10, 8)]
        yield ", ".join(f"{x['mean']:.3f}" for x in means[:2]) + f", {shown(means[2])}"


def _demotion_orders(record):
    found = record["assignments"]
    accuracy = lambda name: shown(found[name]["accuracy"], 1)
    low = lambda name: found[name]["low_ratio"]["mean"]
    runs = len(found["float32"]["accuracy"]["values"])
    yield f"float32 {accuracy('float32')}%"
    yield f"0.64 of all elements: {accuracy('decreasing, 0.6')}%"
    assert f"{low('decreasing, 0.6'):.2f}" == "0.64"
    yield f"increasing, at {low('increasing, 0.15'):.2f}: "
    yield accuracy("increasing, 0.15")
    assert found["increasing, 0.15"]["diverged"] == runs
    lost = found["random, 0.15"]["diverged"]
    yield f"random, at {low('random, 0.15'):.2f}: {lost} of {runs} seeds diverge"
    yield f"uniform ({low('uniform'):.2f}) {accuracy('uniform')}%"
    name = "operator-based, outputs"
    yield f"too ({low(name):.2f}) {accuracy(name)}%"
    yield f"operator-based ({low('operator-based'):.2f}) {accuracy('operator-based')}%"
    name = "uniform, promotion"
    yield f"uniform {accuracy(name)}% at {low(name):.2f}"
    promoted = [each for name, each in found.items() if name.endswith("promotion")]
    assert not any(each["diverged"] for each in promoted)
    least = min(each["accuracy"]["mean"] for each in promoted)
    yield f"at least {least:.1f}%"
    alone = [found[f"only group {i}"]["diverged"] for i in range(8)]
    assert alone == [0, 0, 0, 0, 0, 1, runs, 0]
    yield f"last hidden layer ({low('only group 6'):.0%} of the elements)"


def _microbatches(record):
    found = record["held_out"]
    yield f"float32 {shown(found['float32, N=1'])}; nearest, 12, 10 and 8 bits"
    for kind in ("nearest", "N=1"):
        yield ", ".join(shown(found[f"{bits} bits, {kind}"]) for bits in (12, 10, 8))
    values = {name: each["values"] for name, each in found.items()}
    gained = gaps(values, "8 bits, N=1")
    yield f"N = 4 {shown(gained['8 bits, N=4'])}"
    yield f"N = 16 {shown(gained['8 bits, N=16'])}"
    for bits in (12, 10):
        for n in (4, 16):
            gap = gaps(values, f"{bits} bits, N=1")[f"{bits} bits, N={n}"]
            assert abs(gap["mean"]) < gap["std"]
    shares = record["shares_below"]
    eighth = SMALL.index(1 / 8)
    small = [shares[f"8 bits, N={n}"][eighth] for n in (1, 16)]
    yield f"{small[0]:.0%} of them are below an eighth of a step, with N = 16"
    yield f"N = 16 {small[1]:.0%}"


def _lpmm_states(found):
    gap = lambda name: shown(found["gaps_to_float32"][name], 4)
    codes = {f"{c} {b}": gap(f"SGD, 12 bits, {c} {b}") for c, b in CODES}
    yield f"in 8 bits {codes['dynamic 8']}, linear {codes['linear 8']}"
    yield f"in 4 bits {codes['dynamic 4']} and {codes['linear 4']}"
    yield f"12 bits {gap('Adam, 12 bits')}, 8 bits {gap('Adam, 8 bits')}"
    bits = {name: f"{each:.2f}" for name, each in found["bits"].items()}
    sgd = [bits[f"LPMM-SGD, {b} bits"] for b in (12, 8)]
    yield f"SGD {sgd[0]} bits with 12-bit weights, {sgd[1]} with 8"
    adam = [bits[f"LPMM-Adam, {b} bits"] for b in (12, 8)]
    yield f"Adam {adam[0]} and {adam[1]}, float32 {bits['Adam, float32']}"
    share = found["bits"]["LPMM-Adam, 8 bits"] / found["bits"]["Adam, float32"] - 1
    yield f"so {share:+.0%} with 8"


def _lpmm_text(record):
    loss = record["gaps_to_float32"]["loss"]
    for rounding in ("stochastic", "nearest"):
        names = [f"{bits} bits, {rounding}" for bits in (12, 10, 8)]
        yield ", ".join(shown(loss[name], 4) for name in names)


def _loss_scales(record):
    rules = record["rules"]
    loss = {name: found["final_loss"] for name, found in rules.items()}
    yield f"float32 {shown(loss['float32'])}, no scale {shown(loss['no scale'], 1)}"
    yield f"Backoff {shown(loss['Backoff, period 100'])}"
    yield f"LogNormal {shown(loss['LogNormal'])}"
    rate = rules["Backoff, period 100"]["overflow_rate_after"]["mean"]
    yield f"a period of 100 {rate:.2%}"
    assert rules["LogNormal"]["overflow_rate_after"]["mean"] == 0


def _regularizers(record):
    found = record["strengths"]
    left = lambda strength, kind: found[strength][kind]["off"]
    in_loss = "in the loss"
    for strength in ("1e-05", "0.0001"):
        yield _percent(left(strength, in_loss), 1)
        assert left(strength, "master")["mean"] < 0.001
        assert left(strength, "float32")["mean"] < 0.001
    yield f"{found['1e-05'][in_loss]['lost']['mean']:.0%} of its gradients"
    yield f"float32 {shown(found['1e-05'][in_loss]['gap_to_float32'], 4)}"
    scaled = left("1e-05", "in the loss, scaled")["mean"]
    yield f"1024 {scaled:.1%} of the norm is left"


def _pareto(record):
    runs = record["runs"]
    found = {task: pareto.excess(runs, task) for task in pareto.LOSSES}
    text = lambda x: f"{x['mean']:.0f}% ± {x['std']:.0f}%"
    for weights in ("nearest", "stochastic", "error into mu", "+4", "+8"):
        yield f"{weights} {text(found['linear'][f'{weights}, 8'])}"
    lpmm = [text(found["linear"][f"LPMM {bits}, 8"]) for bits in (12, 10, 8)]
    yield f"LPMM with 12, 10 and 8 bits {', '.join(lpmm)}"
    yield f"to nearest: {text(found['digits']['nearest, 8'])}"
    yield f"at 19 bits: {text(found['digits']['LPMM 8, low'])}"
    above = [n for n, x in found["digits"].items() if x["mean"] > x["std"] > 0]
    assert above == ["nearest, 32", "nearest, 8"]
    yield f"extra bits {text(found['linear']['+16, 32'])} remain"
    bits = {name: each["bits"] for name, each in runs.items()}
    means = {name: each["mean"] for name, each in found["linear"].items()}
    best = pareto.front(bits, means)[:10]
    assert best == [
        "LPMM 8, low",
        "LPMM 10, low",
        "LPMM 12, low",
        "error into mu, low",
        "+2, low",
        "+4, low",
        "error into mu, 8",
        "+8, low",
        "+4, 8",
        "+8, 8",
    ]
    assert [round(bits[name]) for name in best] == [
        *(19, 21, 23, 27, 29),
        *(31, 33, 35, 37, 41),
    ]


def _precision_memory(record):
    yield f"| float32, without `apply` | | {record['float32']:,.0f} | |"
    for found in record["ratios"].values():
        both = f"{found['emulated']:,.0f} | {found['stored']:,.0f}"
        yield f"| {found['low_ratio']:.2f} | {both} |"


def _half_of_precision_memory(record):
    half = record["ratios"]["0.5"]["stored"]
    yield f"{record['float32']:,.0f} MiB of temporary memory become {half:,.0f}"


def _large_models(record):
    parts = ("parameters", "state", "carries", "temporary", "peak")
    for found in record["llama_8b"].values():
        cells = " | ".join(f"{found[part] / 2**30:.2f}" for part in parts)
        yield f" | {cells} |"
    for case in ("float32 master", "lowbit_adamw, release"):
        found = [record["largest"][f"{case}, {x}"] for x in ("1 H200", "1 v6e")]
        yield " | ".join(f"{x['parameters'] / 1e9:.1f}" for x in found)


def _gpt_formats(record):
    for run in record["runs"].values():
        loss = shown(run["held-out loss"], 4)
        yield f"| {run['bytes_per_parameter']:.2f} | {loss} |"
        for end in {"held-out loss", "of the average"} & set(run["gaps"]):
            if run["gaps"][end]["std"]:
                yield f"| {shown(run['gaps'][end], 4)} |"


def _compute_optimal(record):
    yield from compute_optimal.table(record["runs"]).splitlines()
    yield f"{record['parameters']:,}"
    yield f"{record['tokens_per_parameter']:.1f} bytes of text per parameter"


def _reinforcement(record):
    yield from reinforcement.table(record).splitlines()


OF_PAPERS = (
    *(_memory_profile, _operator_bytes, _forward_error, _float8_weights),
    *(_float16_clicks, _digit_gan, _t5_release, _least_squares, _kahan_parts),
    *(_cancelled_updates, _text_roundings, _bin_changes, _demotion_orders),
    *(_microbatches, _lpmm_states, _lpmm_text, _loss_scales, _regularizers),
)
FIGURES = [
    *((f"papers/{x.__name__[1:]}", "claims", x) for x in OF_PAPERS),
    ("training/pareto", "claims", _pareto),
    ("training/gpt_formats", "accuracy", _gpt_formats),
    ("training/compute_optimal", "accuracy", _compute_optimal),
    ("training/compute_optimal_large", "accuracy", _compute_optimal),
    ("training/reinforcement", "reinforcement", _reinforcement),
    ("programs/large_models", "claims", _large_models),
    ("programs/precision_memory", "claims", _half_of_precision_memory),
    ("programs/precision_memory", "ideas/precision", _precision_memory),
]


@pytest.mark.parametrize(("record", "page", "figures"), FIGURES)
def test_the_figures_of_the_page_are_those_of_the_record(record, page, figures):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = json.loads((ROOT / "benchmarks" / f"{record}.json").read_text())
    for figure in figures(found):
        assert figure in text
