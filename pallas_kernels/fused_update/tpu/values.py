"""Values in a TPU kernel that are no arrays of their own: parts of words, and sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A value of 8 or 16 bits: the upper ones of a word, with anything below."""

    word: jax.Array
    dtype: np.dtype

    @property
    def width(self) -> int:
        """Bits of the value."""
        return 8 * self.dtype.itemsize

    def alone(self) -> jax.Array:
        """The word with zeros in its lower bits."""
        return self.word & jnp.uint32(0xFFFFFFFF << (32 - self.width) & 0xFFFFFFFF)

    def lowest(self) -> "Field":
        """The value in the lower bits of a word."""
        return Field(self.word, 32 - self.width, self.width)

    def as_float32(self) -> jax.Array:
        """The float32 that a narrow float is."""
        info = jnp.finfo(self.dtype)
        bits = self.alone()
        if info.nexp == 8:
            return lax.bitcast_convert_type(bits, jnp.float32)
        magnitude = (bits & jnp.uint32(0x7FFFFFFF)) >> jnp.uint32(8 - info.nexp)
        # With exponent 0 they are multiples of the least number. On its way none may be
        # a float32 as small as that, which a TPU takes for zero.
        least = (info.minexp + 127) << 23
        base = lax.bitcast_convert_type(jnp.uint32(least), jnp.float32)
        small = lax.bitcast_convert_type(magnitude + jnp.uint32(least), jnp.float32)
        small = lax.bitcast_convert_type(small - base, jnp.uint32)
        wide = magnitude + jnp.uint32(info.minexp + 126 << 23)
        # What is above the largest number is infinite or NaN.
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
    """The uint32 that some bits of a word are: ``word >> shift & (1 << width) - 1``.

    It may have been shifted to the left since, by ``place``. So shifts that follow each
    other are one, and bits that a later shift drops need no mask. A signed one is the
    int32 of the same bits.
    """

    word: jax.Array
    shift: int
    width: int
    place: int = 0
    is_signed: bool = False

    def value(self) -> jax.Array:
        """As an array."""
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
        """Whether it is so many upper bits of the word."""
        return (self.shift, self.width, self.place) == (32 - width, width, 0)

    def sign_extended(self, places: int) -> jax.Array | None:
        """int32 of the value shifted right, its sign above; None if that needs a mask.

        Args:
          places: by how many.
        """
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
    """The exclusive or of a word and itself shifted to the right, which keeps its top.

    So the upper bits of ``array`` are those of the word that was there before.
    """

    array: jax.Array
    word: jax.Array
    shift: int

    def value(self) -> jax.Array:
        """As an array."""
        return self.array


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum of uint32: an array that does not change in a loop, scalars, a constant.

    Sums that differ in the constant alone have the rest in common, and a constant needs
    no register.
    """

    array: jax.Array
    scalar: jax.Array
    constant: int = 0

    def value(self) -> jax.Array:
        """As an array."""
        total = self.array + self.scalar
        return total + jnp.uint32(self.constant) if self.constant else total


Lazy = Field | XorShifted | Sum
"""What has no array yet; see :func:`whole`."""


def whole(x):
    """The array of what a :class:`Function` returned; a :class:`Narrow` stays one."""
    return x.value() if isinstance(x, Lazy) else x


def shifted_left(x, places: int) -> jax.Array:
    """uint32 that a :class:`Function` returned, shifted to the left."""
    if isinstance(x, Field) and not x.place:
        return dataclasses.replace(x, place=places).value()
    return whole(x) << jnp.uint32(places) if places else whole(x)
