"""The state of a :func:`lowbit_optax.lowbit` transformation, and its blanks.

A blank is an array of zeros that a state contains for a leaf without stored data.
Trainers read the shape and dtype of each leaf of a state, place it with the partition
spec of its parameter, save it, and map over it together with its parameter. None has no
shape and cannot be mapped with a parameter, and Orbax refuses arrays of size zero.
Therefore, the state contains 16-bit zeros:

    params            residual.tree            mu.scales
    w   bfloat16      uint32 words             bfloat16
    b   float32       int16 zeros              int16 zeros

For a leaf of at most 256 elements, the blank has the shape of the leaf. The blank of a
larger leaf has at most ``max(256, size / 512)`` elements, and never more than 65,536.
Meshes can divide its shape like the shape of the leaf.

The dtype shows whether a weight format stores the leaf. A step can therefore detect
that a parameter was cast, even if its format stores no residuals.

Blanks do not use one byte per element because of XLA:TPU. If a program for a TPU7x
contains an array of bytes in full tiles, XLA stores bfloat16 arrays in taller tiles,
and copies all arrays with a different layout.

Inside a step, these leaves are None. The new state reuses the blanks of the old state.
"""

import math
import typing

import jax
import jax.numpy as jnp
from jax.core import Tracer

from lowbit_optax._step import trees
from lowbit_optax.formats.base import Residuals


class LowbitState(typing.NamedTuple):
    """State of :func:`lowbit`. Its trees have the structure of the parameters.

    Args:
      count: uint32 scalar, the number of completed steps. ``seed`` and ``count``
        determine all random numbers.
      seed: uint32 scalar, a hash of the ``seed`` argument and a checksum of the
        parameters at ``init``. Replace it to draw other random numbers.
      residual: the residuals, with a blank at each leaf that has none.
      inner_state: the state of the inner transformation, with moments in their formats.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    seed: jax.Array
    residual: Residuals
    inner_state: typing.Any


def holds_lowbit(state) -> bool:
    """Return whether an optimizer state contains a :class:`LowbitState`."""
    return bool(trees.all_of(LowbitState, state))


def check_made_by(what: str, tx, params, state) -> None:
    """Raise a ValueError unless the wrappers of a transformation made a state.

    Errors about a :class:`LowbitState` inside the wrappers name its leaves.

    Args:
      what: the name of ``tx`` in the message.
      tx, params: the transformation, and its parameters.
      state: the state that the user passed.
    """
    is_own = lambda x: isinstance(x, LowbitState)
    hidden = lambda tree: jax.tree.map(lambda _: 0, tree, is_leaf=is_own)
    made = jax.eval_shape(lambda params: tx.init(params), trees.abstract(params))
    if jax.tree.structure(hidden(state)) == jax.tree.structure(hidden(made)):
        return
    where = trees.first_difference(trees.named_leaves(hidden(made))[0], hidden(state))
    # Without the original error, which prints all arrays of the state.
    raise ValueError(
        f"{what} must have made the state for these params: its init returns "
        f"{trees.outline(made)}, got {trees.outline(state)} ({where})"
    ) from None


NOT_HELD = jnp.dtype(jnp.int16)
"""The dtype of blanks at leaves without a format, which are float32 or too small."""

NO_RESIDUAL = jnp.dtype(jnp.uint16)
"""The dtype of blanks at leaves whose weight format stores no residual."""

_FEWEST, _MOST, _SHARE = 256, 2**16, 512


def blank(leaf, dtype: jnp.dtype = NOT_HELD) -> jax.Array:
    """Return the zeros that stand for an array that a leaf does not need."""
    shape = shape_of_blank(leaf.shape)
    return jnp.zeros(shape, dtype, device=_place(leaf, shape))


def _place(leaf, shape: tuple[int, ...]):
    """Return the sharding of a leaf if it is known and divides ``shape``, or None."""
    if not isinstance(leaf, jax.Array):
        return None
    is_traced = isinstance(leaf, Tracer)
    known = jax.typeof(leaf).sharding
    if is_traced and not any(known.spec):
        return None
    place = known if is_traced else leaf.sharding
    if not is_traced and len(place.device_set) == 1:
        return None  # a committed array would make JAX compile the first step twice
    try:
        place.shard_shape(shape)
    except ValueError:
        return None
    return place


def shape_of_blank(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the blank of a leaf.

    >>> shape_of_blank((63, 65)), shape_of_blank((4096, 1024))
    ((3, 1), (128, 64))
    >>> shape_of_blank((768, 3072)), shape_of_blank((1000, 1024))
    ((96, 48), (8, 128))
    """
    size = math.prod(shape)
    most = min(max(size // _SHARE, _FEWEST), _MOST)
    if size <= most:
        return shape
    # Meshes usually divide axes by powers of two, or by three times a power of two.
    cut = [math.gcd(length, 3 << 30) for length in shape]
    while math.prod(cut) > most:
        longest = max(range(len(cut)), key=lambda axis: (cut[axis], axis))
        cut[longest] //= 3 if cut[longest] % 2 else 2
    return tuple(cut)


def is_blank(part, dtype: jnp.dtype = NOT_HELD) -> bool:
    """Return whether a part of a state is None or a blank with the given dtype."""
    return part is None or getattr(part, "dtype", None) == dtype


def residuals_of(name: str | None, treedef, parts, blanks, dtypes) -> Residuals:
    """Return the residuals of a state, with the given blanks instead of None."""
    pairs = zip(parts, blanks, strict=True)
    filled = [old if new is None else new for new, old in pairs]
    return Residuals.of(name, treedef.unflatten(filled), dtypes)
