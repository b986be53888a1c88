"""Parallel trees of what a format makes of moments, instead of a container at each.

    encode, leaf by leaf: nu = {"w": (codes, scales), "b": float32}
    in the state:         nu = ({"w": codes, "b": float32}, {"w": scales, "b": None})

Each of the trees has the parameters' structure. That is what ``optax.tree.map_params``,
shardings and checkpoints know to treat.
"""

from collections.abc import Sequence

from lowbit_optax._step import trees
from lowbit_optax.formats.base import MomentFormat
from lowbit_optax.formats.block_quantized import QuantizedMoment


def to_parallel_trees(format_: MomentFormat | None, treedef, parts: Sequence):
    """A slot's moments as the state keeps them.

    Args:
      format_: of the slot.
      treedef: the slot's structure.
      parts: by leaf, what a format's ``encode`` made of it; what is kept as it is.

    Returns:
      One tree, or a container of trees, in which ``scales`` are None at the leaves that
      are kept as they are.
    """
    if not _has_container(format_):
        return treedef.unflatten(parts)
    pairs = [x if is_quantized_moment(x) else wrap_uncoded(format_, x) for x in parts]
    return QuantizedMoment(
        treedef.unflatten(x.codes for x in pairs),
        treedef.unflatten(x.scales for x in pairs),
    )


def from_parallel_trees(slot):
    """The other way round: a container at every leaf of a slot that has containers."""
    if not is_quantized_moment(slot):
        return slot
    names, codes, treedef = trees.named_leaves(slot.codes)
    scales = trees.parts_of(names, treedef, slot.scales, "scales")
    return treedef.unflatten(map(QuantizedMoment, codes, scales))


def wrap_uncoded(format_: MomentFormat | None, x):
    """What :func:`from_parallel_trees` gives at a leaf that the slot's format leaves alone."""
    return QuantizedMoment(x, None) if _has_container(format_) else x


def unwrap_uncoded(part):
    """``x`` of :func:`wrap_uncoded`; other parts of :func:`from_parallel_trees` as they are."""
    return part.codes if is_quantized_moment(part) and part.scales is None else part


def is_quantized_moment(x) -> bool:
    """Whether it is a moment in several arrays, or a slot of such moments."""
    return isinstance(x, QuantizedMoment)


def _has_container(format_: MomentFormat | None) -> bool:
    return format_ is not None and format_.container is not None
