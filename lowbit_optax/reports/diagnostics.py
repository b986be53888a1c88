"""What a step does to each leaf, as scalars to be logged, and what rounding eats."""

import optax

from lowbit_optax._step import context, trees
from lowbit_optax.reports.leaf_reports import LeafReport as LeafReport
from lowbit_optax.reports.leaf_reports import (
    lost_shares,
    measure,
    measure_lost,
    measure_plain,
    nonfinite,
)


def step_report(
    tx: optax.GradientTransformation,
    params: optax.Params,
    state: optax.OptState,
    grads: optax.Updates,
    **extra_args,
):
    """A flight recorder: what the next step would do to each leaf.

    It takes what :func:`lowbit_optax.step` takes, changes nothing, and returns float32
    scalars, so that it can be logged, and jitted with the step or by itself. A step
    that is not recorded has nothing of it. To record every hundredth step of one
    program, put it into ``jax.lax.cond``.

    Args:
      tx: an optax transformation; those of :func:`lowbit_optax.lowbit` may be anywhere
        inside it but within a conditional, as ``optax.MultiSteps`` has it. Without
        any, the report is of ``tx``'s updates, added and rounded as optax does.
      params, state, grads: as for :func:`lowbit_optax.step`.
      **extra_args: for ``tx.update``.

    Returns:
      A tree like ``params`` (a QuantizedTensor is one leaf) of :class:`LeafReport`;
      None at leaves that only transformations of other packages update.

    Raises:
      ValueError: if the step of a ``lowbit`` is inside a conditional.

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> tx = lowbit_optax.lowbit(optax.adamw(1e-4), min_size=0)
    >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> grads = {"w": jnp.full((64, 64), 0.1, jnp.bfloat16)}
    >>> report = step_report(tx, params, tx.init(params), grads)["w"]
    >>> float(report.lost), round(float(report.moved), 1)
    (1.0, 1.0)
    >>> sorted(report.moment_errors)
    ['mu', 'nu']
    """
    names, leaves, treedef = trees.named_leaves(params)
    given = trees.parts_of(names, treedef, grads, "grads")
    tx = optax.with_extra_args_support(tx)
    with context.reporting("step_report", measure) as found:
        updates, _ = tx.update(grads, state, params, **extra_args)
    if not found:
        updates = trees.parts_of(names, treedef, updates, "updates")
        return treedef.unflatten(measure_plain(leaves, given, updates))
    # A loss scale hands on zeros in place of gradients that have overflowed.
    return treedef.unflatten(
        [
            found[name]._replace(nonfinite_grads=nonfinite(grad))
            if name in found
            else None
            for name, grad in zip(names, given, strict=True)
        ]
    )


def cancelled_updates(
    tx: optax.GradientTransformation,
    params: optax.Params,
    state: optax.OptState,
    grads: optax.Updates,
    **extra_args,
):
    """The share of non-zero updates that rounding to nearest would cancel, per leaf.

        share = #{u != 0 and round(p + u) == p} / #{u != 0}

    with u the float32 update of the inner transformation and p the stored parameter.
    For a QuantizedTensor ``round`` is to the nearest code, with the steps of p + u.
    A share near 1 says that plain training in this dtype has stopped learning there.
    It is ``lost`` of :func:`step_report`, without computing the rest.

    Args:
      tx, params, state, grads, **extra_args: as for :func:`step_report`.

    Returns:
      A tree like ``params`` (a QuantizedTensor is one leaf) of float32 scalars from 0
      to 1 (0 where no update is non-zero); None at leaves that only transformations of
      other packages update. jit it with the step.

    Raises:
      ValueError: if the step of a ``lowbit`` is inside a conditional.

    References:
      Zamirai et al. 2020, figure 9.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> tx = lowbit_optax.kahan_sgd(1.0)
    >>> params = jnp.ones(4, jnp.bfloat16)
    >>> grads = jnp.array([0.0, 1e-5, 1e-4, 1.0])
    >>> cancelled_updates(tx, params, tx.init(params), grads)
    Array(0.6666667, dtype=float32)
    """
    names, leaves, treedef = trees.named_leaves(params)
    trees.parts_of(names, treedef, grads, "grads")
    tx = optax.with_extra_args_support(tx)
    with context.reporting("cancelled_updates", measure_lost) as found:
        updates, _ = tx.update(grads, state, params, **extra_args)
    if not found:
        updates = trees.parts_of(names, treedef, updates, "updates")
        return treedef.unflatten(lost_shares(leaves, updates))
    return treedef.unflatten([found.get(name) for name in names])
