"""What a state has in the places of leaves that keep nothing there.

Trainers read the shape and dtype of each leaf of a state, place it by its parameter's
spec, save it, and map over it beside its parameter. None has no shape and cannot be
mapped beside a parameter, and Orbax refuses arrays of size zero. So zeros of two bytes
are in these places:

    params            residual.tree            mu.scales
    w   bfloat16      uint32 words             bfloat16
    b   float32       int16 zeros              int16 zeros

Their shape is the leaf's up to 256 elements. Of a larger leaf it is one that divides
where meshes divide the parameter, with at most an element for 512 of its own (but 256
at least), and 65,536 in all.

The dtype says whether the leaf is held by a weight format. So a parameter that was cast
since is noticed, also by formats that keep no residuals.

Two bytes, because XLA:TPU stores bfloat16 in taller tiles in programs for a TPU7x that
have an array of bytes in full tiles, and copies all that does not lie like that.

Inside a step there is None in these places, and the blanks of the old state become
those of the new one.
"""

import math

import jax
import jax.numpy as jnp
from jax.core import Tracer

from lowbit_optax.formats.base import Residuals

NOT_HELD = jnp.dtype(jnp.int16)
"""Of the blank of a leaf that the format does not hold: it is float32, or too small."""

NO_RESIDUAL = jnp.dtype(jnp.uint16)
"""Of the blank of a leaf whose weight format keeps no residual of it."""

_FEWEST, _MOST, _SHARE = 256, 2**16, 512


def blank(leaf, dtype: jnp.dtype = NOT_HELD) -> jax.Array:
    """What a state has in the place of a leaf that keeps nothing there."""
    shape = shape_of_blank(leaf.shape)
    return jnp.zeros(shape, dtype, device=_place(leaf, shape))


def _place(leaf, shape: tuple[int, ...]):
    """Where the leaf lies, as far as that is known, if such an array divides there."""
    if not isinstance(leaf, jax.Array):
        return None
    is_traced = isinstance(leaf, Tracer)
    known = jax.typeof(leaf).sharding
    if is_traced and not any(known.spec):
        return None
    place = known if is_traced else leaf.sharding
    if not is_traced and len(place.device_set) == 1:
        return None  # else it is committed there, and the first step is compiled twice
    try:
        place.shard_shape(shape)
    except ValueError:
        return None
    return place


def shape_of_blank(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the blank of a leaf.

    >>> shape_of_blank((63, 65)), shape_of_blank((4096, 1024))
    ((3, 1), (128, 64))
    >>> shape_of_blank((768, 3072)), shape_of_blank((1000, 1024))
    ((96, 48), (8, 128))
    """
    size = math.prod(shape)
    most = min(max(size // _SHARE, _FEWEST), _MOST)
    if size <= most:
        return shape
    # Meshes divide axes by powers of two as a rule, else by three times these.
    cut = [math.gcd(length, 3 << 30) for length in shape]
    while math.prod(cut) > most:
        longest = max(range(len(cut)), key=lambda axis: (cut[axis], axis))
        cut[longest] //= 3 if cut[longest] % 2 else 2
    return tuple(cut)


def is_blank(part, dtype: jnp.dtype = NOT_HELD) -> bool:
    """Whether a part of a state is a blank; None is one, in a state without blanks."""
    return part is None or getattr(part, "dtype", None) == dtype


def residuals_of(name: str | None, treedef, parts, blanks) -> Residuals:
    """The residuals of a state, with these blanks in the places of None."""
    pairs = zip(parts, blanks, strict=True)
    filled = [old if new is None else new for new, old in pairs]
    return Residuals.of(name, treedef.unflatten(filled))
