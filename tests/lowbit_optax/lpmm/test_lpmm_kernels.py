"""LPMM's interpreted kernels and XLA produce the same numbers.

Kernels and XLA may round sums with products differently; see
``test_implementations.py``. Hyperparameters and step sizes of weights are powers of
two, so their products are exact. The momentum's step sizes are not, so its products are
not fused with sums.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import block_quantized, lowbit, lpmm_adam, lpmm_sgd
from lowbit_optax.formats import quantized_weights
from tests.helpers.optimizers import assert_same_bits, initial, random_grads
from tests.helpers.quantized_weights import quantised, shrinking
from tests.helpers.released import OPERATION_BY_OPERATION

pytestmark = pytest.mark.standard_promotion


# Maps a case to shape, bits of the weights, block size and implementation. The ragged
# leaf has columns that are not a multiple of four, and blocks that reach beyond its
# ends. Leaves for TPUs are large enough for the TPU kernel.
LEAVES = {
    "even": ((64, 64), 12, 2048, "pallas"),
    "ragged": ((70, 61), 8, 256, "pallas"),
    "tpu even": ((128, 256), 12, 2048, "tpu"),
    "tpu ragged": ((133, 131), 12, 2048, "tpu"),
}
MORE_LEAVES = LEAVES | {
    "tpu stacked": ((2, 72, 257), 8, 256, "tpu"),
    "tpu ten bits": ((133, 131), 10, 2048, "tpu"),
}


def each_of(leaves):
    names, slow = ("shape", "bits", "block_size", "by"), pytest.mark.slow_to_compile
    cases = [
        pytest.param(*leaf, id=name, marks=[slow] if leaf[-1] == "tpu" else [])
        for name, leaf in leaves.items()
    ]
    return pytest.mark.parametrize(names, cases)


def steps(make, implementation, params, series):
    """Returns the parameters and the state after each step."""
    tx = make(implementation=implementation)
    state = initial(tx, params)
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    traced = step.trace(params, state, series[0])
    # Check that the leaf is large enough to get a kernel.
    assert ("pallas_call" in str(traced.jaxpr)) == (implementation != "xla")
    step = traced.lower().compile(compiler_options=OPERATION_BY_OPERATION)
    for grads in series:
        params, state = step(params, state, grads)
        yield params, state


def both(make, params, series, by):
    """Yields pairs of results, from the kernel and from XLA."""
    each = (steps(make, name, params, series) for name in (by, "xla"))
    return zip(*each, strict=True)


@each_of(MORE_LEAVES)
def test_steps_of_sgd_have_the_same_bits(shape, bits, block_size, by):
    params = quantised(shape, bits, block_size)
    # The first gradient is the largest, and its changes determine later step sizes.
    first, small = shrinking(params, 0), shrinking(params, 1)
    small = jax.tree.map(lambda x: jnp.where(jnp.abs(x) < 2.0**-4, x, 0), small)
    # A TPU kernel supports a single block size.
    momentum = block_size if by == "tpu" else None
    make = functools.partial(lpmm_sgd, 0.25, 0.25, block_size=momentum)
    for by_kernel, by_xla in both(make, params, [first, small, small], by):
        assert_same_bits(by_kernel, by_xla)
        assert (by_xla[0]["kernel"].codes != params["kernel"].codes).any()
        assert_same_bits(by_xla[0]["kernel"].scales, params["kernel"].scales)


# The maxima of the moment depend on the errors, and so on the scales of the weights.
@each_of(MORE_LEAVES)
@pytest.mark.parametrize("moments", ["float32", "quantized"])
def test_errors_enter_a_moment_with_the_same_bits(moments, shape, bits, block_size, by):
    params = quantised(shape, bits, block_size)
    series = [shrinking(params, 0), *(shrinking(params, 1) for _ in range(2))]
    size = block_size if by == "tpu" else 32
    moments = "float32" if moments == "float32" else block_quantized(8, block_size=size)
    make = functools.partial(
        lowbit,
        optax.sgd(0.25, 0.5),
        weights=quantized_weights(error_feedback="trace"),
        moments=moments,
    )
    for by_kernel, by_xla in both(make, params, series, by):
        assert_same_bits(by_kernel, by_xla)
        assert (by_xla[0]["kernel"].codes != params["kernel"].codes).any()


def powers_of_two(shape):
    random = np.random.default_rng(0)
    signs = random.choice([-1.0, 1.0], shape)
    return {"kernel": jnp.float32(signs * 2.0 ** random.integers(-12, 3, shape))}


@pytest.mark.slow_to_compile
@each_of(LEAVES)
def test_steps_of_adam_have_the_same_bits_while_roots_are_exact(
    shape, bits, block_size, by
):
    params = quantised(shape, bits, block_size)
    like = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
    series = [powers_of_two(shape), *(random_grads(like, seed) for seed in range(2))]
    make = functools.partial(lpmm_adam, 2.0**-9, b1=0.5, b2=0.75, eps=0.0)
    first, *others = both(make, params, series, by)
    assert_same_bits(*first)
    # Differently rounded roots and quotients change only a few stored values.
    for each in others:
        for own, other in zip(*map(jax.tree.leaves, each), strict=True):
            assert np.mean(np.asarray(own) != np.asarray(other)) < 0.003


def test_a_tensor_of_folded_layers_is_left_to_xla_with_a_reason():
    weights, grads = {"w": jnp.ones((64, 4096))}, {"w": jnp.ones((64, 4096))}
    params = lowbit_optax.lpmm.quantize_params(weights, stacked=lambda path: True)
    tx = lpmm_sgd(0.25, implementation="pallas")
    with pytest.raises(ValueError, match=r"\['w'\]: .* rows .* axis"):
        lowbit_optax.step(tx, params, initial(tx, params), grads)
