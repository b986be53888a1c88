"""Quantised moments as the state keeps them: parallel trees of codes and of scales.

    from ``encode``, per leaf:  nu = {"w": (codes, scales), "b": float32}
    in the state:               nu = ({"w": codes, "b": float32},
                                      {"w": scales, "b": None})

Each of the parallel trees has the parameters' structure, which is what
``optax.tree.map_params``, shardings and checkpoints can handle.
"""

from collections.abc import Sequence

from lowbit_optax._step import trees
from lowbit_optax.formats.base import MomentFormat
from lowbit_optax.formats.block_quantized import QuantizedMoment, RelativeMoment

_CONTAINERS = (QuantizedMoment, RelativeMoment)


def to_parallel_trees(format_: MomentFormat | None, treedef, parts: Sequence):
    """The moments of one slot as the state keeps them.

    Args:
      format_: the slot's moment format.
      treedef: the slot's structure.
      parts: per leaf, the result of the format's ``encode``, or the uncoded array of a
        leaf that the format leaves alone.

    Returns:
      One tree; or, if the format stores a moment as several arrays, a container of
      trees, in which ``scales`` is None at the uncoded leaves.
    """
    if format_ is None or format_.container is None:
        return treedef.unflatten(parts)
    pairs = [x if is_quantized_moment(x) else wrap_uncoded(format_, x) for x in parts]
    return format_.container(
        treedef.unflatten(x.codes for x in pairs),
        treedef.unflatten(x.scales for x in pairs),
    )


def from_parallel_trees(slot):
    """The inverse of :func:`to_parallel_trees`, with a container at every leaf.

    Uncoded leaves are in the form that :func:`wrap_uncoded` gives them. A slot that is
    not a container is returned as it is.
    """
    if not is_quantized_moment(slot):
        return slot
    names, codes, treedef = trees.named_leaves(slot.codes)
    scales = trees.parts_of(names, treedef, slot.scales, "scales")
    return treedef.unflatten(map(type(slot), codes, scales))


def wrap_uncoded(format_: MomentFormat | None, x):
    """An uncoded array in the container that the coded leaves of its slot have."""
    if format_ is None or format_.container is None:
        return x
    return format_.container(x, None)


def unwrap_uncoded(part):
    """The inverse of :func:`wrap_uncoded`; anything else is returned as it is."""
    return part.codes if is_quantized_moment(part) and part.scales is None else part


def is_quantized_moment(x) -> bool:
    """Whether ``x`` is a moment in several arrays, or a slot of such moments."""
    return isinstance(x, _CONTAINERS)
