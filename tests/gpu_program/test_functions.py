"""Every launcher's kernels compute all functions that inner transformations may use.

The compiled programs are executed and compared with XLA on the CPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import primitives as p

import lowbit_optax
from lowbit_optax._jaxprs.elementwise import ELEMENTWISE
from tests.helpers.gpu_steps import LAUNCHERS
from tools.gpu_program.machine_code import program
from tools.gpu_program.ptx.program import compile_program
from tools.gpu_program.targets import gpu_mesh, lower_for

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS, indirect=True)


def of_integers(function):
    """A function of integers from -8000 to 8000."""
    return lambda x: function((x * 1000).astype(I32)).astype(F32)


def of_conditions(function):
    return lambda x: jnp.where(function(x > -1, x < 1), x, F32(3))


FUNCTIONS = {
    p.abs_p: lax.abs,
    p.add_p: lambda x: x + x,
    p.add_jaxvals_p: jax.grad(lambda x: jnp.sum(x * x * x)),
    p.and_p: of_conditions(lax.bitwise_and),
    p.bitcast_convert_type_p: lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, I32) & I32(-256), F32
    ),
    p.cbrt_p: lax.cbrt,
    p.ceil_p: lax.ceil,
    p.clamp_p: lambda x: lax.clamp(F32(-1), x, F32(1)),
    p.convert_element_type_p: lambda x: x.astype(I32).astype(jnp.bool_).astype(F32),
    p.cos_p: lax.cos,
    p.div_p: lambda x: F32(1) / x,
    p.eq_p: lambda x: (x == F32(1)).astype(F32),
    p.exp_p: lax.exp,
    p.exp2_p: lax.exp2,
    p.expm1_p: lax.expm1,
    p.floor_p: lax.floor,
    p.ge_p: lambda x: (x >= F32(1)).astype(F32),
    p.gt_p: lambda x: (x > F32(1)).astype(F32),
    p.integer_pow_p: lambda x: lax.integer_pow(x, -3),
    p.is_finite_p: lambda x: jnp.where(lax.is_finite(F32(1) / (x - F32(1))), x, F32(2)),
    p.le_p: lambda x: (x <= F32(1)).astype(F32),
    p.log_p: lambda x: lax.log(jnp.abs(x)),
    p.log1p_p: lambda x: lax.log1p(jnp.abs(x)),
    p.logistic_p: lax.logistic,
    p.lt_p: lambda x: (x < F32(1)).astype(F32),
    p.max_p: lambda x: lax.max(x, F32(0.1)),
    p.min_p: of_integers(lambda x: lax.min(x, I32(17))),
    p.mul_p: lambda x: x * F32(0.7),
    p.ne_p: lambda x: (x != F32(1)).astype(F32),
    p.neg_p: lax.neg,
    p.not_p: of_conditions(lambda x, y: ~(x & y)),
    p.or_p: of_conditions(lax.bitwise_or),
    p.pow_p: lambda x: lax.pow(jnp.abs(x), F32(0.3)),
    p.rsqrt_p: lambda x: lax.rsqrt(jnp.abs(x)),
    p.select_n_p: lambda x: (
        lax.select_n(x > F32(0), x, F32(2) * x)
        * jnp.where(x > F32(1), I32(-3), I32(2)).astype(F32)
        + lax.select_n(
            (x > F32(0)).astype(I32) + (x > F32(2)).astype(I32), x, x * x, -x
        )
    ),
    p.shift_left_p: of_integers(lambda x: x << I32(3)),
    p.shift_right_arithmetic_p: of_integers(lambda x: x >> I32(3)),
    p.shift_right_logical_p: of_integers(lambda x: lax.shift_right_logical(x, I32(20))),
    p.sign_p: lax.sign,
    p.sin_p: lax.sin,
    p.sqrt_p: lambda x: lax.sqrt(jnp.abs(x)),
    p.square_p: lax.square,
    p.sub_p: lambda x: x - F32(0.3),
    p.tan_p: lax.tan,
    p.tanh_p: lax.tanh,
    p.xor_p: of_conditions(lax.bitwise_xor),
}
# For large arguments, these use memory that the interpreter does not support.
NOT_EXECUTED = (p.cos_p, p.sin_p, p.tan_p)

# The text of an XLA program omits constants with more than ten numbers.
PROGRAMS = 5


def test_every_primitive_that_kernels_take_is_tried():
    assert set(FUNCTIONS) == ELEMENTWISE
    for primitive, function in FUNCTIONS.items():
        jaxpr = jax.make_jaxpr(function)(jnp.zeros(3, F32))
        assert any(eqn.primitive is primitive for eqn in jaxpr.eqns), primitive


@each_launcher
@pytest.mark.parametrize("some", range(PROGRAMS))
def test_kernels_compute_every_function(some, launcher):
    executed = [each for each in FUNCTIONS if each not in NOT_EXECUTED]
    functions = {x.name: FUNCTIONS[x] for x in executed[some::PROGRAMS]}
    lowered, arguments = lowered_step(functions)
    masters = lowbit_optax.master_weights(*compile_program(lowered).run(*arguments))
    for name, function in functions.items():
        got, want = masters[name], function(arguments[2][name])
        np.testing.assert_allclose(
            np.asarray(got), np.asarray(want), rtol=3e-6, atol=1e-7, err_msg=name
        )


@each_launcher
def test_trigonometric_functions_compile(launcher):
    lowered, _ = lowered_step({x.name: FUNCTIONS[x] for x in NOT_EXECUTED})
    kernels = program(lowered).kernels
    assert any(name.startswith("fused_update") for name in kernels)


@each_launcher
def test_kernels_compute_narrow_floats_in_float32(launcher):
    of_float32 = {
        "add": lambda x: x + x * x,
        "cbrt": lax.cbrt,
        "div": lambda x: x / (x * x + 1),
        "div by a scalar": lambda x: x / 3,
        "expm1": lax.expm1,
        "integer_pow": lambda x: lax.integer_pow(x, -3),
        "log1p": lambda x: lax.log1p(x * x),
        "logistic": lax.logistic,
        "max": lambda x: jnp.where(x < 1, x, lax.max(x, x * x)),
        "pow": lambda x: lax.abs(x) ** 0.75,
        "sqrt": lambda x: lax.sqrt(x * x),
        "sub": lambda x: x * x - x,
        "tanh": lax.tanh,
    }
    narrow = lambda f: lambda x: f(x.astype(BF16)).astype(F32)
    functions = {name: narrow(f) for name, f in of_float32.items()}
    lowered, arguments = lowered_step(functions)
    masters = lowbit_optax.master_weights(*compile_program(lowered).run(*arguments))
    x = np.asarray(next(iter(arguments[2].values())).astype(BF16).astype(F32))
    rounded = lambda y: np.asarray(jnp.asarray(y, BF16).astype(F32))
    square = rounded(x * x)
    exact = {
        "add": rounded(x + square),
        "div": rounded(x / rounded(square + 1)),
        "div by a scalar": rounded(x / 3),
        "max": np.where(x < 1, x, np.maximum(x, square)),
        "sqrt": rounded(np.sqrt(square)),
        "sub": rounded(square - x),
    }
    for name, want in exact.items():
        np.testing.assert_array_equal(masters[name], want, err_msg=name)
    for name in of_float32.keys() - exact:
        want = of_float32[name](jnp.asarray(x))
        np.testing.assert_allclose(masters[name], want, rtol=2**-7, err_msg=name)


@each_launcher
def test_kernels_compute_integers_of_8_bits_modulo_256(launcher):
    functions = {
        "add": lambda x: x + x * x,
        "clamp": lambda x: lax.clamp(jnp.int8(-5), x, jnp.int8(5)),
        "compare": lambda x: jnp.where(x > jnp.int8(1), x, -x),
        "max": lambda x: lax.max(x, jnp.int8(3)),
        "not": lambda x: ~x,
        "shift": lambda x: x << jnp.int8(5),
        "shift right": lambda x: x >> jnp.int8(1),
        "shift right, without the sign": lambda x: (
            (x.astype(jnp.uint8) >> jnp.uint8(4)).astype(jnp.int8)
            + lax.shift_right_logical(x, jnp.int8(5))
        ),
        "sign": lax.sign,
        "sub": lambda x: x * x - x,
    }
    narrow = lambda f: lambda x: f((x * 15).astype(jnp.int8)).astype(F32)
    lowered, arguments = lowered_step(
        {name: narrow(f) for name, f in functions.items()}
    )
    masters = lowbit_optax.master_weights(*compile_program(lowered).run(*arguments))
    x = np.asarray(next(iter(arguments[2].values())) * 15).astype(np.int8)
    for name, function in functions.items():
        want = np.asarray(function(x)).astype(np.float32)
        np.testing.assert_array_equal(masters[name], want, err_msg=name)


def lowered_step(functions):
    """A step whose updates are these functions of the gradients, and its arguments."""
    apply = lambda updates, _: {name: f(updates[name]) for name, f in functions.items()}
    # Weights are 0, so the float32 master equals the update.
    tx = lowbit_optax.lowbit(
        optax.stateless(apply), weights=lowbit_optax.master_copy(), min_size=0
    )
    drawn = np.random.default_rng(0).uniform(-8, 8, (8, 64))
    drawn.flat[:8] = [1, -1, 0.5, -2, 3, -4, 7.5, 1e-3]
    params = dict.fromkeys(functions, jnp.zeros(drawn.shape, BF16))
    grads = dict.fromkeys(functions, jnp.asarray(drawn, F32))
    step = functools.partial(lowbit_optax.step, tx)
    arguments = params, tx.init(params), grads
    return lower_for(gpu_mesh(), step, *arguments, donate=(0, 1)), arguments
