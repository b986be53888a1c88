"""The installed libtpu compiles every kind of kernel; the cases alternate the targets.

Another libtpu may not compile the same kernels. If it does not support an operation,
the compiler raises an error; the results are never wrong.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from lowbit_optax import (
    block_quantized,
    cast,
    extra_bits,
    extra_bits_adamw,
    factored_adamw,
    kahan_adamw,
    kahan_sgd,
    lowbit,
    lowbit_adamw,
    lowbit_lion,
    lowbit_sgd,
    lpmm_adam,
    lpmm_sgd,
    sr_adamw,
    sr_sgd,
    with_loss_scale,
)
from lowbit_optax.loss_scaling import backoff_scale

pytest.importorskip("libtpu", reason="needs the tpu-program extra")

from tools.tpu_program.steps import lower_lpmm_step, lower_step
from tools.tpu_program.targets import TARGETS, tpu_mesh

FLOAT8 = cast(jnp.float8_e5m2)
FOUR_BITS = {"mu": block_quantized(8), "nu": block_quantized(4)}
STOCHASTIC = extra_bits(8, rounding="stochastic", sum_rounding="stochastic")
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

FAMILIES = {
    "lowbit_adamw": lowbit_adamw(1e-3),
    "nu of 4 bits": lowbit_adamw(1e-3, moments=FOUR_BITS),
    "moments of 4 bits": lowbit_adamw(1e-3, moments=block_quantized(4, code="dynamic")),
    "logarithms": lowbit_adamw(1e-3, moments={"nu": block_quantized(8, code="log")}),
    "blocks of 2048": lowbit_adamw(1e-3, moments=block_quantized(8, block_size=2048)),
    "float8 moments": lowbit_lion(1e-3, moments=FLOAT8),
    **{f"{n} extra bits": extra_bits_adamw(1e-3, bits=n) for n in (1, 5, 10, 16)},
    "stochastic extra bits": lowbit(optax.adamw(1e-3), weights=STOCHASTIC),
    "kahan_adamw": kahan_adamw(1e-3),
    "kahan_sgd": kahan_sgd(1e-3, momentum=0.9, rounding="stochastic"),
    "sr_adamw": sr_adamw(1e-3),
    "errors": sr_adamw(1e-3, error_feedback="mu"),
    "errors in 8 bits": sr_sgd(
        1e-3, momentum=0.9, error_feedback="trace", moments=block_quantized()
    ),
    "factored": factored_adamw(1e-3),
    "factored, errors": factored_adamw(1e-3, bits=0),
    "lion": lowbit_lion(1e-4),
    "sgd": lowbit_sgd(1e-3, momentum=0.9, nesterov=True),
    "clipped": lowbit(CLIPPED),
    "scaled": with_loss_scale(lowbit_adamw(1e-3), backoff_scale()),
}
OF_WEIGHTS = {"lpmm_adam": lpmm_adam(1e-3), "lpmm_sgd": lpmm_sgd(1e-3, momentum=0.9)}
DTYPES = (jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
WIDE, TRANSPOSED = (256, 256), (1024, 72)


def by_turns(*names):
    """Pair each name with one target, since most failures occur on all of them."""
    return list(zip(names, itertools.cycle(TARGETS), strict=False))


def assert_compiled(lower, tx, target, shape=WIDE, dtype=jnp.bfloat16, **options):
    like = jax.ShapeDtypeStruct(shape, dtype)
    step = lower(tx, like, mesh=tpu_mesh(TARGETS[target].topology), **options)
    assert step.fused_launches == 1


@pytest.mark.parametrize(("name", "target"), by_turns(*FAMILIES))
def test_families_are_compiled(name, target):
    assert_compiled(lower_step, FAMILIES[name], target)


@pytest.mark.parametrize(("bits", "target"), by_turns(8, 11, 12))
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_families_of_quantised_weights_are_compiled(name, bits, target):
    lower = functools.partial(lower_lpmm_step, bits=bits, block_size=256)
    assert_compiled(lower, OF_WEIGHTS[name], target)


@pytest.mark.parametrize(("dtype", "target"), by_turns(*DTYPES))
def test_other_dtypes_of_weights_are_compiled(dtype, target):
    assert_compiled(lower_step, FAMILIES["lowbit_adamw"], target, dtype=dtype)


@pytest.mark.parametrize(("name", "target"), by_turns("lowbit_adamw", "5 extra bits"))
def test_arrays_that_lie_transposed_are_compiled(name, target):
    assert_compiled(lower_step, FAMILIES[name], target, TRANSPOSED)
