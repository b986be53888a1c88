"""The base classes of weight formats and moment formats.

A weight format stores a float32 master as a narrow parameter and a residual. A moment
format stores a float32 moment as codes. Formats are frozen, hashable dataclasses of
static values, so ``jax.jit`` and ``optax.inject_hyperparams`` treat them as constants.

The engine (:mod:`lowbit_optax._step.engine`) calls the methods of a format with whole
leaves. A kernel calls them with rows of a leaf, so methods that a kernel calls must be
elementwise.

You may change parameters between two steps, for example to prune them, to project them
or to replace them with averages. The residuals then no longer match. Therefore,
``join``, ``inner_weight`` and ``advance`` must ignore the residual of an element if
rounding the stored master could not have produced its parameter.
"""

import dataclasses
import typing
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax._numerics.random_bits import Draws, RandomBits
from lowbit_optax._numerics.rounding import stochastic_sum, to_float32

Rounding = typing.Literal["nearest", "stochastic"]

Residual = typing.Any
"""An array, or None if a leaf has no residual."""

_NO_RESIDUALS = "none"
_IN = "_in_"
_UNNAMED = frozenset({"bfloat16"})


class Residuals(typing.NamedTuple):
    """The residuals of a state, with a name for the way they are stored.

    The name is in the path of every residual. It prevents restoring a checkpoint of
    another format, and tells :func:`lowbit_optax.master_weights` the format. The dtypes
    of the parameters follow the name, unless all are bfloat16.

    Args:
      by_name: maps the name to a tree with the structure of the parameters. Leaves
        without a residual have blanks (:mod:`lowbit_optax._step.state`). Formats
        without residuals also have a name, because flax would otherwise drop the
        residuals of another format when it restores a checkpoint.
    """

    by_name: dict[str, typing.Any]

    @classmethod
    def of(cls, name: str | None, tree, dtypes: Iterable[str] = ()) -> "Residuals":
        """Return the residuals of a format with this ``residual_name``.

        ``dtypes`` are the names of the dtypes of the parameters that have residuals.
        """
        if name is None:
            return cls({_NO_RESIDUALS: tree})
        others = () if set(dtypes) <= _UNNAMED else sorted(dtypes)
        return cls({_IN.join([name, *others]): tree})

    @property
    def name(self) -> str | None:
        """The ``residual_name`` of the format."""
        name = next(iter(self.by_name), _NO_RESIDUALS).split(_IN)[0]
        return None if name == _NO_RESIDUALS else name

    @property
    def dtypes(self) -> frozenset[str]:
        """The names of the dtypes of the parameters that have residuals."""
        _, *names = next(iter(self.by_name), "").split(_IN)
        return frozenset(names) or _UNNAMED

    @property
    def tree(self):
        """The tree of residuals."""
        return next(iter(self.by_name.values()), ())


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """Base class of formats that store float32 master weights.

    A format must define ``round``. If it stores residuals, it must also define
    ``residual_name``, ``init``, ``join`` and ``residual``. If it packs them, it must
    also define ``width`` and ``on_fields``.

    It may define ``split`` and ``store`` if it is cheaper to compute the parameter and
    the residual together. If an update is more than a float32 addition, it may define
    ``sum_stream``, or define ``advance`` and let ``stores_sum`` return False. The
    defaults of all other methods are correct for every format.
    """

    @property
    def reads_stored_moments(self) -> bool:
        """Whether the update is computed from moments after they are rounded."""
        return False

    @property
    def residual_name(self) -> str | None:
        """The name of the residuals in a state, or None; see :class:`Residuals`."""
        return None

    @property
    def stores_sum(self) -> bool:
        """Whether ``advance`` calls ``store`` with the sum of master and update."""
        return True

    def sum_stream(self, dtype: jnp.dtype) -> int | None:
        """Return the stream of random words that round the sum in ``advance``.

        If None, the sum is a float32 addition, which rounds to nearest.
        """
        return None

    @property
    def error_feedback(self) -> str | None:
        """The field of the moment that receives rounding errors of weights, or None.

        If it is not None, ``stores_sum`` must be False; see
        :mod:`lowbit_optax._step.error_feedback`.
        """
        return None

    def check(self, dtype: jnp.dtype) -> str | None:
        """Return why this format does not support a dtype, or None if it does."""
        return None

    def is_exact(self, dtype: jnp.dtype) -> bool:
        """Return whether masters are stored with all bits of float32."""
        return False

    def for_leaf(
        self, shape: tuple[int, ...], dtype: jnp.dtype, min_size: int
    ) -> "WeightFormat":
        """Return the format for one leaf.

        Args:
          shape, dtype: shape and dtype of the leaf.
          min_size: a leaf with fewer elements may get a simpler format.
        """
        return self

    def spare_stream(self, dtype: jnp.dtype) -> int | None:
        """Return the stream of random words that have unused bits, or None.

        The format reads at most 24 bits of each word. The leaf's moments may use these
        words too; see :class:`lowbit_optax._numerics.random_bits.Draws`.
        """
        return None

    @property
    def width(self) -> int:
        """Bits per parameter of packed residuals, or 0 if residuals are not packed."""
        return 0

    def on_fields(self) -> "WeightFormat":
        """Return the format for unpacked residuals: uint32 fields of ``width`` bits."""
        return self

    def widen(self, param: jax.Array) -> jax.Array:
        """Return the float32 master at the start of training: the parameter itself."""
        return to_float32(param)

    def init(self, param: jax.Array) -> Residual:
        """Return the residual of a master that equals the parameter."""
        return None

    def join(self, param: jax.Array, residual: Residual) -> jax.Array:
        """Return the float32 master, or the parameter where the residual is stale."""
        return self.widen(param)

    def inner_weight(self, param: jax.Array, residual: Residual) -> jax.Array:
        """Return the weight that the inner transformation receives: the master."""
        return self.join(param, residual)

    def round(
        self, master: jax.Array, dtype: jnp.dtype, random: RandomBits
    ) -> jax.Array:
        """Round a master to the parameter that stores it.

        Args:
          master: float32 array.
          dtype: dtype of the parameter.
          random: random bits of the leaf. Formats may call only the methods that
            ``ToNearest`` also has.
        """
        raise NotImplementedError

    def residual(
        self, master: jax.Array, param: jax.Array, random: RandomBits
    ) -> Residual:
        """Return the residual with which ``join`` comes closest to ``master``.

        Args:
          master: float32 array.
          param: array in the leaf's narrow dtype, not necessarily a rounded master.
          random: random bits of the leaf.
        """
        return None

    def split(
        self, master: jax.Array, dtype: jnp.dtype, random: RandomBits
    ) -> tuple[jax.Array, Residual]:
        """Split a master into (param, residual)."""
        param = self.round(master, dtype, random)
        return param, self.residual(master, param, random)

    def advance(
        self,
        param: jax.Array,
        residual: Residual,
        update: jax.Array,
        random: RandomBits,
        landing: Landing = REPLACE,
        ahead: jax.Array | None = None,
    ) -> tuple[jax.Array, Residual, jax.Array]:
        """Add a float32 update to the master.

        Args:
          param: the leaf, in its narrow dtype.
          residual: the leaf's residual from the state.
          update: float32 array with the shape of ``param``.
          random: random bits of the leaf at this step.
          landing: how the new parameter replaces the old one; see
            :mod:`lowbit_optax._numerics.landing`.
          ahead: for formats with ``error_feedback``, the distance that the momentum
            will still move the new master, or 0 or NaN if errors are not fed back.

        Returns:
          ``(new param, new residual, result)``. The result is the value that the step
          returns for the leaf: the new parameter, or the update that optax will add.
        """
        master = self.sum(param, residual, update, random)
        return self.store(param, master, random, landing)

    def sum(
        self,
        param: jax.Array,
        residual: Residual,
        update: jax.Array,
        random: RandomBits,
    ) -> jax.Array:
        """Return the master plus the update; the first half of :meth:`advance`."""
        master, stream = self.join(param, residual), self.sum_stream(param.dtype)
        if stream is None:
            return master + update
        return stochastic_sum(master, update, random.words(param.shape, stream))

    def error(
        self,
        param: jax.Array,
        residual: Residual,
        update: jax.Array,
        new: jax.Array,
        new_residual: Residual,
    ) -> jax.Array:
        """Return the update minus the change of the master in :meth:`advance`."""
        moved = self.join(new, new_residual) - self.join(param, residual)
        return update - moved

    def store(
        self,
        param: jax.Array,
        master: jax.Array,
        random: RandomBits,
        landing: Landing = REPLACE,
    ) -> tuple[jax.Array, Residual, jax.Array]:
        """Store an updated master; the second half of :meth:`advance`."""
        if landing.is_direct:
            new, residual = self.split(master, param.dtype, random)
            return new, residual, new
        new, difference = landing.land(param, self.round(master, param.dtype, random))
        return new, self.residual(master, new, random), difference


def rounding_words(
    rounding: str, random: RandomBits, shape: tuple[int, ...], stream: int
) -> jax.Array | None:
    """Return the words for stochastic rounding, or None for other rounding modes."""
    return random.words(shape, stream) if rounding == "stochastic" else None


@dataclasses.dataclass(frozen=True)
class MomentFormat:
    """Base class of formats that store float32 moments.

    A format must define ``smallest_share``, ``encode`` and ``decode``. It may define
    ``for_field``, ``for_leaf`` and ``stored_as``. The root of a second moment divides
    updates, so a format with scales must not round a positive second moment to 0.
    Without scales, ``lowbit`` refuses second moments in formats without small values.
    """

    has_scales: typing.ClassVar[bool] = False
    """Whether it stores each moment as a :class:`.QuantizedMoment`."""

    @property
    def stored_as(self) -> str:
        """A description of all that ``decode`` depends on; see ``storage_formats``."""
        return repr(self)

    @property
    def container(self) -> typing.Any:
        """The class of its moments in a state, if it has scales."""
        raise NotImplementedError

    @property
    def smallest_share(self) -> float:
        """The smallest positive value that it stores next to a value of 1."""
        raise NotImplementedError

    def for_field(
        self, name: str, is_second: bool | None, is_orthogonalized: bool = False
    ) -> "MomentFormat":
        """Return the format of the moments in one field of the inner state.

        Args:
          name: name of the field, such as ``mu`` or ``nu``.
          is_second: whether the field has second moments, which are never negative, or
            None if this is unknown.
          is_orthogonalized: whether the update of a matrix has the same size in all
            directions, as in Muon.
        """
        return self

    def for_sums(self) -> "MomentFormat":
        """Return the format for sums of gradients, which keeps infinities and NaNs.

        Raises:
          ValueError: if the format cannot store negative values.
        """
        return self.for_field("sum of gradients", is_second=False)

    def for_leaf(self, shape: tuple[int, ...], min_size: int) -> "MomentFormat | None":
        """Return the format for a leaf of this shape, or None for float32."""
        return self

    def encode(self, moment: jax.Array, draws: Draws, number: int) -> typing.Any:
        """Return the stored form of a float32 moment.

        Args:
          moment: float32 array with the shape of the parameter.
          draws: random numbers for the leaf's moments at this step.
          number: index of this moment among the leaf's moments.
        """
        raise NotImplementedError

    def decode(self, stored: typing.Any, shape: tuple[int, ...]) -> jax.Array:
        """Return the float32 moment of this shape from its stored form."""
        raise NotImplementedError
