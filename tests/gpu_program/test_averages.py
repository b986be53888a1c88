"""An average of the weights is updated in place in one pass, compiled for an H200."""

import jax
import pytest

import lowbit_optax
from tools.gpu_program.steps import bytes_of, leaf, lower_step
from tools.gpu_program.targets import compile_for, gpu_mesh
from tools.hlo import kernels

SIDE, LEAVES = 4096, 3
PARAMS = {f"w{i}": leaf(SIDE, SIDE) for i in range(LEAVES)}
PARAMETERS = LEAVES * SIDE * SIDE


@pytest.mark.parametrize(
    ("weights", "moved"),
    [
        (None, 8),
        (lowbit_optax.kahan(), 10),
        (lowbit_optax.stochastic_rounding(), 6),
    ],
    ids=["extra_bits 8", "kahan", "stochastic_rounding"],
)
def test_an_average_of_parameters_moves_each_byte_once(weights, moved):
    step = lower_step(lowbit_optax.ema_of_params(0.9999, weights=weights), PARAMS)
    assert step.moved == pytest.approx(moved, abs=0.01)
    assert step.temporary == pytest.approx(0, abs=1e-3)
    assert step.in_place


def test_an_average_of_masters_has_one_leaf_at_a_time_in_float32():
    tx, ema = lowbit_optax.lowbit_adamw(1e-3), lowbit_optax.ema_of_params(0.9999)
    state, ema_state = (jax.eval_shape(x.init, PARAMS) for x in (tx, ema))

    def averaged(average, ema_state, params, state):
        weights = lowbit_optax.master_weights(params, state)
        return lowbit_optax.step(ema, average, ema_state, weights)

    arguments = PARAMS, ema_state, PARAMS, state
    compiled = compile_for(gpu_mesh(), averaged, *arguments, donate=(0, 1))
    memory = compiled.memory_analysis()
    moved = sum(size for _, size in kernels(compiled))
    assert moved / PARAMETERS == pytest.approx(17, abs=0.01)
    assert memory.temp_size_in_bytes / PARAMETERS <= 4.01 / LEAVES
    assert memory.alias_size_in_bytes == bytes_of(PARAMS, ema_state)
