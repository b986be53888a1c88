"""From a loss to an assignment: its tensors, demotion, promotion and baselines.

All assignments keep weight gradients in the high format, as in Lee et al. 2023, section
5.2, and Sun et al. 2019.
"""

import dataclasses
import random
import typing
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._arguments import check_choice
from lowbit_optax.precision.assignment import HFP8, Assignment, Formats, PrecisionPlan
from lowbit_optax.precision.tensor_search import TensorSearch

Order = typing.Literal["decreasing", "increasing", "random"]


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
    found = TensorSearch(loss_fn, has_aux, params, batch)
    if found.opaque:
        warnings.warn(
            f"precision.trace: arrays inside of {', '.join(found.opaque)} are neither "
            "rounded nor counted, only its results are. lax.scan, lax.cond, "
            "lax.while_loop and jax.checkpoint are looked into",
            UserWarning,
            stacklevel=2,
        )
    return PrecisionPlan(found.tensors, found.products, tuple(found.opaque))


def demote(
    plan: PrecisionPlan,
    ratio: float,
    *,
    order: Order = "decreasing",
    formats: Formats = HFP8,
    seed: int = 0,
) -> Assignment:
    """Lower whole groups of tensors until a share of all elements is low.

        T'_1, T'_2, ... = groups by decreasing size, cotangents counted too
        for j = 1, 2, ...: stop if low_ratio >= ratio; demote T'_j

    Args:
      plan: from :func:`trace`.
      ratio: what ``low_ratio`` should reach, 0 (all high) to 1. Weight gradients are
        counted and stay high, so that 1 lowers everything else and reaches less.
      order: ``"decreasing"`` by size; ``"increasing"`` and ``"random"`` are for
        comparison. Groups of the same size are taken in the order of the program.
      formats: the low and the high formats.
      seed: of the random order.

    Returns:
      An :class:`Assignment`.

    Raises:
      ValueError: if ratio or order is not one of these.

    References:
      Lee et al. 2023, Algorithm 1.

    >>> import jax.numpy as jnp
    >>> from lowbit_optax import precision
    >>> loss_fn = lambda w, x: jnp.sum(jnp.tanh(x @ w[0]) @ w[1])
    >>> w = [jnp.ones((3, 4)), jnp.ones((4, 2))]
    >>> plan = precision.trace(loss_fn, w, jnp.ones((5, 3)))
    >>> print(demote(plan, 0.5))
    group  tensor         shape  forward    backward
    -----  -------------  -----  ---------  ----------------
    0      params[0]      3x4    fp(6,9)    fp(6,9)+infinity
    0      batch[0]       5x3    fp(6,9)
    1      params[1]      4x2    fp(4,3,4)  fp(6,9)+infinity
    1      dot_general.0  5x4    fp(4,3,4)  fp(5,2)+infinity
    1      tanh.0         5x4    fp(4,3,4)  fp(5,2)+infinity
    2      dot_general.1  5x2    fp(6,9)    fp(6,9)+infinity
    0.568 of 155 elements in low precision
    """
    if isinstance(ratio, bool) or not 0 <= ratio <= 1:
        raise ValueError(f"demote: ratio is {ratio!r}; accepted are numbers in [0, 1]")
    check_choice("demote", "order", order, Order)
    sizes, backward_sizes = plan.sizes, plan.backward_sizes
    has_low_gradient = _has_low_gradient(plan)
    groups = plan.groups
    if order == "random":
        random.Random(seed).shuffle(groups)
    else:
        size = lambda group: sum(sizes[group] + backward_sizes[group])
        groups.sort(key=size, reverse=order == "decreasing")
    low = np.zeros(len(plan.tensors), bool)
    for group in groups:
        lowered = sum(sizes[low]) + sum(backward_sizes[low & has_low_gradient])
        if lowered >= ratio * plan.size:
            break
        low[group] = True
    return Assignment(plan, formats, low, low & has_low_gradient)


def promote(
    assignment: Assignment, overflow: jax.Array, threshold: float = 0.01
) -> Assignment:
    """Raise the forward tensors that overflow too often to the high format.

    Cotangents are left to loss scaling. Only arrays change, so this can be a part of a
    jitted step, and the step is not compiled again.

    Args:
      assignment: the one that the step was computed with.
      overflow: float32[tensors], from a function made by :func:`apply`: the share of
        each tensor's elements that were past the largest number of its format.
      threshold: the largest share that is accepted.

    Returns:
      An :class:`Assignment` of the same tensors, with some raised from low to high.

    Raises:
      ValueError: if there are not as many shares as tensors.

    References:
      Lee et al. 2023, Algorithm 2; section 4.2.

    >>> import jax.numpy as jnp
    >>> from lowbit_optax import precision
    >>> plan = precision.trace(lambda w, x: jnp.sum(x @ w), *2 * [jnp.ones((2, 2))])
    >>> overflow = jnp.array([0.0, 0.02, 0.001])
    >>> print(promote(precision.uniform(plan), overflow, threshold=0.01).low)
    [ True False  True]
    """
    expected = (len(assignment.plan.tensors),)
    if jnp.shape(overflow) != expected:
        raise ValueError(
            f"promote: overflow has shape {list(jnp.shape(overflow))}, but the "
            f"assignment is of {expected[0]} tensors: it takes the overflow that the "
            "function from apply returned, one share per tensor"
        )
    low = assignment.low & ~(overflow > jnp.float32(threshold))
    low_backward = jnp.asarray(assignment.low_backward)
    return dataclasses.replace(assignment, low=low, low_backward=low_backward)


def uniform(plan: PrecisionPlan, *, formats: Formats = HFP8) -> Assignment:
    """Everything low except weight gradients.

    Args:
      plan: from :func:`trace`.
      formats: the low and the high formats.

    Returns:
      An :class:`Assignment`.

    References:
      Micikevicius et al. 2018; Lee et al. 2023, section 3.1, pi_unif.

    >>> import jax.numpy as jnp
    >>> from lowbit_optax import precision
    >>> plan = precision.trace(lambda w, x: jnp.sum(x @ w), *2 * [jnp.ones((2, 2))])
    >>> print(uniform(plan).low, uniform(plan).low_backward)
    [ True  True  True] [False False  True]
    """
    low = np.ones(len(plan.tensors), bool)
    return Assignment(plan, formats, low, _has_low_gradient(plan))


def operator_based(
    plan: PrecisionPlan, *, outputs: bool = False, formats: Formats = HFP8
) -> Assignment:
    """Low for everything that matrix products read, forward and backward.

    For each matrix product except the first and the last of the loss, its operands are
    low, and so is the cotangent of its result, which the backward products read. A
    product in the body of a scan is excepted only if it runs once: of several runs at
    most one is the first or the last of the loss, and all have the same formats.

    Args:
      plan: from :func:`trace`.
      outputs: whether its result is low too, and the cotangents of its operands except
        weights.
      formats: the low and the high formats.

    Returns:
      An :class:`Assignment`.

    References:
      Sun et al. 2019, and with outputs Kalamkar et al. 2019; Lee et al. 2023, equation
      (2), pi_op and pi_op'.

    >>> import jax.numpy as jnp
    >>> from lowbit_optax import precision
    >>> loss_fn = lambda w, x: jnp.sum(x @ w @ w @ w)
    >>> plan = precision.trace(loss_fn, *2 * [jnp.ones((2, 2))])
    >>> print([t.name for t, low in zip(plan.tensors, operator_based(plan).low) if low])
    ['params', 'dot_general.0']
    """
    runs = {t.made_by: t.repeats for t in plan.tensors}
    ends = {p for p in (0, plan.products - 1) if runs.get(p, 1) == 1}
    inner = set(range(plan.products)) - ends
    is_read = np.array([any(p in inner for p in t.read_by) for t in plan.tensors], bool)
    is_made = np.array([t.made_by in inner for t in plan.tensors], bool)
    low = is_read | is_made if outputs else is_read
    low_backward = is_read | is_made if outputs else is_made
    return Assignment(plan, formats, low, low_backward & _has_low_gradient(plan))


def _has_low_gradient(plan: PrecisionPlan) -> np.ndarray:
    return np.array([t.kind == "value" for t in plan.tensors], bool)
