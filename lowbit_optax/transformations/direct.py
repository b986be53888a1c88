"""``direct_updates``: optax's own contract, at the cost of ``lowbit_optax.step``.

Trainers call ``tx.update`` and then ``optax.apply_updates``, which adds differences.
The updates here answer the sum with the new parameters; see
:mod:`lowbit_optax._step.direct_update`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._arguments import check_transformation
from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step.direct_update import DirectUpdate
from lowbit_optax._step.guard import UNGUARDED
from lowbit_optax._step.stepper import Stepper, stepper_of
from lowbit_optax.loss_scaling.guarded import guarded


class DirectTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that also says how to apply its updates.

    :func:`direct_updates` makes it. ``init`` and ``update`` are optax's; ``_replace``
    and optax's wrappers keep them.
    """

    @staticmethod
    def apply_updates_hook(
        params: optax.Params, updates: optax.Updates
    ) -> optax.Params:
        """``params + updates``, for trainers that ask the transformation for it.

        Args:
          params: tree of parameters.
          updates: what ``update`` has returned for them.

        Returns:
          The new parameters, as ``optax.apply_updates`` does.
        """
        return optax.apply_updates(params, updates)


@dataclasses.dataclass(frozen=True, eq=False)
class _Direct(Stepper):
    inner: optax.GradientTransformation

    def init(self, params: optax.Params):
        return self.inner.init(params)

    def run(self, params, state, grads, landing, extra_args, guard=UNGUARDED):
        """See :meth:`.Stepper.run`."""
        arguments = self.inner, params, state, grads, guard, REPLACE, extra_args
        new, new_state = guarded(*arguments)
        if not landing.is_direct:
            new = jax.tree.map(DirectUpdate, new, params)
        return new, new_state

    def hoisted(self, grads, state, params, extra_args: dict):
        """See :meth:`.Stepper.hoisted`."""
        stepper = stepper_of(self.inner)
        if stepper is None:
            return super().hoisted(grads, state, params, extra_args)
        held, with_held = stepper.hoisted(grads, state, params, extra_args)
        return held, lambda held: _Direct(with_held(held).transformation)

    @property
    def transformation(self) -> DirectTransformation:
        return DirectTransformation(self.init, self.update)


def direct_updates(tx: optax.GradientTransformation) -> DirectTransformation:
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
    together. Log :func:`lowbit_optax.update_norm` in its place.

    Args:
      tx: an optax transformation, as a rule one of this package, alone or in wrappers.

    Returns:
      A transformation with ``tx``'s state. It also has ``apply_updates_hook(params,
      updates)``, which some trainers call.

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


def update_norm(updates: optax.Updates) -> jax.Array:
    """The L2 norm of updates, also of those of :func:`direct_updates`.

        sqrt(sum (new - old)^2)

    It needs the old parameters, so a step that returns it cannot write in place: XLA
    keeps a copy of them. Log it every so many steps.

    Args:
      updates: tree of arrays or :class:`DirectUpdate`.

    Returns:
      float32 scalar.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> tx = direct_updates(lowbit_optax.kahan_sgd(0.5))
    >>> params = jnp.ones(4, jnp.bfloat16)
    >>> update_norm(tx.update(jnp.ones(4), tx.init(params), params)[0])
    Array(1., dtype=float32)
    """
    is_direct = lambda x: isinstance(x, DirectUpdate)
    leaves = jax.tree.leaves(updates, is_leaf=is_direct)
    arrays = [x.difference if is_direct(x) else x for x in leaves]
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays]
    return jnp.sqrt(sum(squares, jnp.float32(0)))
