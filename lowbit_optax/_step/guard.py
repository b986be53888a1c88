"""``Guard``: skips a step on the device, without a branch around it.

Only the device knows whether a gradient has overflowed. A conditional around the update
would copy parameters and state. Instead, a guard selects between the old and the new
value of each array when it is written, and a fused kernel of a skipped step writes
nothing. Loss scaling creates guards, and :mod:`.wrapped` creates them for wrappers such
as ``optax.apply_if_finite``. :meth:`.Stepper.run` receives them.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees


class Guard(typing.NamedTuple):
    """Whether a step happens, and the factor that unscales its gradients.

    Args:
      factor: float32 scalar that multiplies the gradients.
      proceed: bool scalar, True if the step happens. Both are None for a step that
        always happens; then all methods return the new values unchanged.
    """

    factor: typing.Any = None
    proceed: typing.Any = None

    @property
    def scalars(self) -> tuple[jax.Array, ...]:
        """The scalars that a kernel needs, in this order; none if the step happens."""
        return () if self.proceed is None else (self.factor, self.proceed)

    def within(self, factor: jax.Array, proceed: jax.Array) -> "Guard":
        """Return the guard of a step inside this one, which combines both guards."""
        if self.proceed is None:
            return Guard(factor, proceed)
        return Guard(self.factor * factor, jnp.logical_and(self.proceed, proceed))

    def unscaled(self, grads):
        """Multiply gradients by the factor; return zeros if the step is skipped.

        Narrow gradients become float32. On CPUs, the product is computed inside a
        branch. Otherwise, XLA's CPU compiler would fuse it with later operations, and
        contract products and sums differently than without a guard.
        """
        if self.proceed is None:
            return grads
        leaves, treedef = jax.tree.flatten(grads)
        floats = {i: x for i, x in enumerate(leaves) if trees.is_inexact(x)}
        # Outside of jit, JAX compiles a conditional with new closures in every step.
        floats = traced_once(_unscaled)(self.factor, self.proceed, floats)
        return treedef.unflatten(floats.get(i, x) for i, x in enumerate(leaves))

    def times(self, grads):
        """Multiply gradients by the factor; narrow gradients become float32."""

        def times(grad):
            if not trees.is_inexact(grad):
                return grad
            dtype = jnp.float32 if is_narrow(grad.dtype) else grad.dtype
            return grad.astype(dtype) * self.factor.astype(dtype)

        return jax.tree.map(times, grads)

    def chosen(self, new, old):
        """Return ``new`` in the old dtypes, or ``old`` if the step is skipped."""
        if self.proceed is None:
            return new

        def choose(new, old):
            new = jnp.asarray(new).astype(old.dtype) if trees.is_float(new) else new
            return jnp.where(self.proceed, new, old)

        return jax.tree.map(choose, new, old)

    def updates(self, new):
        """Return the updates, or neutral updates if the step is skipped."""
        if self.proceed is None:
            return new
        neutral = neutral_updates(new)
        return jax.tree.map(functools.partial(jnp.where, self.proceed), new, neutral)


UNGUARDED = Guard()
"""The guard of a step that always happens."""


def _unscaled(factor: jax.Array, proceed: jax.Array, floats):
    """Multiply float arrays by the factor, or return zeros if the step is skipped."""
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
    """Return a tree of updates that change no bit of a parameter."""

    def neutral(x) -> jax.Array:
        # x + -0 is x for every x, including -0. (-0 + 0 would be +0.)
        value = -np.zeros((), x.dtype) if trees.is_inexact(x) else 0
        # JAX converts float64 to float32, and warns unless this dtype is requested.
        return jnp.asarray(value, jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(neutral, like)
