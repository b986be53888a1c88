"""Steps without kernels, compiled for H200s: rounding, memory, communication."""

import re

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from lowbit_optax.precision import FloatFormat
from tests.helpers.exact_steps import normal
from tests.helpers.gpu_steps import WEIGHTS
from tools.gpu_program.ptx.program import compile_program
from tools.gpu_program.steps import BF16, applied, fast, leaf, lower_step
from tools.gpu_program.targets import compile_for, gpu_mesh, lower_for

SIDE = 4096

TWELVE_BITS = FloatFormat(8, 3)
FORMATS = WEIGHTS | {
    "extra_bits 8": lowbit_optax.extra_bits(8),
    "12 bits, stochastic": lowbit_optax.stochastic_rounding(float_format=TWELVE_BITS),
    "12 bits, kahan": lowbit_optax.kahan(float_format=TWELVE_BITS),
}


@pytest.mark.parametrize("make_step", [fast, applied])
@pytest.mark.parametrize("name", FORMATS)
def test_every_rounding_survives_xla_gpu(name, make_step):
    # With powers of two, every product is exact. The order of operations and
    # contraction cannot matter, and the two programs must agree in every bit.
    tx = lowbit_optax.lowbit(
        optax.sgd(2.0**-10, momentum=0.5),
        weights=FORMATS[name],
        moments=lowbit_optax.cast(BF16),
        min_size=0,
        implementation="xla",
    )
    step = make_step(tx)
    params, grads = normal((64, 64)), normal((64, 64), seed=1)
    state = tx.init(params)
    for _ in range(2):
        program = compile_program(lower_for(gpu_mesh(), step, params, state, grads))
        on_gpu = program.run(params, state, grads)
        params, state = jax.jit(step)(params, state, grads)
        chex.assert_trees_all_equal((params, state), on_gpu)


@pytest.mark.parametrize(
    ("tx", "moved"),
    [
        (lowbit_optax.kahan_adamw(1e-3, implementation="xla"), 18.1),
        (lowbit_optax.sr_adamw(1e-3, implementation="xla"), 14.1),
    ],
    ids=["kahan_adamw", "sr_adamw"],
)
@pytest.mark.parametrize("make_step", [fast, applied])
def test_kahan_and_stochastic_steps_are_one_pass_in_place(tx, moved, make_step):
    # kahan_adamw reads and writes the parameter, compensation, mu and nu, and reads the
    # gradient: 9 times 2 bytes. XLA fuses update and apply_updates to the same traffic.
    step = lower_step(tx, leaf(SIDE, SIDE), make_step)
    assert step.large == 1
    assert step.moved <= moved
    assert step.temporary < 0.01
    assert step.in_place


def stacks_both_read_and_written(text):
    """For each fusion, the arrays in which it both reads and writes a slice."""
    found = {}
    for name, body in re.findall(r"^%(\S+) \(.*?\{\n(.*?)^\}", text, re.S | re.M):
        written = set(re.findall(r" dynamic-update-slice\(%([\w.-]+)", body))
        read = set(re.findall(r" dynamic-slice\(%([\w.-]+)", body))
        arrays = set(re.findall(r"%([\w.-]+) = \S+ parameter\(", body))
        if written & read & arrays:
            found[name] = written & read & arrays
    return found


@pytest.mark.parametrize("moments", ["float32", lowbit_optax.block_quantized(8)])
def test_no_kernel_of_a_released_loop_reads_a_stack_that_it_writes(moments):
    """Its threads would read packed words that other threads have already written."""
    tx = lowbit_optax.lowbit(
        optax.sgd(2.0**-10, momentum=0.5),
        weights=lowbit_optax.extra_bits(8),
        moments=moments,
        implementation="xla",
    )

    def loss_fn(params, x):
        body = lambda x, layer: (jnp.tanh(x @ layer), None)
        return jnp.sum(jax.lax.scan(body, x, params["layers"])[0].astype(jnp.float32))

    params = {"layers": leaf(4, 256, 256)}
    arguments = params, jax.eval_shape(tx.init, params), leaf(8, 256)
    step = lowbit_optax.release.value_and_update(loss_fn, tx)
    compiled = compile_for(gpu_mesh(), step, *arguments, donate=(0, 1))
    assert "dynamic-update-slice" in compiled.as_text()
    assert stacks_both_read_and_written(compiled.as_text()) == {}
