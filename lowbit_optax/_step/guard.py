"""Steps that may turn out to be none, without a branch.

Whether a gradient has overflowed is known on the device only. A conditional around the
update would copy parameters and state into it and out of it. Here each number is chosen
where it is written, and a fused kernel then writes nothing.
"""

import functools
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees


class Unguarded:
    """The guard of a step that always happens."""

    scalars: tuple[jax.Array, ...] = ()
    """What a kernel has to be told: nothing."""

    def unscaled(self, grads):
        """The gradients as they are."""
        return grads

    def chosen(self, new, old):
        """The new tree."""
        del old
        return new

    def updates(self, new):
        """The updates as they are."""
        return new


class Guard(typing.NamedTuple):
    """What a guarded step is given besides its gradients.

    Args:
      factor: float32 scalar, by which gradients are multiplied.
      proceed: bool scalar, whether there is a step.
    """

    factor: jax.Array
    proceed: jax.Array

    @property
    def scalars(self) -> tuple[jax.Array, ...]:
        """What a kernel has to be told, in this order."""
        return self.factor, self.proceed

    def unscaled(self, grads):
        """Gradients times the factor, in float32 where narrower; zeros if no step.

        On CPUs they are computed behind a branch: fused with what follows, XLA's CPU
        compiler would contract products and sums differently than without a guard.
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
        """The new tree, in the old one's dtypes, or the old one if there is no step."""

        def choose(new, old):
            new = jnp.asarray(new).astype(old.dtype) if trees.is_float(new) else new
            return jnp.where(self.proceed, new, old)

        return jax.tree.map(choose, new, old)

    def updates(self, new):
        """The tree of updates, or one that changes nothing if there is no step."""
        return jax.tree.map(
            lambda x: jnp.where(self.proceed, x, _neutral_update(x)), new
        )


def _neutral_update(like) -> jax.Array:
    # x + -0 is x, also for x = -0.
    value = -0.0 if jnp.issubdtype(like.dtype, jnp.floating) else 0
    return jnp.asarray(value, like.dtype)
