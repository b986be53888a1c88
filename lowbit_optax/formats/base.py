"""What a weight format and a moment format are.

A weight format says how a float32 master is kept as (param, residual); a moment format
how a float32 moment is kept as codes. Both are frozen, hashable dataclasses that hold
static choices only, so that jit and ``optax.inject_hyperparams`` leave them alone.

The engine (:mod:`lowbit_optax._step.engine`) calls a format's methods leaf by leaf,
with arrays of the leaf's full shape, and so does a kernel, with rows of them: there all
methods that take arrays are elementwise.

What is in the parameters is the truth. Between two steps a user may set weights, to
prune or to project them or to swap averages in, and the residual then belongs to
another weight. ``join``, ``inner_weight`` and ``advance`` must take the parameter where
no rounding of the stored master could have given it.
"""

import dataclasses
import typing
from collections.abc import Set

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.codes import Code, MultiplyAdd, Prepared, multiply_add
from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._numerics.streams import Draws

Residual = typing.Any
"""An array; None for a leaf that needs none."""


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How masters are stored.

    A format must define ``container`` and ``round``. One that keeps residuals must also
    define ``init``, ``join`` and ``residual``; a residual is None for a leaf that needs
    none. One that packs them must define ``width`` and ``on_fields``.

    It may define ``split`` and ``store``, where both halves together are cheaper than
    one after the other; ``advance`` with ``stores_sum = False``, where adding an update
    is more than storing the sum; ``inner_weight``, ``check``, ``for_leaf`` and
    ``residual_random_bits``. Their defaults are right for every format.
    """

    container: typing.ClassVar[type]
    """The NamedTuple type that holds the tree of residuals in ``LowbitState``.

    It is part of the state's structure: that is how
    :func:`lowbit_optax.master_weights` knows the format without being told, and how a
    checkpoint of another format is noticed.
    """

    stores_sum: typing.ClassVar[bool] = True
    """Whether ``advance`` is ``store`` of the sum of master and update."""

    def check(self, dtype: jnp.dtype) -> str | None:
        """Why a leaf of this narrow dtype cannot be held, or None if it can."""
        del dtype
        return None

    def for_leaf(
        self, shape: tuple[int, ...], dtype: jnp.dtype, min_size: int
    ) -> "WeightFormat":
        """The format of one leaf.

        Args:
          shape, dtype: of the leaf.
          min_size: a leaf with fewer elements may get a simpler format.
        """
        del shape, dtype, min_size
        return self

    def residual_random_bits(self, dtype: jnp.dtype) -> int:
        """How many leading bits of the residual stream's words are read, at most.

        The leaf's moments may use the bits that are not, see
        :func:`lowbit_optax._numerics.streams.moment_draws`.
        """
        del dtype
        return 32

    @property
    def width(self) -> int:
        """Bits per parameter of packed residuals; 0 where they are not packed."""
        return 0

    def on_fields(self) -> "WeightFormat":
        """The same format on unpacked residuals, uint32 fields of ``width`` bits."""
        return self

    def widen(self, param: jax.Array) -> jax.Array:
        """The float32 master at the start of training: the parameter itself."""
        return to_float32(param)

    def init(self, param: jax.Array) -> Residual:
        """The residual with which the master is the parameter itself."""
        del param
        return None

    def join(self, param: jax.Array, residual: Residual) -> jax.Array:
        """The float32 master: the parameter where the residual is not its own."""
        del residual
        return self.widen(param)

    def inner_weight(self, param: jax.Array, residual: Residual) -> jax.Array:
        """The float32 weight that the inner transformation sees: the master."""
        return self.join(param, residual)

    def round(
        self, master: jax.Array, dtype: jnp.dtype, random: RandomBits
    ) -> jax.Array:
        """The parameter of a master."""
        raise NotImplementedError

    def residual(
        self, master: jax.Array, param: jax.Array, random: RandomBits
    ) -> Residual:
        """What belongs to ``param`` so that both come nearest to ``master``."""
        del master, param, random
        return None

    def split(
        self, master: jax.Array, dtype: jnp.dtype, random: RandomBits
    ) -> tuple[jax.Array, Residual]:
        """A master as (param, residual)."""
        param = self.round(master, dtype, random)
        return param, self.residual(master, param, random)

    def advance(
        self,
        param: jax.Array,
        residual: Residual,
        update: jax.Array,
        random: RandomBits,
        landing: Landing = REPLACE,
    ) -> tuple[jax.Array, Residual, jax.Array]:
        """Add a float32 update to the master.

        Args:
          param: the leaf, in its narrow dtype.
          residual: what the state holds for it.
          update: float32, of param's shape.
          random: the leaf's random bits at this step.
          landing: how the new parameter takes the old one's place, see
            :mod:`lowbit_optax._numerics.landing`.

        Returns:
          ``(new param, new residual, landing update)``.
        """
        return self.store(param, self.join(param, residual) + update, random, landing)

    def store(
        self,
        param: jax.Array,
        master: jax.Array,
        random: RandomBits,
        landing: Landing = REPLACE,
    ) -> tuple[jax.Array, Residual, jax.Array]:
        """The second half of :meth:`advance`: store a master that was updated."""
        if landing.is_direct:
            new, residual = self.split(master, param.dtype, random)
            return new, residual, new
        new, difference = landing.land(param, self.round(master, param.dtype, random))
        return new, self.residual(master, new, random), difference


def residual_bits_read(format_: WeightFormat | None, param: jax.Array) -> int:
    """``residual_random_bits`` of a leaf, whose format is None if it passes through."""
    return 32 if format_ is None else format_.residual_random_bits(param.dtype)


@dataclasses.dataclass(frozen=True)
class MomentFormat:
    """How float32 moments are stored.

    A format must define ``encode`` and ``decode``. It may define ``for_field`` and
    ``for_leaf``, and must define ``container`` if it stores a moment as several arrays.
    A format with scales is a :class:`BlockMomentFormat`.
    """

    container: typing.ClassVar[type | None] = None
    """The NamedTuple type of a stored moment; None where it is a bare array.

    ``encode`` makes one of arrays; the state holds one of trees of them, with the
    structure of the parameters, for every field of the inner state that has moments.
    """

    def for_field(self, name: str, fields: Set[str]) -> "MomentFormat":
        """The format of the moments in one field of the inner state.

        Args:
          name: the field, such as ``mu`` or ``nu``.
          fields: all fields of the inner state that hold moments.
        """
        del name, fields
        return self

    def for_leaf(self, shape: tuple[int, ...], min_size: int) -> "MomentFormat | None":
        """The format of a leaf of this shape: itself, or None to keep it float32."""
        del shape, min_size
        return self

    def encode(self, moment: jax.Array, draws: Draws, number: int) -> typing.Any:
        """The stored form of a float32 moment.

        Args:
          moment: float32 array of the parameter's shape.
          draws: random numbers of the leaf's moments at this step.
          number: which of the leaf's moments this is.
        """
        raise NotImplementedError

    def decode(self, stored: typing.Any, shape: tuple[int, ...]) -> jax.Array:
        """The float32 moment of its stored form."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class BlockMomentFormat(MomentFormat):
    """Moments as packed codes with a scale per block of neighbours.

    A format must define all of these. A kernel takes the maximum of
    ``codec.magnitude_key`` over each block, makes the block's scale of it, and then
    calls ``encode_fields``; it packs the fields by itself.

    """

    container: typing.ClassVar[type]
    """A NamedTuple type of two fields: the packed codes and the scales."""

    bits: int
    block_size: int

    @property
    def codec(self) -> Code:
        """The code's elementwise functions."""
        raise NotImplementedError

    def encode_fields(
        self,
        moment: jax.Array,
        prepared: Prepared,
        draws: Draws,
        number: int,
        multiply_add: MultiplyAdd = multiply_add,
    ) -> jax.Array:
        """The uint32 fields of ``bits`` bits of moments.

        Args:
          moment: float32.
          prepared: of its blocks' scales, see :meth:`Code.prepare`.
          draws, number: as for :meth:`encode`.
          multiply_add: of three arrays; a kernel's own.
        """
        raise NotImplementedError
