"""What XLA:TPU makes of steps that have no kernels."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import lowbit_optax

pytest.importorskip("libtpu", reason="needs the tpu-program extra")

from tools.tpu_program.steps import lower_step
from tools.tpu_program.targets import TARGETS, tpu_mesh

LEAF = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
STEPS = {
    "kahan_adamw": (lowbit_optax.kahan_adamw(1e-3, implementation="xla"), 18.1),
    "sr_adamw": (lowbit_optax.sr_adamw(1e-3, implementation="xla"), 14.1),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", STEPS)
def test_kahan_and_stochastic_steps_are_one_pass_in_place(name, target):
    tx, moved = STEPS[name]
    step = lower_step(tx, LEAF, mesh=tpu_mesh(TARGETS[target].topology))
    assert step.in_place
    assert step.moved <= moved
    assert step.temporary < 0.05
    assert len(step.large) == 1


def test_a_sharded_step_has_no_collectives():
    mesh = tpu_mesh("v6e:2x2", (2, 2), ("a", "b"))
    tx, _ = STEPS["kahan_adamw"]
    step = lower_step(tx, LEAF, mesh=mesh, spec=P("a", "b"))
    assert step.collectives == []
    assert step.in_place
