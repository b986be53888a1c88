"""``explain``: whether a kernel or XLA updates each parameter."""

import typing

import jax

from lowbit_optax._arguments import check_transformation
from lowbit_optax._step import context, run, trees
from lowbit_optax._step.state import holds_lowbit
from lowbit_optax._step.stepper import split_extra_args, with_extra_args
from lowbit_optax._step.wrapped import ChangedUpdateError, is_direct
from lowbit_optax._tables import Explanation
from lowbit_optax._types import PyTree, Transformation


def explain(
    tx: Transformation, params: PyTree, **extra_args: typing.Any
) -> Explanation:
    """Report whether a kernel or XLA updates each parameter, without running a step.

    The report is for the mesh from ``jax.set_mesh``, or for JAX's default backend if no
    mesh is set.

    Args:
      tx: an optax transformation. A :func:`lowbit_optax.lowbit` may be anywhere inside
        it except within a conditional, which ``optax.MultiSteps`` uses.
      params: tree of arrays or ShapeDtypeStructs.
      **extra_args: arrays or ShapeDtypeStructs, passed to ``tx.update``.

    Returns:
      A dictionary from the path of each parameter to one of:

      - ``"a kernel"``.
      - ``"XLA"``: on a CPU, with ``implementation="xla"``, or if no kernel is needed.
      - ``"XLA: "``, with the reason why no kernel updates the leaf.
      - ``"a kernel in a program for one device, else XLA: "``, with the reason.
      - ``"wrong: "``, with the reason, if a wrapper changes updates of ``lowbit``.
        :func:`lowbit_optax.step` raises an error in this case.

      Leaves that only transformations of other packages update are not included.

    Raises:
      TypeError: if ``tx`` is not a transformation, or ``params`` is an optimizer state.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
    >>> tx = lowbit_optax.lowbit_adamw(1e-3)
    >>> by_what = "a kernel" if jax.default_backend() == "gpu" else "XLA"
    >>> lowbit_optax.explain(tx, params)["['w']"] == by_what
    True
    """
    found = Explanation()

    traced, static = split_extra_args(extra_args)

    def update(grads, state, params, traced):
        extra_args = traced | static
        with context.reporting("explain", run.explained) as texts:
            updates = with_extra_args(tx).update(grads, state, params, **extra_args)
        found.update(texts)
        return updates

    check_transformation("explain", "tx", tx)
    shapes = jax.eval_shape(lambda tree: tree, params)  # keeps shardings
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
    jax.eval_shape(update, grads, state, shapes, traced)
    return found
