"""The cost of a step's report, compiled for an H200."""

import jax
import pytest

import lowbit_optax
from tools.gpu_program.steps import fast, leaf
from tools.gpu_program.targets import compile_for, gpu_mesh
from tools.hlo import kernels

LEAVES = 6
PARAMS = {f"w{i}": leaf(4096, 4096) for i in range(LEAVES)}
PARAMETERS = LEAVES * 4096 * 4096


def test_a_report_costs_less_than_eight_steps_and_a_step_without_one_nothing():
    tx = lowbit_optax.lowbit_adamw(1e-3)
    state = jax.eval_shape(tx.init, PARAMS)
    arguments = PARAMS, state, PARAMS

    def report(*arguments):
        return lowbit_optax.step_report(tx, *arguments)

    def unread(*arguments):
        report(*arguments)
        return lowbit_optax.step(tx, *arguments)

    recorded = compile_for(gpu_mesh(), report, *arguments)
    moved = sum(size for _, size in kernels(recorded)) / PARAMETERS
    temporary = recorded.memory_analysis().temp_size_in_bytes / PARAMETERS
    assert moved < 8 * 12.25
    assert temporary < 17
    for step in (fast(tx), unread):
        compiled = compile_for(gpu_mesh(), step, *arguments, donate=(0, 1))
        moved = sum(size for _, size in kernels(compiled)) / PARAMETERS
        assert moved == pytest.approx(12.25, abs=0.01)
        assert compiled.memory_analysis().temp_size_in_bytes < 1e-3 * PARAMETERS
