"""Trace a loss, and create and change precision assignments.

All assignments keep weight gradients in the high format, as Lee et al. 2023 (section
5.2) and Sun et al. 2019 do.
"""

import dataclasses
import random
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._arguments import check_choice
from lowbit_optax._types import Function, PyTree
from lowbit_optax.precision.assignment import HFP8, Assignment, Formats, PrecisionPlan
from lowbit_optax.precision.tensor_search import TensorSearch

Order = typing.Literal["decreasing", "increasing", "random"]


def trace(
    loss_fn: Function, params: PyTree, *batch: PyTree, has_aux: bool = False
) -> PrecisionPlan:
    """Find the tensors of a loss, in groups that are separated by matrix products.

    The loss is traced, but not computed. Its tensors are the parameters, the results of
    matrix products and convolutions, carries of scans, results of branches and maximum
    pooling, other arrays that are read by or after a later matrix product, and arrays
    that you name with ``jax.ad_checkpoint.checkpoint_name``. Scalars, and arrays that
    the loss does not depend on, are not tensors.

    Tensors inside ``jit``, ``jax.checkpoint``, ``lax.scan``, all branches of
    ``lax.cond`` and ``lax.switch``, and ``lax.while_loop`` are included. Tensors of a
    while loop count once, because the number of iterations is unknown, and have no
    cotangents. Rounding may change the number of iterations.

    Args:
      loss_fn: a function ``(params, *batch) -> loss`` that returns a float scalar.
      params, *batch: trees of arrays, or of shapes and dtypes.
      has_aux: if True, ``loss_fn`` returns ``(loss, aux)``.

    Returns:
      A :class:`PrecisionPlan`, which you pass to :func:`demote`, :func:`uniform` or
      :func:`operator_based`.

    Raises:
      TypeError: if the loss is not a float scalar.

    Warns:
      UserWarning: if arrays inside of an operation are neither rounded nor counted, for
        example in ``shard_map``, in ``lax.platform_dependent``, and in a
        ``lax.while_loop`` with a matrix product in its condition. The results of these
        operations are tensors. ``opaque`` of the plan lists their names.

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
            f"precision.trace: arrays inside {', '.join(found.opaque)} are neither "
            "rounded nor counted, only the results are. Arrays inside lax.scan, "
            "lax.cond, lax.while_loop and jax.checkpoint can be rounded",
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
    """Assign the low format to groups of tensors until a share of elements is low.

        T'_1, T'_2, ... = groups in decreasing order of size, with cotangents
        for j = 1, 2, ...: stop if low_ratio >= ratio; demote T'_j

    Args:
      plan: the tensors, from :func:`trace`.
      ratio: the ``low_ratio`` to reach, from 0 (all high) to 1. Weight gradients count
        but stay high, so with 1, all other arrays are low and ``low_ratio`` is below 1.
      order: the order in which groups are demoted: ``"decreasing"`` size, or, for
        comparison, ``"increasing"`` size or ``"random"``. Groups of the same size are
        demoted in the order of the program.
      formats: the low and the high formats.
      seed: seed for the random order.

    Returns:
      An :class:`Assignment`.

    Raises:
      ValueError: if ``ratio`` or ``order`` has a wrong value.

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
    0.568 of the 155 elements are low-precision
    """
    if isinstance(ratio, bool) or not 0 <= ratio <= 1:
        raise ValueError(f"demote: ratio must be a number from 0 to 1, got {ratio!r}")
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
    """Assign the high format to forward tensors that overflow too often.

    The formats of cotangents do not change; use loss scaling if cotangents overflow.
    Only the arrays of the assignment change, so you can call this function in a jitted
    step without a recompilation.

    Args:
      assignment: the assignment that the step used.
      overflow: float32[tensors], the share of each tensor's elements that are above the
        largest number of its format. The function from :func:`apply` returns it.
      threshold: tensors with a larger share change to the high format.

    Returns:
      An :class:`Assignment` for the same tensors.

    Raises:
      ValueError: if ``overflow`` does not have one element per tensor.

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
            "promote: overflow must come from apply, with one element for each of the "
            f"{expected[0]} tensors, got shape {list(jnp.shape(overflow))}"
        )
    low = assignment.low & ~(overflow > jnp.float32(threshold))
    low_backward = jnp.asarray(assignment.low_backward)
    return dataclasses.replace(assignment, low=low, low_backward=low_backward)


def uniform(plan: PrecisionPlan, *, formats: Formats = HFP8) -> Assignment:
    """Assign the low format to all tensors and cotangents except weight gradients.

    Args:
      plan: the tensors, from :func:`trace`.
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
    """Assign the low format to all arrays that matrix products read.

    The first and the last matrix product of the loss are exceptions. For each other
    product, the operands are low, and so is the cotangent of the result, which the
    backward products read. A product in a scan that runs several times is never an
    exception, because all of its runs have the same formats.

    Args:
      plan: the tensors, from :func:`trace`.
      outputs: if True, the results of the products are also low, and so are the
        cotangents of operands that are not weights.
      formats: the low and the high formats.

    Returns:
      An :class:`Assignment`.

    References:
      Sun et al. 2019; Kalamkar et al. 2019 for ``outputs=True``; Lee et al. 2023,
      equation (2), pi_op and pi_op'.

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
