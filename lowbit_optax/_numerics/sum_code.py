"""A code for sums of gradients, around any other.

:mod:`lowbit_optax._numerics.codes` explains what a code is and how all codes round.
"""

import dataclasses

import jax.numpy as jnp

from lowbit_optax._numerics.codes import Code, multiply_add


@dataclasses.dataclass(frozen=True)
class Sum(Code):
    """A code for sums of gradients, which must not hide a value that is not finite.

    A moment recovers when a value that is not finite, or as large as 2^50, is stored as
    less. Whatever reads a sum must see it. So all finite values enter the scale here,
    and all others become NaN, in the field that the code itself does not need.

    Args:
      bits, signed, scale: those of the code.
      code: how the finite values are stored; its ``limit`` is infinity.
    """

    code: Code = dataclasses.field(kw_only=True)

    def keys(self, x):
        return self.code.keys(x)

    def scale_of_keys(self, keys):
        return self.code.scale_of_keys(keys)

    def prepare(self, scale):
        return self.code.prepare(scale)

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        finite = jnp.isfinite(x)
        nan = jnp.uint32(self.code.spare_field)
        x = jnp.where(finite, x, jnp.float32(0))
        fields = self.code.encode_fields(x, prepared, words, multiply_add)
        # Only a negative zero can have it.
        fields = jnp.where(fields == nan, jnp.uint32(0), fields)
        return jnp.where(finite, fields, nan)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        value = self.code.decode_fields(fields, prepared, multiply_add)
        nan = fields == jnp.uint32(self.code.spare_field)
        # A NaN constant would become an array that JAX moves out of a scan over layers.
        return jnp.where(nan, value * jnp.float32(jnp.nan), value)
