"""Exact landing: make optax's addition give a chosen parameter and a matching residual.

optax adds an update as ``(p + u).astype(p.dtype)``. The update ``u = float32(p') -
float32(p)`` changes a narrow parameter p to a chosen p', because the float32 sum rounds
to p' exactly.

The sign of a zero matters too: residuals can be unsigned, so a zero parameter may carry
the sign of the master. IEEE 754 defines these sums:

    -0 + -0 = -0    -0 + +0 = +0    x - x = +0

Therefore, an update that changes nothing is -0. In float16 and float8,
:func:`difference` reads a parameter of -0 as a small negative number, and the sum
rounds it to -0.

The sum cannot give p' if p' is smaller than p by a factor of more than 2^16 (almost all
of p cancels), or if p or p' is infinite. In bfloat16, and with updates in the
gradients' dtype, it also cannot give p' if p' is -0 and p is not. In bfloat16, a p of
-0 also stays -0 if p' is +0. In these cases, the parameter that the sum gives is
computed first, and the residual is computed for this parameter.

``lowbit_optax.step`` needs no update, because the new parameter replaces the old one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.float_layouts import is_narrow, layout_of, to_bits
from lowbit_optax._numerics.rounding import narrow_or_cast, to_float32
from lowbit_optax._numerics.straight_through import straight_through


@dataclasses.dataclass(frozen=True)
class Replacement:
    """The new parameter replaces the old one, as in ``lowbit_optax.step``."""

    is_direct = True

    def of(self, param, grad) -> "Replacement":
        return self

    def land(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return ``(new parameter, result of the step)``, which are the same here."""
        return new, new

    def result(self, old: jax.Array, landed: jax.Array) -> jax.Array:
        """Return the result of the step for a parameter from :meth:`land`."""
        return landed


@dataclasses.dataclass(frozen=True)
class Addition:
    """optax adds an update to the old parameter, as in ``optax.apply_updates``.

    Args:
      like_grads: whether updates have the dtypes of the gradients, for parameters with
        the same dtype as their gradient. Then the sum differs from ``new`` more often:
        a change of more than 256 units in the last place is rounded, for example if the
        exponent of a bfloat16 weight changes.
      dtype: dtype of the updates of this leaf; None for float32.

    >>> import jax.numpy as jnp
    >>> Addition().land(jnp.bfloat16(1.0), jnp.bfloat16(0.5))
    (Array(0.5, dtype=bfloat16), Array(-0.5, dtype=float32))
    """

    like_grads: bool = False
    dtype: jnp.dtype | None = None

    is_direct = False

    def of(self, param, grad) -> "Addition":
        is_wanted = self.like_grads and param.dtype == grad.dtype
        if not is_wanted or not is_narrow(grad.dtype):
            return self
        return dataclasses.replace(self, dtype=grad.dtype)

    def land(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return ``(parameter that the addition gives, update to add)``.

        ``old`` and ``new`` have the same narrow dtype. The parameter is
        ``round(float32(old) + update)``, bit for bit. It is ``new``, except in the
        cases that the module's docstring lists.
        """
        update = self.cast(difference(old, new))
        return narrow_or_cast(to_float32(old) + to_float32(update), old.dtype), update

    def result(self, old: jax.Array, landed: jax.Array) -> jax.Array:
        """Return the update that changes ``old`` to a parameter from :meth:`land`."""
        update = lambda old, landed: self.cast(difference(old, landed))
        tangent = lambda old, landed: (
            landed.astype(jnp.float32) - old.astype(jnp.float32)
        )
        return straight_through(update, tangent)(old, landed)

    def cast(self, update: jax.Array) -> jax.Array:
        """Round an update to ``dtype``; if that is None, return it unchanged."""
        return update if self.dtype is None else narrow_or_cast(update, self.dtype)


Landing = Replacement | Addition

REPLACE = Replacement()
ADD = Addition()
ADD_LIKE_GRADS = Addition(like_grads=True)


def difference(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the float32 update from ``old`` to ``new``.

    If ``new`` is a parameter that :meth:`Addition.land` returned for ``old``, adding
    the update gives exactly ``new``.
    """
    before, after = _with_sign_of_zero(old), _with_sign_of_zero(new)
    # Infinity minus infinity is NaN, and -0 plus +0 is +0.
    return jnp.where(before == after, jnp.float32(-0.0), after - before)


def apply_leaf(param: jax.Array, update: jax.Array) -> jax.Array:
    """Return ``param + update`` in the parameter's dtype, as optax applies updates.

    Unlike in a sum, a float16 or float8 zero keeps its sign if the update is zero.
    Wrappers such as ``optax.MultiSteps`` return +0 for a step that they skip.
    """
    tangent = lambda *terms: sum(x.astype(jnp.float32) for x in terms)
    return straight_through(_rounded_sum, tangent)(param, update)


def _rounded_sum(param: jax.Array, update: jax.Array) -> jax.Array:
    total = to_float32(param) + update.astype(jnp.float32)
    new = narrow_or_cast(total, param.dtype)
    if not _keeps_sign_of_zero(param.dtype):
        return new
    return jnp.where(update == 0, param, new)


def _keeps_sign_of_zero(dtype: jax.typing.DTypeLike) -> bool:
    """Return whether some normal float32 numbers round to zero in a narrow dtype.

    bfloat16 has float32's exponents, so only subnormal numbers round to zero, and many
    processors flush these in the sum.
    """
    return is_narrow(dtype) and not layout_of(dtype).same_exponent


def _with_sign_of_zero(x: jax.Array) -> jax.Array:
    """Return a narrow array as float32, with -0 as minus 1/4 of the smallest number.

    A quarter still rounds to zero, and is large enough that a float32 sum with most
    numbers of the dtype keeps it.
    """
    wide, layout = to_float32(x), layout_of(x.dtype)
    if not _keeps_sign_of_zero(x.dtype):
        return wide
    quarter = 2.0 ** (1 - layout.bias - layout.mantissa_bits - 2)
    is_negative_zero = to_bits(x) == jnp.uint32(layout.largest + 1)
    return jnp.where(is_negative_zero, jnp.float32(-quarter), wide)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class DirectUpdate:
    """The update of one array; added to the old array, it returns the new array.

        param + update = new                    if param is old
                         param + (new - old)    otherwise

    If ``param`` is the same array object as ``old``, as in one jitted function, nothing
    is computed. Otherwise, the elements are compared. A linear function of the updates,
    such as a product with a scalar or a selection between updates and zeros, changes
    ``new``, ``old`` and their difference consistently.

    Args:
      new: the new array.
      old: the array that was updated.
    """

    new: jax.Array
    old: jax.Array

    __array_ufunc__ = None  # numpy's arrays leave the sum to __radd__

    def __radd__(self, param):
        if param is self.old:
            return self.new
        kinds = [(x.shape, x.dtype) for x in (param, self.new, self.old)]
        if len(set(kinds)) > 1:
            given, expected = (f"{dtype}{list(shape)}" for shape, dtype in kinds[:2])
            raise TypeError(
                f"direct_updates: an update of {expected} must be added to a parameter "
                f"of this type, got {given}. Pass the updates that update returned to "
                "optax.apply_updates without changing them. Put other transformations "
                "inside, as in direct_updates(optax.chain(clip, tx))"
            )
        if not is_narrow(param.dtype):
            return jnp.where(param == self.old, self.new, param + self.difference)
        # A selection between updates and zeros changes old and new to +0, which must
        # not replace a parameter of -0.
        is_old = to_bits(param) == to_bits(self.old)
        return jnp.where(is_old, self.new, apply_leaf(param, self.difference))

    @property
    def difference(self) -> jax.Array:
        """``new - old``, in float32 for narrower floats."""
        if is_narrow(self.new.dtype):
            return ADD.result(self.old, self.new)
        return self.new - self.old
