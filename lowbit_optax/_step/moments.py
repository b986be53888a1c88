"""Encoding and decoding the moments in an inner transformation's state.

:mod:`lowbit_optax._step.moment_slots` finds which parts of a state are moments, and in
which format each is stored. Formats work leaf by leaf;
:mod:`lowbit_optax._step.moment_trees` turns their results into the trees that the state
keeps.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence, Set

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics.random_bits import Draws, RandomBits, moment_draws
from lowbit_optax._numerics.relative import product, quotient
from lowbit_optax._step.moment_slots import MomentChoice, Slot, with_slots
from lowbit_optax._step.moment_trees import (
    from_parallel_trees,
    is_quantized_moment,
    to_parallel_trees,
    unwrap_uncoded,
    wrap_uncoded,
)
from lowbit_optax._step.shards import check_shards
from lowbit_optax._step.stacks import marked_layerwise
from lowbit_optax._step.trees import describe
from lowbit_optax.formats.base import BlockMomentFormat, MomentFormat


@dataclasses.dataclass(frozen=True)
class MomentStorage:
    """How one moment is stored.

    Args:
      leaf: path of the parameter that it belongs to.
      format: its moment format.
      number: counts the moments of one parameter from 0.
      reference: index of the part by whose root it is divided, see
        :attr:`MomentFormat.reference`; None if it is not.
    """

    leaf: str
    format: MomentFormat
    number: int
    reference: int | None = None


class _Moment(typing.NamedTuple):
    """A moment of a state: the path and field of its state, and its parameter's path.

    Its ``reference`` is not known yet to ``storage``, which is None without a format.
    """

    state: str
    field: str
    leaf: str
    storage: MomentStorage | None


@dataclasses.dataclass(frozen=True)
class MomentPlan:
    """Which parts of an inner state are stored in which format.

    A *part* is a leaf of the inner state as the inner transformation knows it.

    Args:
      inner: the wrapped transformation.
      choice: the formats of the moments.
      names, params: paths and leaves of the parameters.
      expected: the inner state before encoding, as ShapeDtypeStructs.
      min_size: moments with fewer elements may be kept in float32.
    """

    inner: optax.GradientTransformation
    choice: MomentChoice
    names: list[str]
    params: list[jax.Array]
    expected: typing.Any
    min_size: int = 4096

    def encode(self, state, draws: Sequence[Draws]):
        """The inner state as it is stored, with its moments in their formats.

        Args:
          state: the inner state with moments in float32.
          draws: per leaf, the random numbers for its moments.
        """
        if self.choice.is_float32:
            return state
        treedef = jax.tree.structure(self.expected)
        parts = self.encode_parts(treedef.flatten_up_to(state), draws)
        return self.to_parallel_trees(treedef.unflatten(parts))

    def encode_parts(
        self,
        parts: Sequence,
        draws: Sequence[Draws],
        encoded: Set[int] = frozenset(),
    ) -> list:
        """The parts of an inner state, with each moment in the form ``encode`` gives.

        Args:
          parts: the parts with moments in float32.
          draws: per leaf, the random numbers for its moments.
          encoded: indices of the parts that are encoded already.
        """
        by_name = dict(zip(self.names, draws, strict=True))
        treedef = jax.tree.structure(self.expected)
        described = self.describe(treedef.unflatten(parts))
        left = [
            (i, how)
            for i, how in enumerate(described)
            if how is not None and i not in encoded
        ]
        stored = list(parts)
        for i, how in left:
            if how.reference is None:
                stored[i] = _encode(how, parts[i], by_name[how.leaf])
        for i, how in left:
            if how.reference is not None:
                # Only what is stored of it is there when the moment is decoded.
                second = stored[how.reference]
                format_of_second = described[how.reference]
                if format_of_second is not None:
                    second = _decode_part(
                        format_of_second.format, parts[i].shape, second
                    )
                stored[i] = _encode(how, parts[i], by_name[how.leaf], second)
        return stored

    def to_parallel_trees(self, state):
        """An inner state of encoded parts as it is stored, in parallel trees."""
        if self.choice.is_float32:
            return state

        def to_trees(slot, tree):
            structure = jax.tree.structure(slot.tree)
            return to_parallel_trees(
                slot.format, structure, structure.flatten_up_to(tree)
            )

        return self._map_slots(to_trees, state)

    def from_parallel_trees(self, state):
        """The stored inner state with each moment's arrays together at its leaf.

        The inverse of :meth:`to_parallel_trees`.
        """
        if self.choice.is_float32:
            return state

        def from_trees(slot, stored):
            del slot
            parts = from_parallel_trees(stored)
            return jax.tree.map(unwrap_uncoded, parts, is_leaf=is_quantized_moment)

        return self._map_slots(from_trees, state)

    def describe(self, state) -> list[MomentStorage | None]:
        """How each part of a decoded inner state is stored.

        Returns:
          Per part, a :class:`MomentStorage`; None for parts that have no format.
        """
        treedef = jax.tree.structure(self.expected)
        if self.choice.is_float32:
            return [None] * treedef.num_leaves
        nothing = lambda _: None
        numbers: dict[str, int] = {}

        def moment(slot, name, format_, part, like):
            storage = None
            if format_ is not None:
                number = numbers[name] = numbers.get(name, -1) + 1
                storage = MomentStorage(name, format_, number)
            return _Moment(slot.state, slot.field, name, storage)

        found = self._map_slots(
            lambda slot, tree: self._map_moments(
                functools.partial(moment, slot), slot, tree, nothing
            ),
            state,
            nothing,
        )
        return _with_references(treedef.flatten_up_to(found))

    def parts_in(self, field: str) -> dict[str, int]:
        """The parts that are moments of a field, by the paths of their leaves.

        Raises:
          ValueError: if a leaf has several.
        """
        treedef = jax.tree.structure(self.expected)
        found: dict[str, int] = {}

        def note(name, format_, part, like):
            del format_, like
            if name in found:
                raise ValueError(
                    f"lowbit: error_into is {field!r}, and params{name} has several "
                    "moments of this name"
                )
            found[name] = part

        def of_slot(slot, tree):
            if slot.field == field:
                self._map_moments(note, slot, tree, lambda part: None)

        numbers = treedef.unflatten(range(treedef.num_leaves))
        self._map_slots(of_slot, numbers, lambda part: None)
        return found

    def decode(self, state):
        """The inner state with its moments in float32.

        Raises:
          ValueError: if the state was stored in another format.
        """
        if self.choice.is_float32:
            self._check_float32(state)
            return state

        def decode(slot, name, format_, stored, like):
            want = wrap_uncoded(slot.format, like)
            if format_ is not None:
                want = _expected_encoding(format_, like.shape)
            if describe(stored) != describe(want):
                raise ValueError(
                    f"moment {slot.field!r} of params{name} is {describe(stored)}, but "
                    f"{slot.format or 'no format'} stores {describe(want)}: was this "
                    "state made by a transformation with other moments?"
                )
            if format_ is None:
                return unwrap_uncoded(stored)
            return _decode_part(format_, like.shape, stored)

        decoded = self._map_slots(
            lambda slot, stored: self._map_moments(
                functools.partial(decode, slot),
                slot,
                from_parallel_trees(stored),
                unwrap_uncoded,
            ),
            state,
        )
        return self._times_roots(decoded)

    def _times_roots(self, state):
        """A decoded state in which quotients by roots have become moments."""
        parts, treedef = jax.tree.flatten(state)
        moments = list(parts)
        for i, how in enumerate(self.describe(state)):
            if how is not None and how.reference is not None:
                second = parts[how.reference]
                moments[i] = marked_layerwise(traced_once(product), parts[i], second)
        return treedef.unflatten(moments)

    def _check_float32(self, state):
        # Without formats the inner init need not accept optax's placeholders, so the
        # moments are recognised by their dtype alone.
        def flatten(tree):
            tree = jax.tree.map(from_parallel_trees, tree, is_leaf=is_quantized_moment)
            return jax.tree_util.tree_flatten_with_path(tree, is_quantized_moment)

        stored, structure = flatten(state)
        wanted, expected = flatten(self.expected)
        if structure != expected:
            return  # the inner transformation reports it, if it minds
        for (path, part), (_, want) in zip(stored, wanted, strict=True):
            if getattr(want, "dtype", None) != jnp.float32:
                continue
            if describe(part) != describe(want):
                raise ValueError(
                    f"moment {jax.tree_util.keystr(path)} is {describe(part)}, but "
                    f"without moment formats it is {describe(want)}: was this state "
                    "made by a transformation with other moments?"
                )

    def _map_slots(self, fn, state, other=lambda part: part):
        """Map ``fn(slot, part)`` over the slots, and ``other(part)`` elsewhere."""

        def visit(slot, part):
            return fn(slot, part) if isinstance(slot, Slot) else other(part)

        return jax.tree.map(visit, self._slots, state)

    def _map_moments(self, fn, slot: Slot, tree, other):
        """Map ``fn(name, format, part, expected leaf)`` over the moments of a slot.

        ``other(part)`` is for the parts of the slot that are not moments.
        """
        params = dict(zip(self.names, self.params, strict=True))

        def leaf(path, like, part):
            name = jax.tree_util.keystr(path)
            param = params.get(name)
            is_like = param is not None and param.shape == like.shape
            if like.dtype != jnp.float32 or not is_like:
                return other(part)
            format_ = slot.format and slot.format.for_leaf(like.shape, self.min_size)
            if isinstance(format_, BlockMomentFormat):
                check_shards(name, param, format_.bits, format_.block_size)
            return fn(name, format_, part, like)

        return jax.tree_util.tree_map_with_path(leaf, slot.tree, tree)

    @functools.cached_property
    def _slots(self):
        return with_slots(self.inner, self.choice, self.expected)


def _with_references(moments: list[_Moment | None]) -> list[MomentStorage | None]:
    """How each part is stored, with the indices of those that others refer to."""
    numbers = {x[:-1]: i for i, x in enumerate(moments) if x is not None}

    def storage(moment: _Moment | None) -> MomentStorage | None:
        if moment is None or moment.storage is None:
            return None
        field = moment.storage.format.reference
        if field is None:
            return moment.storage
        number = numbers.get((moment.state, field, moment.leaf))
        if number is None:
            raise ValueError(
                f"lowbit: moment {moment.field!r} of params{moment.leaf} is to be "
                f"stored relative to {field!r}, which is no float32 array of the "
                "parameter's shape; accepted is relative_to=None"
            )
        return dataclasses.replace(moment.storage, reference=number)

    return [storage(x) for x in moments]


def _encode(how: MomentStorage, moment: jax.Array, draws: Draws, *second: jax.Array):
    encode = traced_once(_encode_moment, how.format, how.number)
    return marked_layerwise(lambda *moments: encode(draws, *moments), moment, *second)


def _encode_moment(format_: MomentFormat, number: int, draws: Draws, moment, *second):
    if second:
        moment = quotient(moment, *second)
    return format_.encode(moment, draws, number)


def _decode_part(format_: MomentFormat, shape: tuple[int, ...], stored):
    return marked_layerwise(traced_once(_decode, format_, shape), stored)


def _decode(format_: MomentFormat, shape: tuple[int, ...], stored):
    return format_.decode(stored, shape)


@functools.lru_cache(maxsize=4096)
def _expected_encoding(format_: MomentFormat, shape: tuple[int, ...]):
    def encode(moment, seed):
        return format_.encode(moment, moment_draws(RandomBits(seed, seed)), 0)

    scalar = jax.ShapeDtypeStruct((), jnp.uint32)
    return jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32), scalar)
