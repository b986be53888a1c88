"""``trace``: the tensors of a loss, in groups between matrix products."""

import dataclasses
from collections.abc import Callable

import numpy as np

from lowbit_optax.precision import tensors
from lowbit_optax.precision.tensors import Tensor


@dataclasses.dataclass(frozen=True)
class Plan:
    """What precision assignments of one loss are made of.

    Args:
      tensors: all of them, in the order in which they are made.
      products: how many matrix products the loss has.
    """

    tensors: tuple[Tensor, ...]
    products: int

    @property
    def groups(self) -> list[list[int]]:
        """Numbers of the tensors of each group, in order; empty groups are left out."""
        found: dict[int, list[int]] = {}
        for number, tensor in enumerate(self.tensors):
            found.setdefault(tensor.group, []).append(number)
        return [found[group] for group in sorted(found)]

    @property
    def size(self) -> int:
        """Elements of all forward tensors and cotangents."""
        return int(np.sum(self.sizes) + np.sum(self.backward_sizes))

    @property
    def sizes(self) -> np.ndarray:
        """Elements of each forward tensor, float64."""
        return np.array([t.size for t in self.tensors], np.float64)

    @property
    def backward_sizes(self) -> np.ndarray:
        """Elements of each cotangent, float64."""
        return np.array([t.backward_size for t in self.tensors], np.float64)


def trace(loss_fn: Callable, params, *batch, has_aux: bool = False) -> Plan:
    """Find the tensors of a loss and group them between matrix products.

    Nothing is computed. Any loss that JAX can trace will do: functions under ``jit``,
    ``jax.checkpoint`` and ``lax.scan`` are looked into. Tensors are the parameters, the
    results of matrix products (convolutions included), scan carries and maximum pools,
    and whatever else is needed after a later matrix product; a value can be made one,
    and get a name, by ``jax.ad_checkpoint.checkpoint_name``. Scalars are none, nor is
    what the loss does not depend on.

    Args:
      loss_fn: called as ``loss_fn(params, *batch)``; returns a float scalar.
      params: tree of arrays, or of shapes and dtypes.
      *batch: likewise; all other arguments.
      has_aux: whether it returns ``(loss, aux)``.

    Returns:
      A :class:`Plan`, for :func:`demote`, :func:`uniform` and :func:`operator_based`.

    Raises:
      TypeError: if the loss is not a float scalar.

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
    found, _ = tensors.trace(loss_fn, has_aux, params, batch)
    return Plan(found.tensors, found.products)
