"""``updates_like_grads``: updates in the gradients' dtype."""

import optax

from lowbit_optax._numerics.landing import ADD_LIKE_GRADS
from lowbit_optax._step.guard import UNGUARDED
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax.transformations.direct import OtherUpdates
from lowbit_optax.transformations.guarded_step import guarded


class _LikeGrads(OtherUpdates):
    def run(self, params, state, grads, landing, extra_args, guard=UNGUARDED):
        """See :meth:`.Stepper.run`."""
        landing = landing if landing.is_direct else ADD_LIKE_GRADS
        return guarded(self.inner, params, state, grads, guard, landing, extra_args)


def updates_like_grads(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """A transformation whose updates have the gradients' dtype, as optax's have.

    For code around ``tx.update`` that compares dtypes, such as
    ``optax.apply_if_finite`` or a ``jax.lax.cond`` between updates and gradients, and
    for code that adds updates without a cast, such as ``equinox.apply_updates``, which
    would make bfloat16 weights float32.

    A bfloat16 update says a change of up to 256 units in the last place of a weight
    exactly. Larger ones are rounded, and so is the weight, by up to a unit; the
    residual belongs to the weight that the sum gives. :func:`lowbit_optax.step` and
    float32 leaves are the same as ever.

    No sum in float16 or float8 changes a weight from +0 to -0, and
    ``extra_bits(rounding="toward_zero")`` stores the sign of a small master there. So a
    negative master that is smaller than the dtype's smallest number becomes 0.

    Args:
      tx: a transformation of this package. Put optax's wrappers around the result.

    Raises:
      TypeError: if ``tx`` is of another package, or wrapped by one.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> from lowbit_optax.transformations.like_grads import updates_like_grads
    >>> tx = updates_like_grads(lowbit_optax.kahan_sgd(0.5))
    >>> params = jnp.ones(3, jnp.bfloat16)
    >>> tx.update(params, tx.init(params), params)[0]
    Array([-0.5, -0.5, -0.5], dtype=bfloat16)
    """
    if stepper_of(tx) is None:
        raise TypeError(
            f"updates_like_grads: tx is {tx!r}; accepted is a transformation of this "
            "package; put wrappers around the result, such as "
            "optax.chain(clip, updates_like_grads(lowbit_adamw(1e-3)))"
        )
    return _LikeGrads(tx).transformation
