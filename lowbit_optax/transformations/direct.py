"""Direct steps through optax's wrappers: new parameters in place of updates.

``optax.chain``, ``masked``, ``partition`` and ``inject_hyperparams`` pass on the
updates of the transformation inside them unchanged. So :func:`lowbit_optax.step` can
ask the transformations of this package for new parameters instead of differences
(``context.wants_params``). Each new parameter travels as a :class:`.NewParam`, an
opaque object that no wrapper can compute with. If a wrapper tries to, or keeps one in
its state, the attempt fails, and the step is made with differences instead.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._step import context, trees
from lowbit_optax._step.state import LowbitState
from lowbit_optax._step.stepper import NewParam, stepper_of


def new_params_by(
    tx: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    state: optax.OptState,
    grads: optax.Updates,
    extra_args: dict,
    apply_update: Callable,
) -> tuple[optax.Params, optax.OptState] | None:
    """Ask a wrapped transformation for new parameters.

    Args:
      tx: any optax transformation.
      params, state, grads, extra_args: the arguments of the step.
      apply_update: ``(param, update) -> param``, for leaves that transformations of
        other packages update.

    Returns:
      ``(new params, new state)``; None if the transformation cannot step directly,
      because a wrapper prevents it or because it is not from this package.
    """
    names, leaves, treedef = trees.named_leaves(params)
    try:
        with context.params_wanted():
            updates, state = tx.update(grads, state, params, **extra_args)
        found = trees.parts_of(names, treedef, updates, "updates")
    except (TypeError, ValueError, AttributeError):
        # What computing with a NewParam raises. An error in the arguments occurs again,
        # and is reported, in the step with differences.
        return None
    if not any(map(_is_new, found)) or any(map(_is_new, jax.tree.leaves(state))):
        return None
    new = [
        x.value if isinstance(x, NewParam) else apply_update(param, x)
        for param, x in zip(leaves, found, strict=True)
    ]
    return treedef.unflatten(new), state


def is_direct(tx, params: optax.Params, state: optax.OptState) -> bool | None:
    """Whether ``lowbit_optax.step`` writes new parameters without differences.

    Args:
      tx: any optax transformation.
      params, state: arrays or ShapeDtypeStructs; nothing is computed.

    Returns:
      None if no transformation of this package is in ``tx``.
    """
    is_own = lambda x: isinstance(x, LowbitState)
    if not any(map(is_own, jax.tree.leaves(state, is_leaf=is_own))):
        return None
    if stepper_of(tx) is not None:
        return True
    found = []

    def step(params, state):
        _, leaves, treedef = trees.named_leaves(params)
        grads = treedef.unflatten(jnp.zeros(x.shape, jnp.float32) for x in leaves)
        wide = optax.with_extra_args_support(tx)
        new = new_params_by(wide, params, state, grads, {}, lambda param, _: param)
        found.append(new is not None)

    with context.analysis():
        jax.eval_shape(step, params, state)
    return found[0]


def _is_new(x) -> bool:
    return isinstance(x, NewParam)
