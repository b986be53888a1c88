"""A ``jax.custom_vjp`` wrapper whose backward rule runs the optimizer."""

import typing
from collections.abc import Callable

import jax
from jax import lax
from jax.extend import core

from lowbit_optax._step import trees
from lowbit_optax.release.barriers import tied
from lowbit_optax.release.float_state import FloatState, as_floats, as_state

Update = Callable[[typing.Any, typing.Any, typing.Any], tuple]


def released(update: Update, params, state: FloatState, activations):
    """Return the inputs unchanged, and update parameters in the backward pass.

    When the backward rule of this function runs, the gradient is complete, and the old
    parameters are no longer needed. The rule calls ``update`` and returns new values
    instead of cotangents:

        d loss / d params = new params,    d loss / d state = new state

    Barriers keep the compiler from postponing the update, so that only one gradient
    exists at a time.

    Args:
      update: a function ``(params, state, gradients) -> (params, state)``.
      params: a tree of floating-point arrays.
      state: the optimizer state of these parameters.
      activations: a tree of the arrays that the layer reads. If no gradient flows
        through the results, ``update`` is not called, and the cotangents are zeros.

    Returns:
      ``(params, activations)``.
    """

    @jax.custom_vjp
    def identity(params, state, activations):
        del state
        return params, activations

    def forward(params, state, activations):
        # Without this barrier, XLA would keep every gradient until the end.
        return (params, tied(activations)), (params, state)

    def backward(saved, cotangents):
        params, state = saved
        # Cotangents of earlier layers depend on the old parameters, and must be
        # computed before the parameters are overwritten.
        gradients, later = tied(cotangents)
        new = update(params, as_state(state), gradients)
        (new_params, new_state), later = tied((new, later))
        return new_params, as_floats(new_state), later

    identity.defvjp(forward, backward)
    return identity(params, state, activations)


def kept(old, new):
    """Return a new state that has the dtypes of the old state.

    optax's moments of integers are integers before the first step. Then they are floats
    that remain zero, because integers have no gradient.

    Raises:
      TypeError: if the step changed the structure of the state, a shape, or the dtype
        of floats.
    """
    structure, state = jax.tree.structure(old), []
    if jax.tree.structure(new) != structure:
        raise TypeError(
            f"release: tx.update must keep the structure of its state, {structure}, "
            f"got {jax.tree.structure(new)}"
        )
    pairs = zip(jax.tree.leaves_with_path(old), jax.tree.leaves(new), strict=True)
    for (path, x), y in pairs:
        y = y if trees.is_inexact(x) else y.astype(x.dtype)
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise TypeError(
                "release: tx.update must keep shapes and dtypes of its state, but state"
                f"{jax.tree_util.keystr(path)} was {trees.describe(x)} and became "
                f"{trees.describe(y)}"
            )
        state.append(y)
    return structure.unflatten(state)


def check_reduced(step: Callable, *arguments) -> None:
    """Check that a step within ``shard_map`` sees gradients of the whole batch.

    JAX sums the gradients of replicated parameters, except with ``check_vma=False``.
    The step must then reduce gradients itself.

    Args:
      step: the function that updates parameters.
      *arguments: the arguments of ``step``, or their shapes.

    Raises:
      ValueError: if every device would use the gradient of its own shard of the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = {name for name in mesh.manual_axes if mesh.shape[name] > 1}
    if not axes or jax.typeof(lax.axis_index(tuple(axes))).manual_axis_type.varying:
        return
    missing = axes - _reduced_axes(jax.make_jaxpr(step)(*arguments).jaxpr)
    if missing:
        raise ValueError(
            "release: jax.shard_map must have check_vma=True, because JAX does not sum "
            f"the gradients of replicas over {sorted(missing)} with check_vma=False or "
            "in jax.pmap. Otherwise, reduce gradients in tx, such as optax.chain("
            "optax.stateless(lambda grads, _: jax.lax.pmean(grads, axes)), tx)"
        )


def _reduced_axes(jaxpr) -> set:
    """Return the names of mesh axes over which a jaxpr adds values."""
    found = set()
    for eqn in jaxpr.eqns:
        inner = core.jaxprs_in_params(eqn.params)
        found.update(eqn.params.get("axes") or (), *map(_reduced_axes, inner))
    return found
