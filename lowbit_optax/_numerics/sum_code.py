"""A code for sums of gradients, which wraps another code."""

import dataclasses

import jax.numpy as jnp

from lowbit_optax._numerics.codes import Code


@dataclasses.dataclass(frozen=True)
class Sum(Code):
    """A code for sums of gradients, which keeps non-finite values visible.

    Codes of moments store non-finite values, and values of 2^50 or more, as smaller
    numbers, so that the moment recovers. The reader of a sum must see such values.
    Therefore, all finite values affect the scale, and all other values become NaN,
    which is stored in the field that ``code`` does not need.

    Args:
      bits, signed, scale: as in ``code``.
      code: the code of the finite values. Its ``limit`` must be infinity.
    """

    code: Code = dataclasses.field(kw_only=True)

    def magnitude_key(self, x):
        return self.code.magnitude_key(x)

    def scale_of_key(self, key):
        return self.code.scale_of_key(key)

    def prepare(self, scale):
        return self.code.prepare(scale)

    def encode_fields(self, x, prepared, words):
        finite = jnp.isfinite(x)
        nan = jnp.uint32(self.code.spare_field)
        x = jnp.where(finite, x, jnp.float32(0))
        fields = self.code.encode_fields(x, prepared, words)
        # Only negative zero can be encoded as this field.
        fields = jnp.where(fields == nan, jnp.uint32(0), fields)
        return jnp.where(finite, fields, nan)

    def decode_fields(self, fields, prepared):
        value = self.code.decode_fields(fields, prepared)
        nan = fields == jnp.uint32(self.code.spare_field)
        # A NaN constant would become an array that JAX moves out of a scan over layers.
        return jnp.where(nan, value * jnp.float32(jnp.nan), value)
