"""Find the arrays of one optimizer state in the state of a related transformation.

Chains and wrappers nest the state of an optimizer differently. Therefore, an array is
identified by the class of the record that contains it, its field and its parameter:

    adamw                [0].mu['kernel']
    chain(clip, adamw)   [1][0].mu['kernel']              ScaleByAdamState.mu['kernel']
    masked(adamw, mask)  .inner_state[0].mu['kernel']

Adding clipping, a schedule, weight decay or a mask keeps all moments.
"""

import collections
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from lowbit_optax.states.state_leaves import (
    StateLeaf,
    is_scalar_of_the_state,
    state_leaves,
)

_REMEDY = (
    "The moments must be the same, as in kahan_adamw, lowbit_adamw and optax.adamw; "
    "schedules, clipping, weight decay, masks and wrappers may differ. To change the "
    "optimizer, use master_weights and from_master"
)


_COUNTS = frozenset({".count", ".gradient_step", ".step"})
"""Fields that count steps."""

_SUMS = frozenset({"acc_grads", "accumulators"})
"""Fields of wrappers that sum the gradients between two updates."""


class Place(typing.NamedTuple):
    """The place of an array in the record that contains it.

    It does not depend on chains and wrappers around the record.

    Args:
      record: class of the innermost record on the path of the array.
      field: path from the record to the array, without the path of the parameter.
      owner: path of the parameter; None for a count or a hyperparameter.
    """

    record: type | None
    field: str
    owner: str | None


def matched(params, given, wanted, steps, initial: Callable[[list[int]], list]):
    """Return a tree like ``wanted`` with the arrays of ``given`` in their places.

    Scalars and sums of gradients that are missing in ``given`` start with their initial
    values, except that a count continues the first count of ``given``, or ``steps``.
    Arrays of ``given`` are dropped if ``wanted`` has no such sums, or leaves out their
    parameter, for example due to a mask.

    Args:
      params: tree of arrays or ShapeDtypeStructs.
      given: a state whose leaves are arrays or Python scalars.
      wanted: the new state, of ShapeDtypeStructs.
      steps: number of steps that ``given`` has made; None if unknown.
      initial: function of indices that returns the leaves with these indices in a new
        state like ``wanted``.

    Raises:
      ValueError: if only one of the two states keeps a moment.
    """
    held = collections.defaultdict(list)
    for place, leaf in _places(params, given):
        held[place].append(leaf)
    asked = list(_places(params, wanted))
    _check_moments(held, asked)
    steps = _first(held, ".count") or _first(held, ".gradient_step") or steps
    found = []
    for place, want in asked:
        if held[place]:
            found.append(held[place].pop(0).leaf)
        elif place.field in _COUNTS and steps and steps.dtype == want.leaf.dtype:
            found.append(steps.copied())
        else:
            found.append(None)
    missing = [number for number, part in enumerate(found) if part is None]
    for number, part in zip(missing, missing and initial(missing), strict=True):
        found[number] = part
    return jax.tree.unflatten(jax.tree.structure(wanted), found)


def _first(held: Mapping[Place, list[StateLeaf]], field: str):
    """Return the first int32 count with the name ``field``, or None."""
    for place, leaves in held.items():
        # The counts of this package are unsigned, and belong to random numbers.
        if place.field == field and leaves[0].leaf.dtype == jnp.int32:
            return leaves[0].leaf
    return None


def _places(params, state) -> Iterator[tuple[Place, StateLeaf]]:
    """Yield the arrays of a state with their places."""
    for leaf in state_leaves(params, state):
        node, record, field = state, None, leaf.field
        for start, key in enumerate(leaf.field):
            if isinstance(key, jax.tree_util.GetAttrKey):
                record, field = type(node), leaf.field[start:]
                node = getattr(node, key.name)
            elif isinstance(key, jax.tree_util.SequenceKey):
                node = node[key.idx]
            elif isinstance(key, jax.tree_util.DictKey):
                node = node[key.key]
            else:  # a node of a class that registers no names for its children
                break
        owner = leaf.owner
        # If the parameters are one array, its path is empty and ends every path.
        if owner == "" and is_scalar_of_the_state(leaf, params.shape):
            owner = None
        yield Place(record, jax.tree_util.keystr(field), owner), leaf


def _sum_of(leaf: StateLeaf) -> str | None:
    """Return the field of the sums to which a leaf belongs, or None."""
    names = (getattr(key, "name", None) for key in leaf.field)
    return next((name for name in names if name in _SUMS), None)


def _check_moments(held: Mapping[Place, list], asked: Sequence) -> None:
    """Raise a ValueError unless both states have the same moments.

    A parameter that a mask of the new state excludes needs no moments.
    """
    of_asked = collections.defaultdict(list)
    for place, leaf in asked:
        of_asked[place].append(leaf)
    fields = {place[:2] for place in of_asked}
    sums = [
        {_sum_of(x) for same in of.values() for x in same} for of in (held, of_asked)
    ]
    of_both = {None} | (sums[0] & sums[1])
    for place, leaves in [*of_asked.items(), *held.items()]:
        counts = len(held.get(place, ())), len(of_asked.get(place, ()))
        is_left_out = not counts[1] and place[:2] in fields
        is_left_out = is_left_out or _sum_of(leaves[-1]) not in of_both
        if place.owner is None or counts[0] == counts[1] or is_left_out:
            continue
        both = "from_tx", "to_tx"
        has, lacks = both if counts[0] > counts[1] else both[::-1]
        where = jax.tree_util.keystr(leaves[-1].path)
        raise ValueError(
            "convert: from_tx and to_tx must keep the same float32 state, but "
            f"{has} keeps state{where}, which {lacks} does not. {_REMEDY}"
        )
