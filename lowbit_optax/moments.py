"""Finds the moments in an inner transformation's state and stores them in a format.

A moment is a float32 array of a parameter's shape, at that parameter's place in a tree
that the inner ``init`` built like the parameters: ``mu``, ``nu``, ``trace``. Where such
trees are is what ``optax.tree.map_params`` knows; the name is the state's field.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Set

import jax
import jax.numpy as jnp
import optax

from lowbit_optax.formats.base import MomentFormat
from lowbit_optax.random_bits import RandomBits

# The streams before are the weight formats'.
_FIRST_STREAM = 2

Moments = MomentFormat | Mapping[str, MomentFormat] | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Slot:
    """A param-like subtree of the inner state; not a pytree node, so a leaf."""

    tree: typing.Any


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
        draws = {
            name: draws_for_moments(bits)
            for name, bits in zip(self.names, random, strict=True)
        }
        # What is stored in a container is one part, as it was in float32.
        parts, treedef = jax.tree.flatten(state, MomentFormat.is_stored)
        described = treedef.flatten_up_to(self.describe(state))
        return treedef.unflatten(
            part
            if how is None or i in done
            else how.format.encode(part, draws[how.leaf], how.number)
            for i, (part, how) in enumerate(zip(parts, described, strict=True))
        )

    def describe(self, state):
        """How each part of a decoded inner state is stored.

        Returns:
          A tree like ``state`` with a :class:`Stored` for every moment that has a
          format, and None elsewhere.
        """
        nothing = jax.tree.map(lambda _: None, state)
        if not self.moments:
            return nothing
        numbers = {}

        def describe(name, format_, leaf, like):
            if format_ is None:
                return None
            number = numbers[name] = numbers.get(name, -1) + 1
            return Stored(name, format_, number)

        return self._map(describe, state, lambda _: None)

    def decode(self, state):
        """The inner state with its moments in float32.

        Raises:
          ValueError: if the state was stored in another format.
        """
        if not self.moments:
            self._check_plain(state)
            return state

        def decode(name, format_, stored, like):
            want = _stored_like(format_, like.shape) if format_ else like
            if _text(stored) != _text(want):
                raise ValueError(
                    f"moment of params{name} is {_text(stored)}, but "
                    f"{format_ or 'no format'} stores {_text(want)}: was this state "
                    "made by a transformation with other moments?"
                )
            return format_.decode(stored, like.shape) if format_ else stored

        return self._map(decode, state)

    def _check_plain(self, state):
        # Without formats the inner transformation's init need not take optax's
        # placeholders, so moments are told by dtype alone.
        flatten = jax.tree_util.tree_flatten_with_path
        stored, structure = flatten(state, MomentFormat.is_stored)
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

    def _map(self, fn, state, other=lambda value: value):
        """``fn(name, format, leaf, expected leaf)`` on every moment of a state.

        ``other`` is for the parts that are no moments.
        """
        shapes = {
            name: leaf.shape for name, leaf in zip(self.names, self.params, strict=True)
        }
        slots = self._slots()
        is_slot = lambda x: isinstance(x, _Slot)
        fields = {
            _field_of(path)
            for path, slot in jax.tree_util.tree_flatten_with_path(slots, is_slot)[0]
            if is_slot(slot)
        }
        if isinstance(self.moments, Mapping):
            unknown = sorted(set(self.moments) - fields)
            if unknown:
                raise ValueError(
                    f"moments names {unknown[0]!r}, but the inner transformation's "
                    f"state has these moments: {sorted(fields)}"
                )

        def visit(path, slot, part):
            if not is_slot(slot):
                return other(part)
            field = _field_of(path)
            format_ = self._format(field)
            if format_ is not None:
                format_ = format_.for_field(field, fields)

            def leaf(leaf_path, like, value):
                name = jax.tree_util.keystr(leaf_path)
                if like.dtype != jnp.float32 or shapes.get(name) != like.shape:
                    return other(value)
                stored = format_ and format_.stored(like.shape, self.min_size)
                return fn(name, stored, value, like)

            return jax.tree_util.tree_map_with_path(leaf, slot.tree, part)

        return jax.tree_util.tree_map_with_path(visit, slots, state, is_leaf=is_slot)

    def _slots(self):
        return optax.tree.map_params(
            self.inner, _Slot, self.expected, is_leaf=lambda _: True
        )

    def _format(self, field: str) -> MomentFormat | None:
        if isinstance(self.moments, Mapping):
            return self.moments.get(field)
        return self.moments


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
