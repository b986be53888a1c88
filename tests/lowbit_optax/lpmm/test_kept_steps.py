"""A block of quantised weights keeps its step size while its largest weight fits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowbit_optax

# The smallest code that the largest weight of a block may have under a step size that
# is chosen for it. A step size of 4 significant bits is up to 1/8 larger than
# necessary; that of 4-bit codes has 20 bits, and a little more than 6 is rounded to 6.
LEAST = {4: 6, 8: 112, 12: 1819, 16: 29126}
STEP = 2.0**-10


def step_of(params):
    """The step size of the first block of a quantised weight."""
    _, scales = jax.tree.leaves(params)
    return float(scales.view(jnp.float32)[0, 0])


def step_after(bits, code):
    """A block's step size after its largest weight has moved to a multiple of it."""
    top = 2 ** (bits - 1) - 1
    weights = np.zeros((64, 64), np.float32)
    weights[3, 5] = -top * STEP
    params = lowbit_optax.quantize_params(jnp.asarray(weights), bits=bits)
    assert step_of(params) == STEP
    tx = lowbit_optax.lpmm_sgd(1.0, rounding="nearest")
    grads = jnp.zeros((64, 64)).at[3, 5].set((code - top) * STEP)
    params, _ = lowbit_optax.step(tx, params, tx.init(params), grads)
    return step_of(params)


@pytest.mark.parametrize("bits", LEAST)
def test_the_step_size_stays_while_the_largest_weight_fits(bits):
    top = 2 ** (bits - 1) - 1
    assert step_after(bits, LEAST[bits]) == STEP
    assert step_after(bits, top) == STEP
    assert step_after(bits, top + 1) > STEP


@pytest.mark.parametrize("bits", LEAST)
def test_it_becomes_finer_as_soon_as_the_largest_weight_is_smaller(bits):
    assert step_after(bits, LEAST[bits] - 1) < STEP
    assert step_after(bits, 0) == 0
