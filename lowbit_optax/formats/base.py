"""What a weight format and a moment format are.

A weight format says how a float32 master is kept as (param, residual); a moment format
how a float32 moment is kept as codes. Both are frozen, hashable dataclasses that hold
static choices only, so that jit and ``optax.inject_hyperparams`` leave them alone.

The engine (:mod:`lowbit_optax._step.engine`) calls a weight format's methods leaf by
leaf, with arrays of the leaf's full shape. A residual is None for a leaf that needs
none.
"""

import dataclasses
import typing
from collections.abc import Callable, Set

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.landing import stay
from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._numerics.rounding import to_float32

Land = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How masters are stored. Subclasses define ``join``, ``round`` and ``residual``.

    ``container`` is the NamedTuple type that holds the tree of residuals in
    ``LowbitState``. It is part of the state's structure: that is how
    :func:`lowbit_optax.master_weights` knows the format without being told, and how a
    checkpoint of another format is noticed.
    """

    container: typing.ClassVar[type]

    stores_sum: typing.ClassVar[bool] = True
    """Whether ``advance`` is ``store`` of the sum of master and update."""

    def check(self, dtype: jnp.dtype) -> str | None:
        """Why a leaf of this narrow dtype cannot be held, or None if it can."""
        del dtype
        return None

    def for_leaf(
        self, shape: tuple[int, ...], dtype: jnp.dtype, min_size: int
    ) -> "WeightFormat":
        """The format of a leaf of this shape: itself, or a simpler one if too small."""
        del shape, dtype, min_size
        return self

    def residual_random_bits(self, dtype: jnp.dtype) -> int:
        """How many leading bits of ``RESIDUAL_STREAM``'s words it reads, at most."""
        del dtype
        return 32

    @property
    def width(self) -> int:
        """Bits a parameter of packed residuals; 0 where they are not packed."""
        return 0

    def on_fields(self) -> "WeightFormat":
        """The same format on unpacked residuals, uint32 fields of ``width`` bits."""
        return self

    def widen(self, param: jax.Array) -> jax.Array:
        """The float32 master at the start of training: the parameter itself."""
        return to_float32(param)

    def init(self, param: jax.Array) -> jax.Array | None:
        """The residual with which the master is the parameter itself."""
        del param
        return None

    def join(self, param: jax.Array, residual: jax.Array | None) -> jax.Array:
        """The float32 master."""
        del residual
        return self.widen(param)

    def inner_weight(self, param: jax.Array, residual: jax.Array | None) -> jax.Array:
        """The float32 weight that the inner transformation sees: the master."""
        return self.join(param, residual)

    def round(
        self, master: jax.Array, dtype: jnp.dtype, random: RandomBits | None
    ) -> jax.Array:
        """The parameter of a master."""
        raise NotImplementedError

    def residual(
        self, master: jax.Array, param: jax.Array, random: RandomBits | None
    ) -> jax.Array | None:
        """What belongs to ``param`` so that both come nearest to ``master``."""
        del master, param, random
        return None

    def split(
        self, master: jax.Array, dtype: jnp.dtype, random: RandomBits | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """A master as (param, residual)."""
        param = self.round(master, dtype, random)
        return param, self.residual(master, param, random)

    def advance(
        self,
        param: jax.Array,
        residual: jax.Array | None,
        update: jax.Array,
        random: RandomBits | None,
        land: Land = stay,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Add a float32 update to the master.

        Args:
          param: the leaf, in its narrow dtype.
          residual: what the state holds for it.
          update: float32, of param's shape.
          random: the leaf's random bits at this step.
          land: takes (old, new) param to (the one that will be there, the update that
            gets it there), see :mod:`lowbit_optax._numerics.landing`.

        Returns:
          ``(new param, new residual, landing update)``.
        """
        return self.store(param, self.join(param, residual) + update, random, land)

    def store(
        self,
        param: jax.Array,
        master: jax.Array,
        random: RandomBits | None,
        land: Land = stay,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """The second half of :meth:`advance`: store a master that was updated."""
        if land is stay:
            new, residual = self.split(master, param.dtype, random)
            return new, residual, new
        new, difference = land(param, self.round(master, param.dtype, random))
        return new, self.residual(master, new, random), difference


@dataclasses.dataclass(frozen=True)
class MomentFormat:
    """How float32 moments are stored. Subclasses define ``encode`` and ``decode``.

    A moment is stored as one array, or as several in a ``container``.
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

    def encode(self, moment: jax.Array, random: RandomBits | None, number: int):
        """The stored form of a float32 moment.

        Args:
          moment: float32 array of the parameter's shape.
          random: the leaf's random bits at this step.
          number: which of the leaf's moments this is, for independent random bits.
        """
        raise NotImplementedError

    def decode(self, stored, shape: tuple[int, ...]) -> jax.Array:
        """The float32 moment of its stored form."""
        raise NotImplementedError
