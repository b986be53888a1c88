"""Steps that may turn out to be none, without a branch.

Whether a gradient has overflowed is known on the device only. A conditional around the
update would copy parameters and state into it and out of it; here each number is
chosen where it is written, and in a fused kernel nothing is written.
"""

import functools
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees


class Guard(typing.NamedTuple):
    """What a guarded step is given besides its gradients.

    Args:
      factor: float32 scalar, by which gradients are multiplied.
      proceed: bool scalar, whether there is a step.
    """

    factor: jax.Array
    proceed: jax.Array

    def unscaled(self, grads):
        """Gradients times the factor, in float32 where narrower; zeros if no step.

        On CPUs they are made behind a branch: fused with what follows, XLA there
        contracts products and sums otherwise than without a guard.
        """
        leaves, treedef = jax.tree.flatten(grads)
        floats = {i: x for i, x in enumerate(leaves) if trees.is_float(x)}

        def zeros(floats):
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(self.times, floats))

        def branched(floats):
            return jax.lax.cond(self.proceed, self.times, zeros, floats)

        def selected(floats):
            new = self.times(floats)
            return jax.tree.map(
                functools.partial(jnp.where, self.proceed), new, zeros(floats)
            )

        floats = jax.lax.platform_dependent(floats, cpu=branched, default=selected)
        return treedef.unflatten(floats.get(i, x) for i, x in enumerate(leaves))

    def times(self, grads):
        """Gradients times the factor, in float32 where they are narrower."""

        def times(grad):
            if not trees.is_float(grad):
                return grad
            dtype = jnp.float32 if is_narrow(grad.dtype) else grad.dtype
            return grad.astype(dtype) * self.factor.astype(dtype)

        return jax.tree.map(times, grads)

    def chosen(self, new, old):
        """The new tree, in the old one's dtypes, or the old one."""

        def choose(new, old):
            new = jnp.asarray(new).astype(old.dtype) if trees.is_float(new) else new
            return jnp.where(self.proceed, new, old)

        return jax.tree.map(choose, new, old)

    def updates(self, new):
        """The tree of updates, or one that changes nothing."""
        return jax.tree.map(lambda x: jnp.where(self.proceed, x, _nothing(x)), new)


def _nothing(like) -> jax.Array:
    # x + -0 is x, also for x = -0.
    value = -0.0 if jnp.issubdtype(like.dtype, jnp.floating) else 0
    return jnp.asarray(value, like.dtype)
