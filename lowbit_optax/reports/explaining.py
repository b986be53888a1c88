"""What updates each parameter, a kernel or XLA, before anything is run."""

import typing

import jax
import optax

from lowbit_optax._arguments import check_transformation
from lowbit_optax._step import backends, context, trees
from lowbit_optax._step.changed_updates import ChangedUpdateError
from lowbit_optax._step.state import holds_lowbit
from lowbit_optax._step.step import Step
from lowbit_optax._step.wrapped import is_direct
from lowbit_optax._tables import Explanation
from lowbit_optax._types import PyTree, Transformation


def explain(tx: Transformation, params: PyTree, **extra_args) -> Explanation:
    """What will update each parameter on the accelerator, and why not a kernel.

    Nothing is run. It speaks of the devices of the mesh in force (``jax.set_mesh``), or
    else of JAX's default backend.

    Args:
      tx: an optax transformation; those of :func:`lowbit_optax.lowbit` may be anywhere
        inside it but within a conditional, as ``optax.MultiSteps`` has it.
      params: tree of arrays or ShapeDtypeStructs.
      **extra_args: for ``tx.update``, arrays or ShapeDtypeStructs.

    Returns:
      A dictionary from the parameters' paths to ``"a kernel"``, ``"XLA"`` for leaves
      that kernels are not meant for and on CPUs, ``"XLA: "`` and the reason, or ``"a
      kernel in a program for one device, else XLA: "`` and the reason; or ``"wrong: "``
      where a wrapper changes updates of ``lowbit``, which :func:`lowbit_optax.step`
      refuses. Leaves that only transformations of other packages update are not in it.

    Raises:
      TypeError: if ``tx`` is not a transformation, or ``params`` are an optimizer's
        state.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
    >>> tx = lowbit_optax.lowbit_adamw(1e-3)
    >>> by_what = "a kernel" if jax.default_backend() == "gpu" else "XLA"
    >>> lowbit_optax.explain(tx, params)["['w']"] == by_what
    True
    """
    found = Explanation()

    def explained(step: Step, update, implementation) -> dict:
        found.update(backends.explained(step, update, implementation))
        return {}

    def update(grads, state, params, extra_args):
        with context.reporting("explain", explained):
            # As in step: optax's own types do not know MultiSteps here.
            return typing.cast(typing.Any, optax.with_extra_args_support)(tx).update(
                grads, state, params, **extra_args
            )

    check_transformation("explain", "tx", tx)
    shapes = trees.abstract(params)
    state = jax.eval_shape(tx.init, shapes)
    if not holds_lowbit(state):
        return found
    try:
        is_direct(tx, shapes, state, extra_args)
    except ChangedUpdateError as error:
        return Explanation(dict.fromkeys(error.names, f"wrong: {error}"))
    wide = lambda x: jax.ShapeDtypeStruct(x.shape, "float32")
    like = lambda x: wide(x) if trees.is_quantized(x) else x
    grads = jax.tree.map(like, shapes, is_leaf=trees.is_quantized)
    jax.eval_shape(update, grads, state, shapes, extra_args)
    return found
