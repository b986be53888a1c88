"""An update that ``param + update`` turns into the new parameter itself.

``optax.apply_updates`` maps ``p + u`` over parameters and updates. A pytree node in the
place of an update reaches the sum whole, because the map ends where the parameters have
leaves; and so the node can answer the sum.
"""

import typing

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.float_layouts import is_narrow, to_bits
from lowbit_optax._numerics.landing import ADD, apply_leaf


@jax.tree_util.register_pytree_with_keys_class
class DirectUpdate:
    """The update of one array, which added to the old one gives the new one.

        param + update = new                    where param is old
                         param + (new - old)    elsewhere

    If ``param`` is the very array that was updated, as in one jitted function, nothing
    is computed. Otherwise the elements are compared. What maps over updates and is
    linear, such as a product by a scalar or a selection between them and zeros, changes
    ``new`` and ``old`` alike, and so their difference as it should.

    Args:
      new: the new array.
      old: the array that was updated.
    """

    __array_ufunc__ = None  # numpy's arrays leave the sum to __radd__

    def __init__(self, new, old):
        self.new = new
        self.old = old

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("new"), self.new), (key("old"), self.old)), None

    @classmethod
    def tree_unflatten(cls, _, children) -> typing.Self:
        return cls(*children)

    def __radd__(self, param):
        if param is self.old:
            return self.new
        kinds = [(x.shape, x.dtype) for x in (param, self.new, self.old)]
        if len(set(kinds)) > 1:
            given, expected = (f"{dtype}{list(shape)}" for shape, dtype in kinds[:2])
            raise TypeError(
                f"direct_updates: an update of {expected} is added to {given}; were "
                "updates changed on the way? Accepted is optax.apply_updates with what "
                "update returned; put other transformations inside, such as "
                "direct_updates(optax.chain(clip, tx))"
            )
        if not is_narrow(param.dtype):
            return jnp.where(param == self.old, self.new, param + self.difference)
        # A selection between updates and zeros leaves +0 for old and new, which must
        # not replace a parameter of -0.
        is_old = to_bits(param) == to_bits(self.old)
        return jnp.where(is_old, self.new, apply_leaf(param, self.difference))

    @property
    def difference(self) -> jax.Array:
        """``new - old``, in float32 for narrower floats."""
        if is_narrow(self.new.dtype):
            return ADD.result(self.old, self.new)
        return self.new - self.old

    def __repr__(self) -> str:
        return f"DirectUpdate(new={self.new!r}, old={self.old!r})"
