"""The optimizers, formats and problems that several test files share."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import emulation
from lowbit_optax._step.stepper import stepper_of


def matching_grad_dtype(tx):
    """The same transformation of this package, with updates in the gradients' dtype."""
    same = dataclasses.replace(stepper_of(tx), match_grad_dtype=True)
    return same.transformation


BFLOAT16_MOMENTS = lowbit_optax.cast(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A lowbit transformation and the float32 transformation that it corresponds to."""

    make: Callable
    reference: Callable
    peak: float = 0.02

    def __call__(self, learning_rate=None):
        """The transformation, the same object for equal rates, so that jit caches."""
        return _made(self, self.peak if learning_rate is None else learning_rate)


@functools.cache
def _made(optimizer, learning_rate):
    return optimizer.make(learning_rate)


_sgd = functools.partial(optax.sgd, momentum=0.9)


def _like_sgd(alias, **fixed):
    return Optimizer(lambda rate: alias(rate, momentum=0.9, **fixed), _sgd)


def _like_adamw(alias, reference=optax.adamw, **fixed):
    return Optimizer(lambda rate: alias(rate, **fixed), reference, 0.003)


def _factored(rate):
    return optax.chain(
        lowbit_optax.scale_by_factored_adam(min_dim_size_to_factor=8),
        optax.add_decayed_weights(1e-4),
        optax.scale_by_learning_rate(rate),
    )


def _bits(bits, **fixed):
    return dict(bits=bits, min_size=0, **fixed)


ALIASES = {
    "kahan_sgd": _like_sgd(lowbit_optax.kahan_sgd),
    "sr_sgd": _like_sgd(lowbit_optax.sr_sgd),
    "extra_bits_sgd_8": _like_sgd(lowbit_optax.extra_bits_sgd, **_bits(8)),
    "extra_bits_sgd_16": _like_sgd(lowbit_optax.extra_bits_sgd, **_bits(16)),
    "kahan_adamw": _like_adamw(lowbit_optax.kahan_adamw),
    "sr_adamw": _like_adamw(lowbit_optax.sr_adamw),
    "extra_bits_adamw_8": _like_adamw(lowbit_optax.extra_bits_adamw, **_bits(8)),
    "extra_bits_adamw_16": _like_adamw(lowbit_optax.extra_bits_adamw, **_bits(16)),
    "lowbit_sgd": _like_sgd(lowbit_optax.lowbit_sgd, **_bits(8)),
    "lowbit_adamw": _like_adamw(lowbit_optax.lowbit_adamw, **_bits(8)),
    "factored_adamw_8": _like_adamw(
        lowbit_optax.factored_adamw, _factored, **_bits(8, min_dim_size_to_factor=8)
    ),
    "lowbit_lion": _like_adamw(lowbit_optax.lowbit_lion, optax.lion, **_bits(8)),
}
"""Every alias as users write it, with 8 and 16 bits; small leaves are packed too."""

EVERY_ALIAS = {
    name: getattr(lowbit_optax, name)
    for name in lowbit_optax.__all__
    if name.endswith(("_sgd", "_adamw", "_lion", "lpmm_adam"))
}
"""The aliases' functions by name; LPMM's need quantised weights."""

OF_OPTAX = {
    name: getattr(optax, name.split("_")[-1])
    for name in EVERY_ALIAS
    if not name.startswith("lpmm_")
}
"""The optax alias that corresponds to each of the other aliases."""

VARIANTS = {
    "factored_adamw_0": _like_adamw(
        lowbit_optax.factored_adamw, _factored, **_bits(0, min_dim_size_to_factor=8)
    ),
    "kahan_adamw_stochastic": _like_adamw(
        lowbit_optax.kahan_adamw, rounding="stochastic"
    ),
    "extra_bits_adamw_8_toward_zero": _like_adamw(
        lowbit_optax.extra_bits_adamw, **_bits(8, rounding="toward_zero")
    ),
    "extra_bits_adamw_7_stochastic": _like_adamw(
        lowbit_optax.extra_bits_adamw, **_bits(7, rounding="stochastic")
    ),
    "extra_bits_adamw_8_bfloat16_moments": _like_adamw(
        lowbit_optax.extra_bits_adamw, **_bits(8, moments=BFLOAT16_MOMENTS)
    ),
}
"""Aliases with other roundings and moments."""

_adamw_of_the_unit = functools.partial(optax.adamw, b2=0.997)
UNIT = {
    "sixteen_bit_sgd_kahan": _like_sgd(emulation.sixteen_bit_sgd),
    "sixteen_bit_sgd_stochastic": _like_sgd(
        emulation.sixteen_bit_sgd, rounding="stochastic"
    ),
    "sixteen_bit_adamw_kahan": _like_adamw(
        emulation.sixteen_bit_adamw, _adamw_of_the_unit
    ),
    "sixteen_bit_adamw_stochastic": _like_adamw(
        emulation.sixteen_bit_adamw, _adamw_of_the_unit, rounding="stochastic"
    ),
}
"""The 16-bit unit of the paper."""

INNERS = {
    "lion": (optax.lion, 0.003),
    "rmsprop": (optax.rmsprop, 0.003),
    "lamb": (optax.lamb, 0.003),
    "adafactor": (lambda rate: optax.adafactor(rate, min_dim_size_to_factor=8), 0.03),
    "muon": (optax.contrib.muon, 0.03),
}
"""Transformations to wrap: sign updates, no momentum, layerwise, factored, matrices."""

FORMATS = {
    "extra_bits_16": lowbit_optax.extra_bits(16),
    "extra_bits_8": lowbit_optax.extra_bits(8),
    "extra_bits_8_toward_zero": lowbit_optax.extra_bits(8, rounding="toward_zero"),
    "extra_bits_7_stochastic": lowbit_optax.extra_bits(7, rounding="stochastic"),
    "kahan": lowbit_optax.kahan(),
    "kahan_stochastic": lowbit_optax.kahan(rounding="stochastic"),
    "stochastic_rounding": lowbit_optax.stochastic_rounding(),
    "master_copy": lowbit_optax.master_copy(),
}
"""Weight formats that keep small updates; ``nearest`` does not."""

ALL_FORMATS = {**FORMATS, "nearest": lowbit_optax.nearest()}


def weights_only(inner, weights, **options):
    """``lowbit`` with a format for weights, and with float32 moments."""
    return lowbit_optax.lowbit(inner, weights=weights, moments="float32", **options)


def adamw(rate, weights, moments="float32", **options):
    """``lowbit`` around AdamW that also packs small leaves."""
    options = {"min_size": 0, **options}
    return lowbit_optax.lowbit(
        optax.adamw(rate), weights=weights, moments=moments, **options
    )


def _wrapped(inner, weights):
    options = dict(weights=weights, moments=BFLOAT16_MOMENTS, min_size=0)
    return lambda rate: lowbit_optax.lowbit(inner(rate), **options)


# Only Lion is tested with all formats, because compilation dominates the tests' time.
_FEW = ("extra_bits_8", "kahan", "stochastic_rounding")

WRAPPED = {
    f"{inner}_{weights}": Optimizer(
        _wrapped(INNERS[inner][0], FORMATS[weights]), *INNERS[inner]
    )
    for inner in INNERS
    for weights in (FORMATS if inner == "lion" else _FEW)
}
"""``lowbit`` around other transformations in each format, with bfloat16 moments."""

OPTIMIZERS = {**ALIASES, **VARIANTS, **UNIT}


def elementwise(table):
    """The optimizers of a table whose state has no means over axes of a parameter."""
    return {name: x for name, x in table.items() if not name.startswith("factored")}


def each(table):
    """A parametrisation over a table, with the table's keys as test names."""
    return pytest.mark.parametrize("optimizer", table.values(), ids=table.keys())


@functools.cache
def _model(dtype):
    random = np.random.default_rng(0)
    shapes = {"kernel": (64, 24), "bias": (40,)}
    return {
        name: jnp.asarray(random.standard_normal(shape), jnp.float32).astype(dtype)
        for name, shape in shapes.items()
    }


def model_params(dtype=jnp.bfloat16):
    """A kernel, and a bias with 40 elements, which is not a multiple of 32."""
    return dict(_model(dtype))


def normal(seed, shape=(64, 64), dtype=jnp.float32):
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(numbers, dtype)


def random_grads(params, seed, dtype=jnp.float32):
    """Normal gradients with a standard deviation of 0.1."""
    random = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(0.1 * random.standard_normal(leaf.shape), dtype)
    return jax.tree.map(draw, params)


def gradient_series(params, count, dtype=jnp.float32):
    return [random_grads(params, 100 + i, dtype) for i in range(count)]


def apply(tx, params, state, grads, **extra_args):
    """One step as users of optax write it."""
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def initial(tx, params):
    """The transformation's state from a jitted ``init``.

    Without jit, some hundred operations would be compiled separately.
    ``test_lowbit.py`` tests that the state is the same.
    """
    return jax.jit(tx.init)(params)


@functools.cache
def jitted(tx, advance):
    return jax.jit(functools.partial(advance, tx))


def train(tx, params, state, series, advance=apply):
    """Run jitted steps over a series of gradients."""
    advance = jitted(tx, advance)
    for grads in series:
        params, state = advance(params, state, grads)
    return params, state


def bits(tree):
    """Every leaf as unsigned integers: -0 differs from 0, and NaNs are comparable."""

    def leaf(x):
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        return x.view(f"u{x.dtype.itemsize}") if x.dtype.itemsize < 16 else x

    return jax.tree.map(leaf, tree)


def assert_same_bits(got, want):
    """Assert that structure, shapes, dtypes and every bit are equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    got_leaves = jax.tree_util.tree_flatten_with_path(got)[0]
    for (path, a), b in zip(got_leaves, jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        wrong = np.count_nonzero(bits(a) != bits(b))
        assert not wrong, f"{name}: {wrong} of {a.size} elements differ"


def spec_of(tree):
    """Structure, shapes and dtypes, including weak types."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [jax.api_util.shaped_abstractify(leaf) for leaf in leaves]


def relaxed(inner):
    """An optax transformation that may promote dtypes, even if its caller may not."""
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)
