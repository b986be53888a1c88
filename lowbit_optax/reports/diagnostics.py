"""Measure the effect of rounding on the next step, with scalars for each leaf.

    update --+--> new master - master --> moved, noise
             +--> round(param + update) == param --> lost
    moments --> encode, decode --> moment_errors

The report is computed separately, so steps without a report do not become slower.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax.core import Tracer

from lowbit_optax._arguments import check_transformation
from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics.landing import REPLACE, apply_leaf
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step import context, trees
from lowbit_optax._step.error_feedback import feedback_of, parts_for_errors
from lowbit_optax._step.inner_update import trace_update
from lowbit_optax._step.step import Step
from lowbit_optax._step.stepper import with_extra_args
from lowbit_optax._tables import Table, Tabular
from lowbit_optax._types import OptState, PyTree, Transformation
from lowbit_optax.formats import quantized_tensor
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.quantized_tensor import QuantizedWeight
from lowbit_optax.states.state_leaves import state_leaves
from pallas_kernels.bitfields import unpack
from pallas_kernels.layout import layout_of


class LeafReport(typing.NamedTuple):
    """The effect of a step on a leaf, in float32 scalars; see :func:`step_report`.

    Here p is the parameter, u is the float32 update of the inner transformation, and d
    is the change of the stored master weight. Elements where u or d is not finite are
    ignored.

    Args:
      lost: ``#{u != 0 and round(p + u) == p} / #{u != 0}``, the share of updates that
        rounding to nearest would cancel.
      moved: ``<d, u> / <u, u>``, the movement of the master relative to the update. 1
        is exact. With ``error_feedback``, a step may move the master by more or less,
        and later steps correct the difference.
      noise: ``|d - u| / |u|``, the relative error of the movement.
      overflows: the number of weights that become non-finite although the master and
        the update are finite.
      nonfinite_grads: the number of non-finite elements of the gradient.
      moment_errors: ``|m' - m| / |m|`` for each field that a moment format stores, such
        as ``mu`` and ``nu``, where m is the new moment and m' is its stored value.
    """

    lost: jax.Array
    moved: jax.Array
    noise: jax.Array
    overflows: jax.Array
    nonfinite_grads: jax.Array
    moment_errors: dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class StepReport(Tabular):
    """The result of :func:`step_report`, a pytree of float32 scalars; ``print`` it.

    Args:
      leaves: a tree of :class:`LeafReport` with the structure of the parameters; a
        QuantizedTensor is one leaf. Leaves that only transformations of other packages
        update are None.
    """

    leaves: typing.Any

    @property
    def lost(self):
        """The share of updates that rounding would cancel, for each parameter.

            lost = #{u != 0 and round(p + u) == p} / #{u != 0}

        Here u is the float32 update of the inner transformation, and p is the stored
        parameter. The share is 0 if every update is zero. For a QuantizedTensor,
        ``round`` chooses the nearest code, with the step sizes of p + u. If the share
        is near 1, training in this dtype without a residual no longer changes the
        parameter. If you use only this property, ``jax.jit`` computes only this share.

        References:
          Zamirai et al. 2020, figure 9.
        """
        return jax.tree.map(lambda x: x and x.lost, self.leaves, is_leaf=_is_report)

    def scalars(self) -> dict[str, jax.Array]:
        """Return all scalars by path, such as ``"layer/kernel/lost"``, for a logger."""
        found = jax.tree_util.tree_leaves_with_path(self.leaves)
        name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
        return {name(path): x for path, x in found}

    def table(self) -> Table:
        """Return all scalars, with a row for each leaf."""
        found = jax.tree_util.tree_leaves_with_path(self.leaves, is_leaf=_is_report)
        head = ["leaf", *LeafReport._fields[:-1], "moment_errors"]
        rows = [
            [jax.tree_util.keystr(path), *map(_shown, leaf[:-1]), _errors_shown(leaf)]
            for path, leaf in found
            if leaf is not None
        ]
        return Table("effect of the next step on each leaf", [head, *rows])


def step_report(
    tx: Transformation,
    params: PyTree,
    state: OptState,
    grads: PyTree,
    **extra_args: typing.Any,
) -> StepReport:
    """Report how rounding would affect the next step, without running the step.

    The report consists of float32 scalars, so you can compute it under ``jax.jit``,
    with the step or separately. To report only every hundredth step of a jitted loop,
    call ``step_report`` inside ``jax.lax.cond``.

    Args:
      tx: an optax transformation. A :func:`lowbit_optax.lowbit` may be anywhere inside
        it except within a conditional, which ``optax.MultiSteps`` uses. Without a
        ``lowbit``, the report describes updates that are added and rounded as in optax.
      params, state, grads: the arguments of :func:`lowbit_optax.step`.
      **extra_args: passed to ``tx.update``.

    Returns:
      A :class:`StepReport`. ``print`` it, or log its ``scalars()``.

    Raises:
      ValueError: if the step of a ``lowbit`` is inside a conditional.

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> tx = lowbit_optax.lowbit(optax.adamw(1e-4), min_size=0)
    >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> grads = {"w": jnp.full((64, 64), 0.1, jnp.bfloat16)}
    >>> report = step_report(tx, params, tx.init(params), grads)
    >>> float(report.lost["w"]), round(float(report.leaves["w"].moved), 1)
    (1.0, 1.0)
    >>> sorted(report.scalars())[:3]
    ['w/lost', 'w/moment_errors/mu', 'w/moment_errors/nu']
    """
    check_transformation("step_report", "tx", tx)
    names, leaves, treedef = trees.named_leaves(params)
    given = trees.parts_of(names, treedef, grads, "grads")
    with context.reporting("step_report", _step_reports) as found:
        updates, _ = with_extra_args(tx).update(grads, state, params, **extra_args)
    if not found:
        updates = trees.parts_of(names, treedef, updates, "updates")
        found = dict(zip(names, map(_plain_report, leaves, updates), strict=True))
    # Count here, because a loss scale replaces gradients that overflowed with zeros.
    count = lambda x, grad: x and x._replace(nonfinite_grads=_nonfinite(grad))
    return StepReport(treedef.unflatten(map(count, map(found.get, names), given)))


def _shown(x) -> str:
    """Return a scalar as text, or the type if ``x`` is a tracer or not a scalar."""
    is_traced = not isinstance(x, jax.Array) or isinstance(x, Tracer)
    return str(jax.typeof(x)) if is_traced or x.ndim else f"{float(x):.3g}"


def _errors_shown(leaf: LeafReport) -> str:
    errors = sorted(leaf.moment_errors.items())
    return " ".join(f"{field} {_shown(error)}" for field, error in errors)


def _is_report(x) -> bool:
    return x is None or isinstance(x, LeafReport)


def _step_reports(step: Step, update, _) -> dict[str, LeafReport]:
    """Return a dict from the path of each leaf to its report."""
    step = dataclasses.replace(step, landing=REPLACE)
    updates, inner_state = step.inner_update(update)
    updates = step.parts_of_updates(updates)
    errors = _moment_errors(step, inner_state)
    ahead = _ahead(step, update, inner_state)
    return {
        name: _leaf_report(step, number, updates[number], ahead[number], errors[name])
        for number, name in enumerate(step.names)
    }


def _ahead(step: Step, update, inner_state) -> list:
    """Return how far momentum will still move each leaf; None without feedback."""
    ahead: list = [None] * len(step.leaves)
    if parts_for_errors(step.plan):
        traced, parts = trace_update(update, step), jax.tree.leaves(inner_state)
        feedback = feedback_of(traced)
        values = traced.values([x.reach for x in feedback.values()])
        for i, into in feedback.items():
            ahead[i] = parts[into.part] * values[into.reach]
    return ahead


def _plain_report(param, update) -> LeafReport:
    """Return the report of a leaf to which optax adds its update."""
    new = apply_leaf(param, update) if trees.is_float(param) else param
    return _report(param, update, to_float32, (param,), (new,), {})


def _cancelled_share(param, update) -> jax.Array:
    """Return the share of non-zero updates that rounding to nearest would cancel."""
    if not trees.is_float(param):
        return jnp.float32(0)
    moved = update != 0
    if quantized_tensor.is_quantized(param):
        old = param.dequantize()
        sums = old + update.astype(jnp.float32)
        same = _nearest(sums, param).dequantize() == old
    else:
        same = apply_leaf(param, update) == param
    count = jnp.sum(moved, dtype=jnp.float32)
    cancelled = jnp.sum(moved & same, dtype=jnp.float32)
    return cancelled / jnp.maximum(count, jnp.float32(1))


def _nearest(x: jax.Array, old) -> QuantizedWeight:
    """Quantize float32 values like ``old``, with its step sizes if the values fit."""
    if isinstance(old, quantized_tensor.QuantizedTensor):
        return quantized_tensor.requantize(x, old, None)
    return old.quantized(x)


def _nonfinite(x) -> jax.Array:
    """Return the number of non-finite elements as a float32 scalar."""
    if not trees.is_inexact(x):
        return jnp.float32(0)
    return jnp.sum(~jnp.isfinite(x), dtype=jnp.float32)


def _in_units(x: jax.Array, error: jax.Array, counted: jax.Array):
    """Divide both arrays by the largest ``|x|``, and sum the squares of the new ``x``.

    The division keeps squares from underflowing. Elements not in ``counted`` become 0.
    """
    x, error = (jnp.where(counted, part, jnp.float32(0)) for part in (x, error))
    unit = jnp.max(jnp.abs(x), initial=jnp.float32(0))
    unit = jnp.where(unit > 0, unit, jnp.float32(1))
    x, error = x / unit, error / unit
    return x, error, jnp.sum(x * x)


def _movement(old: jax.Array, new: jax.Array, update: jax.Array):
    """Return ``(moved, noise, overflows)`` of a :class:`LeafReport`."""
    intended = jnp.isfinite(old) & jnp.isfinite(update)
    overflows = jnp.sum(intended & ~jnp.isfinite(new), dtype=jnp.float32)
    u, d, square = _in_units(update, new - old, intended & jnp.isfinite(new))
    is_still = square == 0
    square = jnp.where(is_still, jnp.float32(1), square)
    error = d - u
    moved = jnp.where(is_still, jnp.float32(1), jnp.sum(d * u) / square)
    return moved, jnp.sqrt(jnp.sum(error * error) / square), overflows


def _relative_error(value: jax.Array, stored: jax.Array) -> jax.Array:
    finite = jnp.isfinite(value) & jnp.isfinite(stored)
    _, error, square = _in_units(value, stored - value, finite)
    square = jnp.where(square == 0, jnp.float32(1), square)
    return jnp.sqrt(jnp.sum(error * error) / square)


def _leaf_report(step: Step, number: int, update, ahead, errors) -> LeafReport:
    leaf = step.leaves[number]
    param, residual, format_ = leaf.param, leaf.residual, leaf.format
    if format_ is None:
        new = step.landed(number, update).result
        return _report(param, update, to_float32, (param,), (new,), errors)
    if residual is not None and format_.width:
        # Unpacked residuals allow elementwise operations.
        residual = unpack(residual, format_.width, layout_of(param.shape))
        format_ = format_.on_fields()
    new, after, _ = traced_once(_advance, format_)(
        param, residual, update.astype(jnp.float32), step.random[number], ahead
    )
    new, after = step.guard.chosen((new, after), (param, residual))
    join = traced_once(format_.join)
    return _report(param, update, join, (param, residual), (new, after), errors)


def _report(param, update, join, old, new, moment_errors) -> LeafReport:
    """Return the report of a leaf whose arrays change from ``old`` to ``new``."""
    zero = jnp.float32(0)
    if not trees.is_float(param):
        return LeafReport(zero, jnp.float32(1), zero, zero, zero, moment_errors)
    lost = traced_once(_cancelled_share)(param, update)
    update = update.astype(jnp.float32)
    moved, noise, overflows = traced_once(_movement)(join(*old), join(*new), update)
    return LeafReport(lost, moved, noise, overflows, zero, moment_errors)


def _advance(format_: WeightFormat, param, residual, update, random, ahead):
    return format_.advance(param, residual, update, random, REPLACE, ahead)


def _moment_errors(step: Step, inner_state):
    """Return the relative errors of stored moments, by leaf and by field."""
    plan, new = step.plan, jax.tree.leaves(inner_state)
    stored = plan.decode(plan.encode(new, step.draws))
    errors: dict[str, dict[str, jax.Array]] = {name: {} for name in step.names}
    for i, part in enumerate(state_leaves(step.tree(step.params), inner_state)):
        moment = plan.storage[i]
        if moment is None:
            continue
        field = part.moment_field
        if not field or field in errors[moment.leaf]:
            field = jax.tree_util.keystr(part.field)
        errors[moment.leaf][field] = traced_once(_relative_error)(new[i], stored[i])
    return errors
