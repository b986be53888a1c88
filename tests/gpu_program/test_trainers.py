"""Steps of trainers that call `update` and add the updates, compiled for a GPU."""

import jax
import pytest
from flax import nnx
from flax.training import train_state

import lowbit_optax
from tools.gpu_program import steps
from tools.gpu_program.targets import gpu_mesh, lower_for
from tools.hlo import kernels, memory

MOVED = {"lowbit_adamw": 12.5, "kahan_adamw": 18.3}


class _Model(nnx.Module):
    def __init__(self, params):
        self.params = nnx.data(jax.tree.map(nnx.Param, params))


def _by_train_state(tx, model):
    def step(params, state, grads):
        held = train_state.TrainState(0, None, params, tx, state)
        held = held.apply_gradients(grads=grads)
        return held.params, held.opt_state

    return step, (model, jax.eval_shape(tx.init, model)), (0, 1)


def _by_nnx_optimizer(tx, model):
    def made(params):
        held = _Model(params)
        return held, nnx.Optimizer(held, tx, wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(made, model))

    def step(state, grads):
        held, optimizer = nnx.merge(graph, state)
        optimizer.update(held, nnx.state(_Model(grads), nnx.Param))
        return nnx.state((held, optimizer))

    return step, (state,), (0,)


@pytest.mark.parametrize("trainer", [_by_train_state, _by_nnx_optimizer])
@pytest.mark.parametrize("name", MOVED)
def test_direct_updates_cost_what_step_costs(name, trainer):
    tx = lowbit_optax.direct_updates(getattr(lowbit_optax, name)(1e-3))
    model = steps.gpt2()
    step, held, donate = trainer(tx, model)
    compiled = lower_for(gpu_mesh(), step, *held, model, donate=donate).compile()
    count, found = sum(x.size for x in jax.tree.leaves(model)), kernels(compiled)
    assert sum(moved for _, moved in found) <= MOVED[name] * count
    assert memory(compiled).temp_size_in_bytes <= 0.05 * count
    assert len(found) <= 24
