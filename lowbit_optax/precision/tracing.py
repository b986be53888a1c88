"""``trace``: the tensors of a loss, in groups between matrix products."""

import typing
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from lowbit_optax.precision.plan import PrecisionPlan
from lowbit_optax.precision.tensor_search import TensorSearch


def trace(loss_fn: Callable, params, *batch, has_aux: bool = False) -> PrecisionPlan:
    """Find the tensors of a loss and group them between matrix products.

    Nothing is computed. Any loss that JAX can trace will do: functions under ``jit``,
    ``jax.checkpoint``, ``lax.scan``, the branches of ``lax.cond`` and ``lax.switch``
    and the body of ``lax.while_loop`` are looked into. Tensors are the parameters, the
    results of matrix products (convolutions included), scan carries, results of
    branches and maximum pools, and whatever else is needed after a later matrix
    product. A value can be made one, and get a name, by
    ``jax.ad_checkpoint.checkpoint_name``. Scalars are not tensors, nor is anything that
    the loss does not depend on. The tensors of all branches are counted, though only
    one branch is computed; those of a while loop are counted once, since it is not
    known how often it runs, and have no cotangents. Rounding may change how often it
    does.

    Args:
      loss_fn: called as ``loss_fn(params, *batch)``; returns a float scalar.
      params: tree of arrays, or of shapes and dtypes.
      *batch: likewise; all other arguments.
      has_aux: whether it returns ``(loss, aux)``.

    Returns:
      A :class:`PrecisionPlan`, for :func:`demote`, :func:`uniform` and
      :func:`operator_based`.

    Raises:
      TypeError: if the loss is not a float scalar.

    Warns:
      UserWarning: if the loss has arrays in places that cannot be looked into, such as
        ``shard_map``, ``lax.platform_dependent`` and a ``lax.while_loop`` whose
        condition has a matrix product. The plan's
        ``opaque`` names these places. Their results are tensors; what is inside of them
        is neither rounded nor counted.

    References:
      Lee et al. 2023, section 4.1, "Tensor grouping"; Algorithm 1.

    >>> import jax.numpy as jnp
    >>> loss_fn = lambda w, x: jnp.sum(jnp.tanh(x @ w[0]) @ w[1])
    >>> w = [jnp.ones((3, 4)), jnp.ones((4, 2))]
    >>> plan = trace(loss_fn, w, jnp.ones((5, 3)))
    >>> [(tensor.name, tensor.group) for tensor in plan.tensors]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('params[0]', 0), ('params[1]', 1), ('batch[0]', 0),
     ('dot_general.0', 1), ('tanh.0', 1), ('dot_general.1', 2)]
    """
    found, _ = find_tensors(loss_fn, has_aux, params, batch)
    if found.opaque:
        warnings.warn(
            f"precision.trace: arrays inside of {', '.join(found.opaque)} are neither "
            "rounded nor counted, only its results are. lax.scan, lax.cond, "
            "lax.while_loop and jax.checkpoint are looked into",
            UserWarning,
            stacklevel=2,
        )
    return PrecisionPlan(found.tensors, found.products, tuple(found.opaque))


def find_tensors(
    loss_fn, has_aux: bool, params, batch: Sequence
) -> tuple[TensorSearch, typing.Any]:
    """The tensors of a loss, and the shapes of its result as a tree.

    Args:
      loss_fn: called as ``loss_fn(params, *batch)``.
      has_aux: whether it returns ``(loss, aux)``.
      params, batch: arrays or their shapes and dtypes.
    """
    closed, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(params, *batch)
    loss = shapes[0] if has_aux else shapes
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(
        loss.dtype, jnp.floating
    ):
        raise TypeError(
            f"precision: the loss is {loss}; accepted is a float scalar"
            + ("" if has_aux else ", or with has_aux=True a pair of it and anything")
        )
    names = _paths(params, "params")
    parameters = len(names)
    for i, argument in enumerate(batch):
        names += _paths(argument, f"batch[{i}]")
    return TensorSearch(closed, names, parameters), shapes


def _paths(tree, root: str) -> list[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [root + jax.tree_util.keystr(path) for path, _ in leaves]
