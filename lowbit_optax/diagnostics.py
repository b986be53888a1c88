"""``step_report``: what a step does to each leaf, as scalars to be logged."""

import jax
import optax

from lowbit_optax._step import context, trees
from lowbit_optax._step.measured import LeafReport as LeafReport
from lowbit_optax._step.measured import measure_plain, nonfinite


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
    with context.reporting() as found:
        updates, _ = tx.update(grads, state, params, **extra_args)
    if not found:
        updates = trees.parts_of(names, treedef, updates, "updates")
        return treedef.unflatten(measure_plain(leaves, given, updates))
    # A loss scale hands on zeros in place of gradients that have overflowed.
    try:
        reports = [
            found[name]._replace(nonfinite_grads=nonfinite(grad))
            if name in found
            else None
            for name, grad in zip(names, given, strict=True)
        ]
        return treedef.unflatten(jax.tree.map(lambda x: x + 0, reports))
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(
            "step_report: a wrapper around lowbit steps inside a conditional, as "
            "optax.MultiSteps does; give the transformation that lowbit returned"
        ) from error
