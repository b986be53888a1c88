"""XLA's programs for a CPU stay small, because LLVM is slow to compile large loops.

XLA:CPU copies the operations that compute a scalar into each loop that reads the
scalar. The time of LLVM grows much faster than the number of these operations.
"""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType

import lowbit_optax
from lowbit_optax import extra_bits, loss_scaling, split_array, with_loss_scale

pytestmark = pytest.mark.standard_promotion

ONE_DEVICE = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))


def compiled(function, *shapes):
    with jax.set_mesh(ONE_DEVICE):
        return jax.jit(function).lower(*shapes).compile().as_text()


def scalars_in_loops(program):
    """Returns the largest number of scalar products in a loop over a matrix."""
    bodies = re.findall(r"^%fused\S* [^\n]* -> \w+\[\d+,\d.*?^}", program, re.M | re.S)
    return max(len(re.findall(r"= u32\[\] multiply\(", body)) for body in bodies)


def test_loops_do_not_compute_the_random_keys():
    array = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    split = functools.partial(
        split_array, dtype=jnp.bfloat16, weight_format=extra_bits(8)
    )
    # Only the stream of the residual is hashed.
    assert scalars_in_loops(compiled(split, array)) < 8


@pytest.mark.parametrize("wrap", [
    lambda tx: optax.apply_if_finite(tx, 3),
    lambda tx: with_loss_scale(tx, loss_scaling.static_scale(0.5)),
], ids=["finite", "scaled"])  # fmt: skip
def test_a_guard_adds_little_to_the_program(wrap):
    params = {str(i): jax.ShapeDtypeStruct((64, 64), jnp.bfloat16) for i in range(6)}

    def size(tx):
        state = jax.eval_shape(tx.init, params)
        step = functools.partial(lowbit_optax.step, tx)
        return compiled(step, params, state, params).count("\n")

    tx = lowbit_optax.lowbit_adamw(0.1)
    assert size(wrap(tx)) < 1.5 * size(tx)
