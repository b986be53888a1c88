"""Functions that convert lists of stored moments to parallel trees of their arrays.

:class:`.moments.MomentPlan` converts the moments of one field of the inner state.
"""

import typing
from collections.abc import Sequence

from lowbit_optax._step import trees
from lowbit_optax._step.blanks import blank, is_blank
from lowbit_optax.formats.base import MomentFormat
from lowbit_optax.formats.block_quantized import QuantizedMoment


def in_parallel_trees(
    format_: MomentFormat | None, treedef, parts: Sequence, before: typing.Any = None
):
    """Return the moments of one field as the state stores them.

    Each part is a result of the format's ``encode``, or an unencoded array. If the
    format has scales, the result is a QuantizedMoment of trees, and its ``scales``
    contain a blank for each unencoded array. These blanks come from ``before`` if it is
    a QuantizedMoment.
    """
    if format_ is None or not format_.has_scales:
        return treedef.unflatten(parts)
    if isinstance(before, QuantizedMoment):
        blanks = treedef.flatten_up_to(before.scales)
    else:
        blanks = [blank(x) if hasattr(x, "shape") else None for x in parts]
    pairs = [
        x if isinstance(x, QuantizedMoment) else QuantizedMoment(x, old)
        for x, old in zip(parts, blanks, strict=True)
    ]
    return format_.container(
        treedef.unflatten(x.codes for x in pairs),
        treedef.unflatten(x.scales for x in pairs),
    )


def leaf_by_leaf(names: Sequence[str], treedef, stored, what: str) -> list:
    """Invert :func:`in_parallel_trees`; an unencoded array is in a QuantizedMoment."""
    if not isinstance(stored, QuantizedMoment):
        return trees.parts_of(names, treedef, stored, what)
    codes = trees.parts_of(names, treedef, stored.codes, "codes")
    scales = trees.parts_of(names, treedef, stored.scales, "scales")
    return [
        QuantizedMoment(x, None if is_blank(scale) else scale)
        for x, scale in zip(codes, scales, strict=True)
    ]


def check_container(format_: MomentFormat | None, stored, what: str) -> None:
    """Raise a ValueError unless the moments of one field are stored in this format.

    The message begins with ``what``.
    """
    if format_ is None or not format_.has_scales:
        return
    want, given = format_.container._fields, getattr(stored, "_fields", [type(stored)])
    if want != given:
        raise ValueError(
            f"{what} must be stored as {want[0]}, got {given[0]}. Use the "
            "transformation that made this state, or move the state to this format "
            "with lowbit_optax.convert"
        )


def uncontained(part):
    """Return a stored moment, without its QuantizedMoment if it has no scales."""
    return part.codes if getattr(part, "scales", part) is None else part
