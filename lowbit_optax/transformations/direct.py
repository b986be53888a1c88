"""``direct_updates`` makes ``optax.apply_updates`` return the new parameters.

Trainers call ``tx.update`` and then ``optax.apply_updates``, which adds updates to
parameters. Here, the sum returns new parameters that are already computed; see
:mod:`lowbit_optax._numerics.landing`.
"""

import dataclasses

import jax
import optax

from lowbit_optax._arguments import check_transformation
from lowbit_optax._numerics.landing import REPLACE, DirectUpdate
from lowbit_optax._step import context
from lowbit_optax._step.guard import UNGUARDED
from lowbit_optax._step.stepper import Stepper, with_extra_args
from lowbit_optax.transformations.step import guarded


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Direct(Stepper):
    """A transformation whose updates are new parameters.

    Args:
      inner: the transformation.
    """

    inner: optax.GradientTransformation

    def init(self, params: optax.Params):
        return self.inner.init(params)

    def update(self, updates, state, params=None, **extra):
        """Return the updates of the step.

        While a step traces its wrappers, it ignores their values, so the updates of the
        inner transformation are enough.
        """
        if not context.current().wants_params:
            return super().update(updates, state, params, **extra)
        return with_extra_args(self.inner).update(updates, state, params, **extra)

    update_within = update

    def run(self, params, state, grads, landing, extra_args, guard=UNGUARDED):
        """See :meth:`.Stepper.run`."""
        arguments = self.inner, params, state, grads, guard, REPLACE, extra_args
        new, new_state = guarded(*arguments)
        if not landing.is_direct:
            new = jax.tree.map(DirectUpdate, new, params)
        return new, new_state


def direct_updates(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Make ``optax.apply_updates`` return exactly the parameters of the step.

    Results and cost are the same as with :func:`lowbit_optax.step`, bit for bit, in
    trainers that call ``optax.apply_updates``, such as flax's ``TrainState`` and
    ``nnx.Optimizer``. An update is a :class:`DirectUpdate`, which is a pytree node.

    Put other transformations inside: ``direct_updates(optax.chain(clip, tx))``. Around
    it, use only wrappers that do not change updates or that replace them by zeros:
    ``optax.masked``, ``partition``, ``inject_hyperparams``, ``MultiSteps`` and
    :func:`with_loss_scale`. You can put ``jax.jit`` and ``jax.lax.cond`` between
    ``update`` and ``apply_updates``; updates from another function are compared with
    the parameters element by element. If ``extra_bits(rounding="toward_zero")`` stores
    float16 or float8 weights, put ``MultiSteps`` inside: it multiplies updates by 0,
    which can change the sign of a zero weight and of its master.

    Do not compute with such updates. ``update * 2``, ``jnp.square(update)``, a
    transformation that adds weight decay, and ``equinox.apply_updates`` raise errors.
    Functions that map over the leaves of updates raise no error: ``optax.scale`` after
    it trains wrongly, and a norm of the updates contains new and old parameters. For a
    norm, subtract the old parameters from the new ones.

    Args:
      tx: an optax transformation, usually one of this package, possibly in wrappers.

    Returns:
      A transformation with the state of ``tx``.

    Raises:
      TypeError: if ``tx`` is not a transformation. ``params + update`` raises a
        TypeError if the updates were changed.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> tx = direct_updates(lowbit_optax.kahan_sgd(0.5))
    >>> params = jnp.ones(3, jnp.bfloat16)
    >>> updates, state = tx.update(jnp.ones(3), tx.init(params), params)
    >>> optax.apply_updates(params, updates)
    Array([0.5, 0.5, 0.5], dtype=bfloat16)
    """
    check_transformation("direct_updates", "tx", tx)
    return _Direct(tx).transformation
