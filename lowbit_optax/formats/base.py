"""The base classes of weight formats and moment formats.

A weight format stores a float32 master as (param, residual), and a moment format stores
a float32 moment as codes. Both are frozen, hashable dataclasses of static choices, so
that jit and ``optax.inject_hyperparams`` leave them alone.

The engine (:mod:`lowbit_optax._step.engine`) calls the methods of a format leaf by
leaf, with arrays of the leaf's full shape. A kernel calls them with rows of these
arrays, so methods that a kernel calls must be elementwise.

The parameters are the truth. Between two steps a user may set weights, for example to
prune them, to project them or to swap in averages. The residual then belongs to another
weight. So ``join``, ``inner_weight`` and ``advance`` must use the parameter itself
wherever rounding the stored master could not have given it.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.codes import Code, MultiplyAdd, Prepared, multiply_add
from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax._numerics.random_bits import Draws, RandomBits
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._numerics.sums import stochastic_sum

Rounding = typing.Literal["nearest", "stochastic"]

Residual = typing.Any
"""An array; None for a leaf that needs no residual."""

_NO_RESIDUALS = "none"


class Residuals(typing.NamedTuple):
    """The residuals of a state: their tree, by the name of how they are stored.

    The name is in the path of every residual. So a checkpoint of other bits, another
    rounding or another layout is not read as one of these, and
    :func:`lowbit_optax.master_weights` knows the format.

    Args:
      by_name: one tree with the parameters' structure, with blanks
        (:mod:`lowbit_optax._step.blanks`) at leaves without a residual. That of formats
        that keep none has a name too, without which flax would drop another format's
        residuals from a checkpoint.
    """

    by_name: dict[str, typing.Any]

    @classmethod
    def of(cls, name: str | None, tree) -> "Residuals":
        """The residuals of a format with this ``residual_name``."""
        return cls({_NO_RESIDUALS if name is None else name: tree})

    @property
    def name(self) -> str | None:
        """The ``residual_name`` of the format."""
        name = next(iter(self.by_name), _NO_RESIDUALS)
        return None if name == _NO_RESIDUALS else name

    @property
    def tree(self):
        """The tree of residuals."""
        return next(iter(self.by_name.values()), ())


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How masters are stored.

    A format must define ``round``. If it keeps residuals, it must also define
    ``residual_name``, ``init``, ``join`` and ``residual``. If it packs them, it must
    also define ``width`` and ``on_fields``.

    It may define ``split`` and ``store``, if computing the parameter and the residual
    together is cheaper. It may define ``sum_stream`` or ``advance``, with
    ``stores_sum`` false, if adding an update is more than storing the sum. The defaults
    of all other methods are correct for every format.
    """

    reads_stored_moments: typing.ClassVar[bool] = False
    """Whether updates are computed from the rounded moments that are stored."""

    @property
    def residual_name(self) -> str | None:
        """Under which name a state keeps residuals, see :class:`Residuals`."""
        return None

    @property
    def stores_sum(self) -> bool:
        """Whether ``advance`` is just ``store`` of the sum of master and update."""
        return True

    def sum_stream(self, dtype: jnp.dtype) -> int | None:
        """The stream of the words that round the sum in ``advance``.

        With None it is rounded to nearest, by float32's own addition.
        """
        return None

    @property
    def error_feedback(self) -> str | None:
        """The field of the moments that take the errors of storing masters; or None.

        Where there is one, ``stores_sum`` must be false: see
        :mod:`lowbit_optax._step.error_feedback`.
        """
        return None

    def check(self, dtype: jnp.dtype) -> str | None:
        """Why this format cannot hold a leaf of a narrow dtype; None if it can."""
        return None

    def is_exact(self, dtype: jnp.dtype) -> bool:
        """Whether a leaf's masters are stored with all the bits of float32."""
        return False

    def for_leaf(
        self, shape: tuple[int, ...], dtype: jnp.dtype, min_size: int
    ) -> "WeightFormat":
        """The format of one leaf.

        Args:
          shape, dtype: of the leaf.
          min_size: a leaf with fewer elements may get a simpler format.
        """
        return self

    def spare_stream(self, dtype: jnp.dtype) -> int | None:
        """The stream of random words that has bits to spare; None if there is none.

        The format reads at most 24 bits of each word. The leaf's moments may use these
        words too, see :class:`lowbit_optax._numerics.random_bits.Draws`.
        """
        return None

    @property
    def width(self) -> int:
        """Bits per parameter of packed residuals; 0 if residuals are not packed."""
        return 0

    def on_fields(self) -> "WeightFormat":
        """The same format for unpacked residuals: uint32 fields of ``width`` bits."""
        return self

    def widen(self, param: jax.Array) -> jax.Array:
        """The float32 master at the start of training: the parameter itself."""
        return to_float32(param)

    def init(self, param: jax.Array) -> Residual:
        """The residual with which the master equals the parameter."""
        return None

    def join(self, param: jax.Array, residual: Residual) -> jax.Array:
        """The float32 master; the parameter, wherever the residual is not its own."""
        return self.widen(param)

    def inner_weight(self, param: jax.Array, residual: Residual) -> jax.Array:
        """The float32 weight that the inner transformation sees: the master."""
        return self.join(param, residual)

    def round(
        self, master: jax.Array, dtype: jnp.dtype, random: RandomBits
    ) -> jax.Array:
        """The parameter that belongs to a master.

        Args:
          master: float32.
          dtype: of the parameter.
          random: the leaf's random bits; use only its methods, which ``ToNearest`` has.
        """
        raise NotImplementedError

    def residual(
        self, master: jax.Array, param: jax.Array, random: RandomBits
    ) -> Residual:
        """The residual with which ``param`` comes nearest to ``master``.

        Args:
          master: float32.
          param: of the leaf's narrow dtype; not necessarily a rounding of the master.
          random: the leaf's random bits.
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
          update: float32, of param's shape.
          random: the leaf's random bits at this step.
          landing: how the new parameter takes the old one's place, see
            :mod:`lowbit_optax._numerics.landing`.
          ahead: for formats with ``error_feedback``, how far the momentum will still
            move the new master; NaN where the error of rounding it is lost.

        Returns:
          ``(new param, new residual, result)``. The result is what the step returns for
          the leaf: the new parameter, or the update that optax will add.
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
        """The first half of :meth:`advance`: the master with a float32 update."""
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
        """What :meth:`advance` has lost: the update less the master's movement."""
        moved = self.join(new, new_residual) - self.join(param, residual)
        return update - moved

    def store(
        self,
        param: jax.Array,
        master: jax.Array,
        random: RandomBits,
        landing: Landing = REPLACE,
    ) -> tuple[jax.Array, Residual, jax.Array]:
        """The second half of :meth:`advance`: store a master that has been updated."""
        if landing.is_direct:
            new, residual = self.split(master, param.dtype, random)
            return new, residual, new
        new, difference = landing.land(param, self.round(master, param.dtype, random))
        return new, self.residual(master, new, random), difference


def check_rounding(where: str, given: str) -> None:
    """Raise a ValueError that names ``where`` unless ``given`` is a rounding."""
    if given not in typing.get_args(Rounding):
        raise ValueError(f"{where} is {given!r}, not 'nearest' or 'stochastic'")


def rounding_words(
    rounding: str, random: RandomBits | None, shape: tuple[int, ...], stream: int
) -> jax.Array | None:
    """The words that round an array stochastically; None for any other rounding."""
    if rounding != "stochastic" or random is None:
        return None
    return random.words(shape, stream)


@dataclasses.dataclass(frozen=True)
class MomentFormat:
    """How float32 moments are stored.

    A format must define ``encode`` and ``decode``, and ``container`` if it stores a
    moment as several arrays. It may define ``for_field``, ``for_leaf``, ``stored_as``
    and ``reference``. A format with scales is a :class:`BlockMomentFormat`.
    """

    @property
    def stored_as(self) -> str:
        """In words, all that ``decode`` must know: see ``storage_formats``."""
        return repr(self)

    @property
    def container(self) -> type | None:
        """The NamedTuple type of a stored moment; None if it is a single array.

        ``encode`` returns one that holds arrays. For every field of the inner state
        that has moments, the state keeps one that holds trees of arrays, with the
        structure of the parameters.
        """
        return None

    @property
    def reference(self) -> str | None:
        """The field of the same state whose roots divide the moments; None if none do.

        Where there is one, ``encode`` gets, and ``decode`` returns, quotients: see
        :mod:`lowbit_optax._numerics.relative`.
        """
        return None

    def for_field(
        self,
        name: str,
        is_second: bool | None,
        bound: str | None = None,
        is_orthogonalized: bool = False,
    ) -> "MomentFormat":
        """The format of the moments in one field of the inner state.

        Args:
          name: the field, such as ``mu`` or ``nu``.
          is_second: whether they are second moments, which are never negative; None if
            that is not known.
          bound: the field of the same state whose roots are known to bound these
            moments, up to a constant; None if there is none.
          is_orthogonalized: whether all directions of a matrix become equally large in
            its update, as in Muon.
        """
        return self

    def for_sums(self) -> "MomentFormat":
        """The format of sums of gradients, which must keep what is not finite.

        Raises:
          ValueError: if the format holds no negative values.
        """
        return self.for_field("trace", is_second=False)

    def for_leaf(self, shape: tuple[int, ...], min_size: int) -> "MomentFormat | None":
        """The format of a leaf of this shape: itself, or None to keep it float32."""
        return self

    def encode(self, moment: jax.Array, draws: Draws, number: int) -> typing.Any:
        """The stored form of a float32 moment.

        Args:
          moment: float32 array of the parameter's shape.
          draws: the random numbers for the leaf's moments at this step.
          number: which of the leaf's moments this is, counted from 0.
        """
        raise NotImplementedError

    def decode(self, stored: typing.Any, shape: tuple[int, ...]) -> jax.Array:
        """The float32 moment of this shape from its stored form."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class BlockMomentFormat(MomentFormat):
    """Moments as packed codes with a scale per block of neighbours.

    A format must define everything here. A kernel takes the maximum of
    ``codec.magnitude_key`` over each block, computes the block's scale from it, calls
    ``encode_fields``, and packs the fields itself.
    """

    bits: int
    block_size: int

    @property
    def container(self) -> type:
        """A NamedTuple type with two fields: the packed codes and the scales."""
        raise NotImplementedError

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
        """Encode moments whose scales are known.

        Args:
          moment: float32.
          prepared: the scales of its blocks, from :meth:`Code.prepare`.
          draws, number: as for :meth:`encode`.
          multiply_add: computes ``a * b + c`` of three arrays; a kernel passes its own.

        Returns:
          uint32 fields of ``bits`` bits, of the moment's shape.
        """
        raise NotImplementedError
