"""``DirectUpdate``: an update for which ``param + update`` is the new parameter.

:func:`lowbit_optax.direct_updates` returns these updates. ``optax.apply_updates`` maps
``p + u`` over the leaves of the parameters. If an update is a pytree node, the sum
receives the whole node, so the node can define the result with ``__radd__``.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.float_layouts import is_narrow, to_bits
from lowbit_optax._numerics.landing import ADD, apply_leaf


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
