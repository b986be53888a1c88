"""Steps that may have to be skipped, without a branch.

Only the device knows whether a gradient has overflowed. A conditional around the update
would copy parameters and state into it and out of it. Instead, the old or the new value
of each number is chosen where it is written, and a fused kernel whose step is skipped
writes nothing.
"""

import functools
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees
from lowbit_optax._step.context import layerwise


class Unguarded:
    """The guard of a step that always happens: each method returns what is new."""

    scalars: tuple[jax.Array, ...] = ()
    """The scalars that a kernel needs: none."""

    def unscaled(self, grads):
        """The gradients as they are."""
        return grads

    unscaled_alone = unscaled

    def chosen(self, new, old):
        """The new tree."""
        del old
        return new

    def updates(self, new):
        """The updates as they are."""
        return new

    def within(self, factor: jax.Array, proceed: jax.Array) -> "Guard":
        """The guard of a step inside this one."""
        return Guard(factor, proceed)


UNGUARDED = Unguarded()


class Guard(typing.NamedTuple):
    """Whether a step happens, and the factor that unscales its gradients.

    Args:
      factor: float32 scalar, by which the gradients are multiplied.
      proceed: bool scalar, whether the step happens.
    """

    factor: jax.Array
    proceed: jax.Array

    @property
    def scalars(self) -> tuple[jax.Array, ...]:
        """The scalars that a kernel needs, in this order."""
        return self.factor, self.proceed

    def within(self, factor: jax.Array, proceed: jax.Array) -> "Guard":
        """The guard of a step inside this one, which unscales and decides as well."""
        return Guard(self.factor * factor, jnp.logical_and(self.proceed, proceed))

    def unscaled(self, grads):
        """Gradients times the factor; zeros if the step is skipped.

        Gradients narrower than float32 become float32. On CPUs the product is computed
        inside a branch. Otherwise XLA's CPU compiler would fuse it with what follows
        and contract products and sums differently than it does without a guard.
        """
        leaves, treedef = jax.tree.flatten(grads)
        floats = {i: x for i, x in enumerate(leaves) if trees.is_float(x)}
        # Outside of jit, JAX compiles a conditional of new closures at every step.
        floats = traced_once(_unscaled)(self.factor, self.proceed, floats)
        return treedef.unflatten(floats.get(i, x) for i, x in enumerate(leaves))

    def unscaled_alone(self, grad: jax.Array) -> jax.Array:
        """One gradient, of a step that may be analysed layer by layer."""
        return layerwise(self.unscaled)(grad)

    def times(self, grads):
        """Gradients times the factor; those narrower than float32 become float32."""

        def times(grad):
            if not trees.is_float(grad):
                return grad
            dtype = jnp.float32 if is_narrow(grad.dtype) else grad.dtype
            return grad.astype(dtype) * self.factor.astype(dtype)

        return jax.tree.map(times, grads)

    def chosen(self, new, old):
        """The new tree, in the old one's dtypes; the old one if the step is skipped."""

        def choose(new, old):
            new = jnp.asarray(new).astype(old.dtype) if trees.is_float(new) else new
            return jnp.where(self.proceed, new, old)

        return jax.tree.map(choose, new, old)

    def updates(self, new):
        """The updates, or updates that change nothing if the step is skipped."""
        neutral = neutral_updates(new)
        return jax.tree.map(functools.partial(jnp.where, self.proceed), new, neutral)


def _unscaled(factor: jax.Array, proceed: jax.Array, floats):
    """Float arrays times the factor, or zeros; see :meth:`Guard.unscaled`."""
    times = Guard(factor, proceed).times

    def zeros(floats):
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(times, floats))

    def branched(floats):
        return jax.lax.cond(proceed, times, zeros, floats)

    def selected(floats):
        new = times(floats)
        return jax.tree.map(functools.partial(jnp.where, proceed), new, zeros(floats))

    return jax.lax.platform_dependent(floats, cpu=branched, default=selected)


def neutral_updates(like):
    """A tree of updates that change no bit of a parameter."""

    def neutral(x) -> jax.Array:
        # x + -0 is x for every x, including -0. (-0 + 0 would be +0.)
        value = -0.0 if trees.is_float(x) else 0
        # JAX makes float32 of numpy's float64, and warns unless that is asked for.
        return jnp.asarray(value, jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(neutral, like)
