"""Parts of words, and values in a TPU kernel that are computed when they are used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A value in the upper 8 or 16 bits of a word, with arbitrary lower bits."""

    word: jax.Array
    dtype: np.dtype

    @property
    def width(self) -> int:
        """Number of bits of the value."""
        return 8 * self.dtype.itemsize

    def alone(self) -> jax.Array:
        """Return the word with zeros in its lower bits."""
        return self.word & jnp.uint32(0xFFFFFFFF << (32 - self.width) & 0xFFFFFFFF)

    def lowest(self) -> "Field":
        """Return the value in the lower bits of a word."""
        return Field(self.word, 32 - self.width, self.width)

    def as_float32(self) -> jax.Array:
        """Convert a narrow float to float32."""
        info = jnp.finfo(self.dtype)
        bits = self.alone()
        if info.nexp == 8:
            return lax.bitcast_convert_type(bits, jnp.float32)
        magnitude = (bits & jnp.uint32(0x7FFFFFFF)) >> jnp.uint32(8 - info.nexp)
        # Numbers with exponent 0 are multiples of the smallest positive number. A TPU
        # would replace a subnormal intermediate result with zero, so none may occur.
        least = (info.minexp + 127) << 23
        base = lax.bitcast_convert_type(jnp.uint32(least), jnp.float32)
        small = lax.bitcast_convert_type(magnitude + jnp.uint32(least), jnp.float32)
        small = lax.bitcast_convert_type(small - base, jnp.uint32)
        wide = magnitude + jnp.uint32(info.minexp + 126 << 23)
        # Patterns above the largest number are infinities or NaNs.
        largest = np.asarray(info.max).view(f"uint{self.width}").item()
        special = (largest + 1) << (23 - info.nmant)
        wide = jnp.where(magnitude < jnp.uint32(1 << 23), small, wide)
        wide = jnp.where(
            magnitude >= jnp.uint32(special), magnitude | jnp.uint32(0x7F800000), wide
        )
        sign = bits & jnp.uint32(0x80000000)
        return lax.bitcast_convert_type(wide | sign, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Field:
    """Bits of a word as uint32: ``(word >> shift & (1 << width) - 1) << place``.

    Consecutive shifts become one shift, and bits that a later shift drops need no mask.
    If ``is_signed``, the value is the int32 with the same bits.
    """

    word: jax.Array
    shift: int
    width: int
    place: int = 0
    is_signed: bool = False

    def value(self) -> jax.Array:
        """Return the value as an array."""
        bits = self._bits()
        return lax.bitcast_convert_type(bits, jnp.int32) if self.is_signed else bits

    def _bits(self) -> jax.Array:
        bits, top = self._moved(self.place - self.shift), self.place + self.width
        cuts_below = self.shift > 0 and self.place > 0
        cuts_above = self.shift + self.width < 32 and top < 32
        if not cuts_below and not cuts_above:
            return bits
        mask = ((1 << self.width) - 1) << self.place & 0xFFFFFFFF
        return bits & jnp.uint32(mask)

    def is_upper(self, width: int) -> bool:
        """Return whether the field is the upper ``width`` bits of the word."""
        return (self.shift, self.width, self.place) == (32 - width, width, 0)

    def sign_extended(self, places: int) -> jax.Array | None:
        """Return the int32 shifted right with its sign, or None if it needs a mask."""
        if self.place + self.width < 32 or places < self.place:
            return None
        moved = self._moved(self.place - self.shift)
        return lax.bitcast_convert_type(moved, jnp.int32) >> jnp.int32(places)

    def _moved(self, left: int) -> jax.Array:
        if left == 0:
            return self.word
        if left > 0:
            return self.word << jnp.uint32(left)
        return self.word >> jnp.uint32(-left)


@dataclasses.dataclass(frozen=True)
class XorShifted:
    """The exclusive or of a word and the same word shifted right.

    The upper ``shift`` bits of ``array`` equal the upper ``shift`` bits of ``word``.
    """

    array: jax.Array
    word: jax.Array
    shift: int

    def value(self) -> jax.Array:
        """Return the value as an array."""
        return self.array


@dataclasses.dataclass(frozen=True)
class Sum:
    """A uint32 sum of an array that is constant in a loop, a scalar and a constant.

    Sums with different constants share the first two terms, and a constant needs no
    register.
    """

    array: jax.Array
    scalar: jax.Array
    constant: int = 0

    def value(self) -> jax.Array:
        """Return the value as an array."""
        total = self.array + self.scalar
        return total + jnp.uint32(self.constant) if self.constant else total


Lazy = Field | XorShifted | Sum
"""Values that :func:`whole` converts to arrays."""


def whole(x):
    """Return a lazy value as an array, and any other value unchanged."""
    return x.value() if isinstance(x, Lazy) else x


def shifted_left(x, places: int) -> jax.Array:
    """Shift a uint32 array, or a lazy value, to the left."""
    if isinstance(x, Field) and not x.place:
        return dataclasses.replace(x, place=places).value()
    return whole(x) << jnp.uint32(places) if places else whole(x)
