"""A step works in place if it returns donated arguments in the order it takes them.

XLA gives the memory of donated arguments to results of the same shape and dtype, in
order. If a step returns them in another order, XLA copies arrays.
"""

import functools

import jax
import pytest

import lowbit_optax

pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the gpu-program extra")

from tools.gpu_program.steps import leaf
from tools.gpu_program.targets import compile_for, gpu_mesh
from tools.hlo import kernels

PARAMS = leaf(4096, 4096)


def figures(step, tx, donate):
    """Bytes moved and bytes of temporary memory per parameter.

    Args:
      step: of arguments in the order of ``donate``.
      tx: the transformation.
      donate: which of ``params``, ``state`` and ``grads`` each argument is; the first
        two are donated.
    """
    trees = {
        "params": PARAMS,
        "state": jax.eval_shape(tx.init, PARAMS),
        "grads": PARAMS,
    }
    numbers = tuple(i for i, name in enumerate(donate) if name != "grads")
    arguments = [trees[name] for name in donate]
    compiled = compile_for(gpu_mesh(), step, *arguments, donate=numbers)
    moved = sum(size for _, size in kernels(compiled))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return moved / PARAMS.size, temporary / PARAMS.size


@pytest.mark.parametrize(
    ("tx", "moved"),
    [(lowbit_optax.kahan_adamw(1e-3), 18.0), (lowbit_optax.lowbit_adamw(1e-3), 12.25)],
    ids=["kahan_adamw", "lowbit_adamw"],
)
def test_a_donated_step_moves_each_byte_once(tx, moved):
    step = functools.partial(lowbit_optax.step, tx)
    found, temporary = figures(step, tx, ("params", "state", "grads"))
    assert found == pytest.approx(moved, abs=0.01)
    assert temporary == pytest.approx(0, abs=1e-3)


def test_another_order_of_arguments_is_copied():
    # The moments of kahan_adamw have the parameters' dtype, and so take their place.
    tx = lowbit_optax.kahan_adamw(1e-3)

    def step(grads, state, params):
        return lowbit_optax.step(tx, params, state, grads)

    moved, temporary = figures(step, tx, ("grads", "state", "params"))
    assert moved > 40
    assert temporary > 1
