"""The rows of the benchmarks have the formats that their names and pages say.

``row_formats.txt`` lists formats of rows: the format that most weights have, and the
format that most of the values of each moment have, with their shares unless they are
all. "+8 nearest/stochastic" is ``extra_bits(8)``: the parameter is rounded to nearest,
and the last extra bit stochastically; a single word is the rounding of both. Moments
have 32 bits, bfloat16, or their bits, code and rounding. The tests start the training
of each row, and stop it when it creates its optimizer state.
"""

import argparse
import collections
import dataclasses
import importlib
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import ROOT
from benchmarks.papers import click_log, next_byte, noisy_digits
from benchmarks.papers import small_text_models as models
from lowbit_optax import lpmm
from lowbit_optax._step import engine, trees
from lowbit_optax._step.moments import find_slots
from tools.models.gpt import GPT

pytestmark = pytest.mark.standard_promotion  # optax's

ARGS = argparse.Namespace(
    steps=50, seeds=1, learning_rate=1e-3, width=8, batch_size=8, pixels=16
)
KEY = jax.random.key(0)
SPLIT = "benchmarks.papers.forward_error"
TEXTS = 20, 4, models.LENGTH
NOISY = 20, 64, jnp.arange(1), noisy_digits.data()
WINDOWS = jax.ShapeDtypeStruct((20, 4, next_byte.CONTEXT + 1), jnp.int32)
LOGS = click_log.generate(1, 256), click_log.generate(2, 256)


class Started(Exception):
    """Ends the training of a row."""


def _weights_text(format_):
    """Return the name of a weight format."""
    kind = type(format_).__name__
    if kind == "BlockScaledWeights":
        return _weights_text(format_.format)
    get = lambda name: getattr(format_, name, None)
    roundings = dict.fromkeys((get("rounding"), get("residual_rounding")))
    both = "/".join(filter(None, roundings))
    found = {
        "Nearest": "nearest",
        "MasterCopyFormat": "float32 master",
        "StochasticRounding": "stochastic",
        "KahanFormat": f"Kahan {both}",
        "ExtraBits": f"+{get('bits')} {both}",
        "QuantizedWeights": get("rounding"),
    }[kind]
    significand = get("significand")
    found += f", {9 + significand.bits} bits" if significand else ""
    found += f", error into {get('error_feedback')}" if get("error_feedback") else ""
    return found + ", exact sums" * (get("sum_rounding") == "stochastic")


def _moment_text(format_):
    """Return the name of a moment format."""
    if format_ is None:
        return "32"
    if not hasattr(format_, "bits"):
        return str(format_.dtype)
    parts = format_.bits, format_.code, format_.rounding
    return " ".join(str(part) for part in parts if part)


def _dtype(leaf):
    if isinstance(leaf, lpmm.QuantizedTensor):
        return f"{leaf.bits} bits"
    return "MXFP8" if trees.is_quantized(leaf) else str(leaf.dtype)


def _most(sizes):
    """Return the format with the largest share, and the share unless it is all."""
    text, size = sizes.most_common(1)[0]
    share = size / sum(sizes.values())
    return text if share == 1 else f"{text} {share:.0%}"


@pytest.fixture
def started(monkeypatch):
    """A function that starts a training and returns the formats of its state.

    If ``parts`` is 2, the state has two parts with formats of their own.
    """
    weights, moments = collections.Counter(), {}
    left = 0

    def start(lowbit, params, masters):
        nonlocal left
        names, given, treedef = trees.named_leaves(params)
        leaves = lowbit.leaves(names, given)
        of_name = {leaf.name: leaf for leaf in leaves}
        for leaf in leaves:
            if leaf.format is not None:
                text = f"{_dtype(leaf.param)} {_weights_text(leaf.format)}"
                weights[text] += leaf.param.size
        plan = lowbit.plan_of(leaves, treedef)
        # A plan with float32 moments does not need to find them.
        slots = find_slots(lowbit.inner, lowbit.moments, plan.expected)
        for moment in dataclasses.replace(plan, slots=slots).moments.values():
            leaf = of_name[moment.leaf]
            if leaf.format is not None:
                sizes = moments.setdefault(moment.slot.field, collections.Counter())
                sizes[_moment_text(moment.format)] += leaf.param.size
        left -= 1
        if not left:
            raise Started
        return real(lowbit, params, masters)

    def formats(train, parts=1):
        nonlocal left
        left = parts
        with pytest.raises(Started):
            train()
        each = [f"{field} {_most(sizes)}" for field, sizes in moments.items()]
        found = "; ".join([_most(weights), *each])
        weights.clear()
        moments.clear()
        return found

    real = engine.Lowbit.start
    monkeypatch.setattr(engine.Lowbit, "start", start)
    monkeypatch.setattr(click_log, "both", lambda: LOGS)
    return formats


def _shapes(init, *given):
    return jax.eval_shape(lambda: init(*given))


def _gpt(context, layers):
    """Return a function that starts a row of a GPT of width 64."""

    def start(module, name):
        row = module.ROWS[name]
        tx = row.build(optax.constant_schedule(1e-3))
        master = _shapes(GPT(layers, 64, 4, context).init, KEY)
        jax.eval_shape(lambda master: row.start(tx, master), master)

    return start


def _text(module, *given):
    module.train(*given, _shapes(next_byte.init, 0), WINDOWS)


def _clicks(module, name):
    runs = module.RUNS
    module.RUNS = {name: runs[name]}
    try:
        module.measure(ARGS)
    finally:
        module.RUNS = runs


def _noisy(tx, bits):
    noisy_digits.train(tx, bits, 20, 64, jnp.arange(1), noisy_digits.data())


def _encoder(module, *given):
    windows, labels = (jax.ShapeDtypeStruct(x, jnp.int32) for x in (TEXTS, TEXTS[:2]))
    rows = models.Rows(windows, labels)
    module.train(*given, _shapes(models.ENCODER.init, 0, 32), rows)


def _digit_gan(module, name):
    module.train(name, 2, 1e-3, 0, jax.ShapeDtypeStruct((8, 8, 8, 1), jnp.float32))


def _microbatches(module, name):
    case = module.cases()[name]
    _noisy(module.optimizer(*case, 0.1, 20), case[0])


def _reinforcement(module, name):
    like = _shapes(module.MODEL.init, KEY)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    module.pretrained, kept = lambda: zeros, module.pretrained
    try:
        module.train(name, 1e-3, ARGS)
    finally:
        module.pretrained = kept


def _resnet(module, name):
    sys.path.append(str(ROOT / "examples"))
    example = importlib.import_module("resnet_cifar")
    images = jax.ShapeDtypeStruct((8, 16, 16, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((8,), jnp.int32)
    train = lambda *of: module.train(example, ARGS, of, of, name, 0)
    jax.eval_shape(train, images, labels)


# How to start the training of a row, and how many parts its state has, by benchmark.
STARTS = {
    "papers.bin_changes": (lambda m, x: _text(m, 10, x, 0.1), 1),
    "papers.cancelled_updates": (_clicks, 1),
    "papers.digit_gan": (_digit_gan, 1),
    "papers.float16_clicks": (_clicks, 1),
    "papers.float8_weights": (lambda m, x: _text(m, x, 0.1), 1),
    "papers.kahan_parts": (lambda m, x: _text(m, x, 0.1), 2),
    "papers.least_squares": (lambda m, x: m.train(x, 100, 0), 1),
    "papers.loss_scales": (_text, 1),
    "papers.lpmm_states": (lambda m, x: _noisy(*m.cases(1.0, 20)[x]), 1),
    "papers.lpmm_text": (lambda m, x: _encoder(m, 1e-3, x), 1),
    "papers.microbatches": (_microbatches, 1),
    "papers.narrow_clicks": (_clicks, 1),
    "papers.regularizers": (lambda m, x: m.train(x, 1e-3, *NOISY), 1),
    "papers.sixteen_bit_clicks": (_clicks, 1),
    "papers.sixteen_bit_network": (lambda m, x: m.train(m.runs_of("SGD")[x], 20, 0), 1),
    "papers.text_roundings": (lambda m, x: _encoder(m, "encoder", 1e-3, x), 1),
    "training.digit_moments": (lambda m, x: m.train(x, ARGS), 1),
    "training.gpt_formats": (_gpt(32, 2), 1),
    "training.muon_momentum": (_gpt(32, 2), 1),
    "training.pareto": (lambda m, x: m.loss("digits", x, 20, 0), 1),
    "training.reinforcement": (_reinforcement, 1),
    "training.resnet_cifar": (_resnet, 1),
    "training.rounding_errors": (lambda m, x: m.excess(x, 1e-3, 0, 20), 1),
    "training.text.optimal_rows": (_gpt(64, 4), 1),
    "training.text.shakespeare_rows": (_gpt(64, 4), 1),
}

TEXT = (pathlib.Path(__file__).parent / "row_formats.txt").read_text()
FORMATS = {
    name: dict(re.findall("^  (.*) = (.*)$", rows, re.MULTILINE))
    for name, rows in re.findall(r"^(\S+)\n((?:  .*\n)+)", TEXT, re.MULTILINE)
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_have_the_formats_that_the_pages_describe(name, started):
    module = importlib.import_module(f"benchmarks.{name}")
    start, parts = STARTS[name]
    for row, formats in FORMATS[name].items():
        assert started(lambda row=row: start(module, row), parts) == formats, row


WORDS = {
    "toward zero": "toward_zero",
    "nearest": "nearest",
    "stochastic": "stochastic",
    "Kahan": "Kahan",
    "error into mu": "error into mu",
    "float32 moments": "32",
    "float16": "float16",
    "float8": "float8",
}


def test_names_of_rows_agree_with_their_formats():
    rows = [row for name in FORMATS for row in FORMATS[name].items()]
    assert len(rows) > 70
    for row, formats in rows:
        for word, found in WORDS.items():
            assert word not in row or found in formats, row
        for bits in re.findall(r"\+(\d+)|(\d+) extra bits", row):
            assert f"+{''.join(bits)} " in formats, row


def test_split_arrays_are_rounded_as_their_names_say():
    for row, format_ in importlib.import_module(SPLIT).FORMATS.items():
        text = _weights_text(format_)
        for word, found in WORDS.items():
            assert word == "float16" or word not in row or text.endswith(found), row
