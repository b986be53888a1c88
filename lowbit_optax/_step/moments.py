"""How an inner transformation's state is stored: its moments in their formats.

A *part* is a leaf of the inner state as the inner transformation knows it; states are
lists of parts here. :mod:`lowbit_optax._step.moment_slots` finds which parts are
moments. Formats work part by part; the state keeps parallel trees, each with the
parameters' structure, which is what ``optax.tree.map_params``, shardings and
checkpoints can handle:

    parts:         nu = {"w": (codes, scales), "b": float32}
    in the state:  nu = ({"w": codes, "b": float32}, {"w": scales, "b": None})
"""

import collections
import dataclasses
import functools
import itertools
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._numerics.random_bits import Draws, RandomBits, moment_draws
from lowbit_optax._numerics.relative import product, quotient
from lowbit_optax._step import trees
from lowbit_optax._step.context import layerwise
from lowbit_optax._step.leaf import check_shards
from lowbit_optax._step.moment_slots import MomentChoice, Slot, with_slots
from lowbit_optax.formats.base import BlockMomentFormat, MomentFormat
from lowbit_optax.formats.block_quantized import QuantizedMoment, RelativeMoment

_CONTAINERS = (QuantizedMoment, RelativeMoment)


@dataclasses.dataclass(frozen=True)
class MomentStorage:
    """How one moment is stored.

    Args:
      leaf: path of the parameter that it belongs to.
      field: of the inner state.
      state: path of the state that has the field.
      format: its moment format; None for a float32 one.
      container: in which the state keeps it, of those that store several arrays.
      number: counts the moments of one parameter that have formats, from 0.
      reference: the part by whose root it is divided, see
        :attr:`MomentFormat.reference`; None if it is not.
    """

    leaf: str
    field: str
    state: str
    format: MomentFormat | None
    container: type | None = None
    number: int = 0
    reference: int | None = None


@dataclasses.dataclass(frozen=True)
class MomentPlan:
    """Which parts of an inner state are stored in which format.

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

    @functools.cached_property
    def storage(self) -> list[MomentStorage | None]:
        """How each part is stored; None for parts that have no moment format."""
        if self.choice.is_float32:
            return [None] * len(self._shapes)
        numbers = {(x.state, x.field, x.leaf): i for i, x in self._moments.items()}
        parts = range(len(self._shapes))
        return [_with_reference(self._moments.get(i), numbers) for i in parts]

    def parts_in(self, field: str) -> dict[str, int]:
        """The parts that are moments of a field, by the paths of their leaves.

        Raises:
          ValueError: if a leaf has several.
        """
        found: dict[str, int] = {}
        for i, moment in self._moments.items():
            if moment.field != field:
                continue
            if moment.leaf in found:
                raise ValueError(
                    f"lowbit: error_into is {field!r}, and params{moment.leaf} has "
                    "several moments of this name"
                )
            found[moment.leaf] = i
        return found

    def encode(
        self,
        parts: Sequence,
        draws: Mapping[str, Draws],
        stored: Collection[int] = (),
    ) -> list:
        """The parts as they are stored.

        Args:
          parts: with moments in float32.
          draws: by the paths of leaves, the random numbers for their moments.
          stored: which parts are given as they are stored.
        """
        result = list(parts)
        # Only what is stored of a second moment is there when quotients are decoded.
        for i, how in self._in_order():
            if i in stored:
                continue
            seconds = []
            if how.reference is not None:
                seconds = [self._decoded(how.reference, result[how.reference])]
            result[i] = _encode(how, parts[i], draws[how.leaf], *seconds)
        return result

    def decode(self, parts: Sequence, wanted: Collection[int] | None = None) -> list:
        """The parts with moments in float32.

        Args:
          parts: as they are stored.
          wanted: which are decoded; all if None.
        """
        result = list(parts)
        for i, how in self._in_order():
            if wanted is not None and i not in wanted:
                continue
            result[i] = self._decoded(i, parts[i])
            if how.reference is not None:
                second = self._decoded(how.reference, parts[how.reference])
                result[i] = layerwise(_product)(result[i], second)
        return result

    def structure(self, state) -> trees.PyTreeDef:
        """The structure of the parts of an inner state, which may be a stored one."""
        # A state whose moments are not looked for may change its structure.
        return jax.tree.structure(state if self.choice.is_float32 else self.expected)

    def tree(self, structure: trees.PyTreeDef, parts: Sequence) -> typing.Any:
        """The inner state of stored parts, in parallel trees.

        Args:
          structure: of the inner state, from :meth:`structure`.
          parts: as they are stored.
        """
        state = structure.unflatten(parts)
        if self.choice.is_float32:
            return state
        rest = iter(jax.tree.structure(self.expected).flatten_up_to(state))
        return self._outer.unflatten(
            _in_parallel_trees(x, rest) if isinstance(x, Slot) else next(rest)
            for x in self._slots
        )

    def parts(self, state) -> list:
        """The stored parts of an inner state, the inverse of :meth:`tree`.

        Raises:
          ValueError: if the state was stored in another format.
        """
        if self.choice.is_float32:
            self._check_float32(state)
            return jax.tree.leaves(state)
        parts: list = []
        stored = self._outer.flatten_up_to(state)
        for slot, part in zip(self._slots, stored, strict=True):
            if isinstance(slot, Slot):
                names, _, treedef = trees.named_leaves(slot.tree)
                parts += leaf_by_leaf(names, treedef, part, slot.field)
            else:
                parts.append(part)
        for i, moment in self._moments.items():
            want = self._shapes[i]
            if moment.format is not None:
                want = _encoded_shape(moment.format, want.shape)
            elif moment.container is not None:
                want = moment.container(want, None)
            if trees.describe(parts[i]) != trees.describe(want):
                raise ValueError(
                    f"moment {moment.field!r} of params{moment.leaf} is "
                    f"{trees.describe(parts[i])}, but {moment.format or 'no format'} "
                    f"stores {trees.describe(want)}: was this state made by a "
                    "transformation with other moments?"
                )
        is_uncoded = lambda x: isinstance(x, _CONTAINERS) and x.scales is None
        return [x.codes if is_uncoded(x) else x for x in parts]

    def _check_float32(self, state) -> None:
        # Without formats the inner init need not accept optax's placeholders, so the
        # moments are recognised by their dtype alone.
        is_container = lambda x: isinstance(x, _CONTAINERS)

        def flatten(tree):
            tree = jax.tree.map(
                lambda x: (
                    jax.tree.map(type(x), x.codes, x.scales) if is_container(x) else x
                ),
                tree,
                is_leaf=is_container,
            )
            return jax.tree_util.tree_flatten_with_path(tree, is_container)

        stored, structure = flatten(state)
        wanted, expected = flatten(self.expected)
        if structure != expected:
            return  # the inner transformation reports it, if it minds
        for (path, part), (_, want) in zip(stored, wanted, strict=True):
            is_float32 = getattr(want, "dtype", None) == jnp.float32
            if is_float32 and trees.describe(part) != trees.describe(want):
                raise ValueError(
                    f"moment {jax.tree_util.keystr(path)} is {trees.describe(part)}, "
                    f"but without moment formats it is {trees.describe(want)}: was "
                    "this state made by a transformation with other moments?"
                )

    def _decoded(self, number: int, part):
        """A moment, or its quotient by a root, in float32."""
        how = self.storage[number]
        if how is None:
            return part
        decode = functools.partial(_decode, how.format, self._shapes[number].shape)
        return layerwise(decode)(part)

    @functools.cached_property
    def _shapes(self) -> list[jax.ShapeDtypeStruct]:
        return jax.tree.leaves(self.expected)

    def _in_order(self) -> list[tuple[int, MomentStorage]]:
        """The moments that have formats, those relative to others last."""
        found = [(i, x) for i, x in enumerate(self.storage) if x is not None]
        return sorted(found, key=lambda x: x[1].reference is not None)

    @functools.cached_property
    def _moments(self) -> dict[int, MomentStorage]:
        """The moments by their parts' numbers, without their references."""
        params = dict(zip(self.names, self.params, strict=True))
        numbers: collections.Counter = collections.Counter()
        found, part = {}, 0
        for slot in self._slots:
            tree = slot.tree if isinstance(slot, Slot) else slot
            for path, like in jax.tree_util.tree_flatten_with_path(tree)[0]:
                name = jax.tree_util.keystr(path)
                param = params.get(name)
                is_moment = isinstance(slot, Slot) and like.dtype == jnp.float32
                if is_moment and param is not None and param.shape == like.shape:
                    format_ = slot.format and slot.format.for_leaf(
                        like.shape, self.min_size
                    )
                    if isinstance(format_, BlockMomentFormat):
                        check_shards(name, param, format_.bits, format_.block_size)
                    container = slot.format and slot.format.container
                    found[part] = MomentStorage(
                        name, slot.field, slot.state, format_, container, numbers[name]
                    )
                    numbers[name] += format_ is not None
                part += 1
        return found

    @functools.cached_property
    def _outer_and_slots(self) -> tuple[trees.PyTreeDef, list]:
        state = with_slots(self.inner, self.choice, self.expected)
        slots, outer = jax.tree.flatten(state)
        return outer, slots

    @property
    def _outer(self) -> trees.PyTreeDef:
        return self._outer_and_slots[0]

    @property
    def _slots(self) -> list:
        """The leaves of the state in which a Slot is in place of a tree of moments."""
        return self._outer_and_slots[1]


def _with_reference(
    moment: MomentStorage | None, numbers: Mapping[tuple[str, str, str], int]
) -> MomentStorage | None:
    """How a part is stored, with the number of that which it is relative to."""
    if moment is None or moment.format is None:
        return None
    field = moment.format.reference
    if field is None:
        return moment
    number = numbers.get((moment.state, field, moment.leaf))
    if number is None:
        raise ValueError(
            f"lowbit: moment {moment.field!r} of params{moment.leaf} is to be "
            f"stored relative to {field!r}, which is no float32 array of the "
            "parameter's shape; accepted is relative_to=None"
        )
    return dataclasses.replace(moment, reference=number)


def in_parallel_trees(format_: MomentFormat | None, treedef, parts: Sequence):
    """The moments of one field as the state keeps them.

    Args:
      format_: their moment format; None for float32.
      treedef: the structure of the field's tree.
      parts: per leaf, the result of the format's ``encode``, or the uncoded array of a
        leaf that the format leaves alone.

    Returns:
      One tree; or, if the format stores a moment as several arrays, a container of
      trees, in which ``scales`` is None at the uncoded leaves.
    """
    if format_ is None or format_.container is None:
        return treedef.unflatten(parts)
    container = format_.container
    pairs = [x if isinstance(x, _CONTAINERS) else container(x, None) for x in parts]
    return container(
        treedef.unflatten(x.codes for x in pairs),
        treedef.unflatten(x.scales for x in pairs),
    )


def leaf_by_leaf(names: Sequence[str], treedef, stored, what: str) -> list:
    """The inverse of :func:`in_parallel_trees`, with uncoded arrays in containers.

    Args:
      names, treedef: of the leaves of the field's tree.
      stored: as the state keeps it.
      what: the field, for errors.
    """
    if not isinstance(stored, _CONTAINERS):
        return trees.parts_of(names, treedef, stored, what)
    codes = trees.parts_of(names, treedef, stored.codes, "codes")
    scales = trees.parts_of(names, treedef, stored.scales, "scales")
    return list(map(type(stored), codes, scales))


def _in_parallel_trees(slot: Slot, parts: Iterator):
    treedef = jax.tree.structure(slot.tree)
    own = list(itertools.islice(parts, treedef.num_leaves))
    return in_parallel_trees(slot.format, treedef, own)


def _encode(how: MomentStorage, moment: jax.Array, draws: Draws, *second: jax.Array):
    encode = functools.partial(_encode_moment, how.format, how.number, draws)
    return layerwise(encode)(moment, *second)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode_moment(format_: MomentFormat, number: int, draws: Draws, moment, *second):
    if second:
        moment = quotient(moment, *second)
    return format_.encode(moment, draws, number)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(format_: MomentFormat, shape: tuple[int, ...], stored):
    return format_.decode(stored, shape)


_product = jax.jit(product)


@functools.lru_cache(maxsize=4096)
def _encoded_shape(format_: MomentFormat, shape: tuple[int, ...]):
    def encode(moment, seed):
        return format_.encode(moment, moment_draws(RandomBits(seed, seed)), 0)

    scalar = jax.ShapeDtypeStruct((), jnp.uint32)
    return jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32), scalar)
