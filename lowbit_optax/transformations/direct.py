"""``direct_updates``: optax's own contract, at the cost of ``lowbit_optax.step``.

Trainers call ``tx.update`` and then ``optax.apply_updates``, which adds differences.
The updates here answer the sum with the new parameters; see
:mod:`lowbit_optax._step.direct_update`.
"""

import dataclasses

import jax
import optax

from lowbit_optax._arguments import check_transformation
from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step import context
from lowbit_optax._step.direct_update import DirectUpdate
from lowbit_optax._step.guard import UNGUARDED
from lowbit_optax._step.stepper import Stepper
from lowbit_optax.transformations.guarded_step import guarded


@dataclasses.dataclass(frozen=True, eq=False)
class _Direct(Stepper):
    """The steps of a transformation, with new parameters in place of updates.

    Args:
      inner: the transformation.
    """

    inner: optax.GradientTransformation

    def init(self, params: optax.Params):
        return self.inner.init(params)

    def update(self, updates, state, params=None, **extra):
        """As in optax; while a step traces its wrappers, the inner ``update``.

        The step writes new parameters, so these updates are not needed.
        """
        if not context.current().wants_params:
            return super().update(updates, state, params, **extra)
        inner = optax.with_extra_args_support(self.inner)
        return inner.update(updates, state, params, **extra)

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
    """A transformation whose updates are the new parameters, for ``apply_updates``.

    The results are those of :func:`lowbit_optax.step`, bit for bit, and so is the cost,
    in trainers that know nothing of it: ``optax.apply_updates``, flax's ``TrainState``,
    ``nnx.Optimizer``. An update is a :class:`DirectUpdate`, a pytree node.

    Put other transformations inside: ``direct_updates(optax.chain(clip, tx))``. Around
    it may be what hands on updates as they are, or selects between them and zeros:
    ``optax.masked``, ``partition``, ``inject_hyperparams``, ``MultiSteps``,
    :func:`with_loss_scale`; ``jax.jit`` and ``jax.lax.cond`` between update and sum.
    Updates from outside the function that adds them are compared with the parameters
    there, element by element. Put ``MultiSteps`` inside if float16 or float8 weights
    are stored by ``extra_bits(rounding="toward_zero")``: it multiplies updates by 0,
    which can change the sign of a zero weight, and so the sign of its master.

    Do not compute with such updates. ``update * 2``, ``jnp.square(update)``, a
    transformation that adds weight decay and ``equinox.apply_updates`` raise errors.
    Functions that map over the leaves of updates do not: ``optax.scale`` after it
    trains wrongly, and a norm of the tree of updates is one of new and old parameters
    together. Take the norm of the new parameters minus the old ones in its place.

    Args:
      tx: an optax transformation, as a rule one of this package, alone or in wrappers.

    Returns:
      A transformation with ``tx``'s state.

    Raises:
      TypeError: if ``tx`` is no transformation; and from ``params + update``, if
        updates were changed on the way.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> tx = direct_updates(lowbit_optax.kahan_sgd(0.5))
    >>> params = jnp.ones(3, jnp.bfloat16)
    >>> updates, state = tx.update(jnp.ones(3), tx.init(params), params)
    >>> optax.apply_updates(params, updates)
    Array([0.5, 0.5, 0.5], dtype=bfloat16)
    """
    check_transformation("direct_updates", "tx", tx)
    return _Direct(tx).transformation
