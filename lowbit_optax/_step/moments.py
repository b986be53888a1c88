"""Finds the moments in an inner transformation's state and stores them in a format.

A moment is a float32 array of a parameter's shape, at that parameter's place in a tree
that the inner ``init`` built like the parameters: ``mu``, ``nu``, ``trace``. Where such
trees are is what ``optax.tree.map_params`` knows; the name is the state's field.
Formats work leaf by leaf; :mod:`lowbit_optax._step.moment_trees` has how the state
keeps what they make.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Set

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._step.moment_trees import (
    by_leaf,
    in_trees,
    is_container,
    kept_as_it_is,
    without_container,
)
from lowbit_optax._step.stacks import layerwise
from lowbit_optax.formats.base import MomentFormat

# The streams before are the weight formats'.
_FIRST_STREAM = 2

Moments = (
    MomentFormat
    | typing.Literal["float32"]
    | Mapping[str, MomentFormat | typing.Literal["float32"]]
    | None
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Slot:
    """A param-like subtree of the inner state; not a pytree node, so a leaf."""

    tree: typing.Any
    format: MomentFormat | None = None


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a moment is stored: of which leaf, in what format, and as which of them."""

    leaf: str
    format: MomentFormat
    number: int


def draws_for_moments(random: RandomBits) -> RandomBits:
    """A leaf's random bits, at the streams that its moments use."""
    return dataclasses.replace(random, stream=_FIRST_STREAM)


@dataclasses.dataclass(frozen=True)
class MomentPlan:
    """Which leaves of an inner state are stored in which format.

    Args:
      inner: the wrapped transformation.
      moments: one format for every moment, or a mapping from state field to format.
      names, params: paths and leaves of the parameters.
      expected: the inner state before encoding, as ShapeDtypeStructs.
      min_size: leaves with fewer elements may be kept in float32.
    """

    inner: optax.GradientTransformation
    moments: Moments
    names: list[str]
    params: list[jax.Array]
    expected: typing.Any
    min_size: int = 4096

    def encode(self, state, random: list[RandomBits], done: Set[int] = frozenset()):
        """The inner state with its moments in their formats.

        Args:
          state: with moments in float32.
          random: the leaves' random bits.
          done: numbers of the parts that are stored as they are: they are encoded.
        """
        if not self.moments:
            return state
        draws = {
            name: draws_for_moments(bits)
            for name, bits in zip(self.names, random, strict=True)
        }
        treedef = jax.tree.structure(self.expected)
        parts = treedef.flatten_up_to(state)
        described = treedef.flatten_up_to(self.describe(state))
        encoded = treedef.unflatten(
            part if how is None or i in done else _encode(how, part, draws[how.leaf])
            for i, (part, how) in enumerate(zip(parts, described, strict=True))
        )

        def slot_in_trees(slot, tree):
            structure = jax.tree.structure(slot.tree)
            return in_trees(slot.format, structure, structure.flatten_up_to(tree))

        return self._map_slots(slot_in_trees, encoded)

    def by_leaf(self, state):
        """The stored inner state with each moment's arrays together at its leaf."""
        if not self.moments:
            return state

        def slot_by_leaf(slot, stored):
            del slot
            parts = by_leaf(stored)
            return jax.tree.map(without_container, parts, is_leaf=is_container)

        return self._map_slots(slot_by_leaf, state)

    def describe(self, state):
        """How each part of a decoded inner state is stored.

        Returns:
          A tree like ``state`` with a :class:`Stored` for every moment that has a
          format, and None elsewhere.
        """
        nothing = lambda _: None
        if not self.moments:
            return jax.tree.map(nothing, state)
        numbers = {}

        def describe(name, format_, part, like):
            if format_ is None:
                return None
            number = numbers[name] = numbers.get(name, -1) + 1
            return Stored(name, format_, number)

        return self._map_slots(
            lambda slot, tree: self._map_moments(describe, slot, tree, nothing),
            state,
            nothing,
        )

    def decode(self, state):
        """The inner state with its moments in float32.

        Raises:
          ValueError: if the state was stored in another format.
        """
        if not self.moments:
            self._check_plain(state)
            return state

        def decode(slot, name, format_, stored, like):
            want = kept_as_it_is(slot.format, like)
            if format_ is not None:
                want = _stored_like(format_, like.shape)
            if _text(stored) != _text(want):
                raise ValueError(
                    f"moment of params{name} is {_text(stored)}, but "
                    f"{slot.format or 'no format'} stores {_text(want)}: was this "
                    "state made by a transformation with other moments?"
                )
            if format_ is None:
                return without_container(stored)
            return layerwise(lambda x: format_.decode(x, like.shape), stored)

        return self._map_slots(
            lambda slot, stored: self._map_moments(
                functools.partial(decode, slot),
                slot,
                by_leaf(stored),
                without_container,
            ),
            state,
        )

    def _check_plain(self, state):
        # Without formats the inner transformation's init need not take optax's
        # placeholders, so moments are told by dtype alone.
        def flatten(tree):
            tree = jax.tree.map(by_leaf, tree, is_leaf=is_container)
            return jax.tree_util.tree_flatten_with_path(tree, is_container)

        stored, structure = flatten(state)
        wanted, expected = flatten(self.expected)
        if structure != expected:
            return  # the inner transformation's own matter
        for (path, part), (_, want) in zip(stored, wanted, strict=True):
            if getattr(want, "dtype", None) != jnp.float32:
                continue
            if _text(part) != _text(want):
                raise ValueError(
                    f"moment {jax.tree_util.keystr(path)} is {_text(part)}, but "
                    f"without moment formats it is {_text(want)}: was this state made "
                    "by a transformation with other moments?"
                )

    def _map_slots(self, fn, state, other=lambda part: part):
        """``fn(slot, part)`` at every slot, ``other(part)`` elsewhere in a state."""

        def visit(slot, part):
            return fn(slot, part) if isinstance(slot, _Slot) else other(part)

        return jax.tree.map(visit, self._slots, state)

    def _map_moments(self, fn, slot: _Slot, tree, other):
        """``fn(name, format, part, expected leaf)`` on every moment of a slot.

        ``other`` is for the slot's parts that are no moments.
        """
        shapes = {
            name: leaf.shape for name, leaf in zip(self.names, self.params, strict=True)
        }

        def leaf(path, like, part):
            name = jax.tree_util.keystr(path)
            if like.dtype != jnp.float32 or shapes.get(name) != like.shape:
                return other(part)
            stored = slot.format and slot.format.for_leaf(like.shape, self.min_size)
            return fn(name, stored, part, like)

        return jax.tree_util.tree_map_with_path(leaf, slot.tree, tree)

    @functools.cached_property
    def _slots(self):
        """The expected state with its slots as leaves, each with its field's format."""
        slots = optax.tree.map_params(
            self.inner, _Slot, self.expected, is_leaf=lambda _: True
        )
        leaves, treedef = jax.tree_util.tree_flatten_with_path(slots)
        fields = {_field_of(path) for path, x in leaves if isinstance(x, _Slot)}
        if isinstance(self.moments, Mapping):
            unknown = sorted(set(self.moments) - fields)
            if unknown:
                raise ValueError(
                    f"moments names {unknown[0]!r}, but the inner transformation's "
                    f"state has these moments: {sorted(fields)}"
                )

        def with_format(path, leaf):
            if not isinstance(leaf, _Slot):
                return leaf
            field = _field_of(path)
            format_ = self._format(field)
            if format_ is not None:
                format_ = format_.for_field(field, fields)
            return _Slot(leaf.tree, format_)

        return treedef.unflatten(with_format(path, leaf) for path, leaf in leaves)

    def _format(self, field: str) -> MomentFormat | None:
        if isinstance(self.moments, Mapping):
            return self.moments.get(field)
        return self.moments


def _encode(how: Stored, moment: jax.Array, random: RandomBits):
    return layerwise(lambda x: how.format.encode(x, random, how.number), moment)


@functools.lru_cache(maxsize=4096)
def _stored_like(format_: MomentFormat, shape: tuple[int, ...]):
    def encode(moment, seed):
        return format_.encode(moment, RandomBits(seed, seed), 0)

    scalar = jax.ShapeDtypeStruct((), jnp.uint32)
    return jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32), scalar)


def _text(stored) -> str:
    """A stored moment's dtypes and shapes, as errors show them and to compare."""
    if isinstance(stored, tuple) and hasattr(stored, "_asdict"):
        parts = (f"{key}: {_text(part)}" for key, part in stored._asdict().items())
        return f"{type(stored).__name__}({', '.join(parts)})"
    if stored is None:
        return "none"
    if not hasattr(stored, "dtype"):
        return f"a {type(stored).__name__}"
    return f"{stored.dtype}{list(stored.shape)}"


def _field_of(path) -> str:
    """The innermost named field of a path: ``mu`` of ``[0].mu``."""
    for key in reversed(path):
        if isinstance(key, jax.tree_util.GetAttrKey):
            return key.name
        if isinstance(key, jax.tree_util.DictKey):
            return str(key.key)
    return ""
