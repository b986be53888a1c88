"""``MomentPlan``: which parts of an inner state are moments, and how they are stored.

A *part* is a leaf of the inner state as the inner transformation sees it. A *moment* is
a part that is a float32 array with the shape of its parameter, in a tree with the
structure of the parameters, such as ``mu``, ``nu`` or ``trace``. :func:`find_slots`
finds these trees with ``optax.tree.map_params``, and each becomes a :class:`Slot`. A
:class:`MomentChoice`, which :func:`lowbit_optax.lowbit` creates from ``moments``, gives
the slot its format. The class of the state determines whether a field is known to be a
running average.

:meth:`.engine.Lowbit.open` creates a plan from the leaves of the parameters. A step
calls its ``decode`` before the inner update, and ``encode`` and ``tree`` after it.
Formats process one part at a time. The state contains parallel trees with the structure
of the parameters, which ``optax.tree.map_params``, shardings and checkpoints support:

    parts:         nu = {"w": (codes, scales), "b": float32}
    in the state:  nu = ({"w": codes, "b": float32}, {"w": scales, "b": blank})
"""

import collections
import dataclasses
import functools
import itertools
import typing
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._numerics.random_bits import Draws, RandomBits
from lowbit_optax._numerics.straight_through import straight_through
from lowbit_optax._step import trees
from lowbit_optax._step.context import layerwise
from lowbit_optax._step.leaf import StoredLeaf, on_whole_units
from lowbit_optax._step.state import blank, is_blank
from lowbit_optax.formats.base import MomentFormat
from lowbit_optax.formats.block_quantized import (
    BlockQuantized,
    QuantizedMoment,
    block_quantized,
)
from lowbit_optax.formats.moment_fields import fields_of, is_coarser

Moment = MomentFormat | typing.Literal["float32"]


Moments = Moment | Mapping[str, Moment] | None


class NoSuchMomentError(ValueError):
    """``moments`` names a field that the inner transformation does not have."""


@dataclasses.dataclass(frozen=True)
class MomentChoice:
    """The formats of the moments.

    Args:
      averages: format for fields that are known to be running averages; None for
        float32.
      by_field: formats by field name, for running averages and other fields; None for
        float32.
      is_default: True if the user passed no ``moments``. In this case, moments that
        cannot be found stay float32 instead of raising an error.
    """

    averages: MomentFormat | None
    by_field: Mapping[str, MomentFormat | None]
    is_default: bool = False

    @staticmethod
    def of(moments: Moments) -> "MomentChoice":
        """Return the choice for the argument ``moments`` of ``lowbit``."""
        if moments is None:
            return MomentChoice(block_quantized(8), {}, is_default=True)
        if isinstance(moments, Mapping):
            by_field = {field: _format(x) for field, x in moments.items()}
            return MomentChoice(None, by_field)
        return MomentChoice(_format(moments), {})

    @property
    def is_float32(self) -> bool:
        """Whether every moment stays float32."""
        # A mapping is always checked, because it may name a field that does not exist.
        return self.averages is None and not self.by_field


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A tree of moments in the inner state.

    It is not registered as a pytree node, so it is a leaf of the state.

    Args:
      tree: ShapeDtypeStructs, with the structure of the parameters.
      state_class: class of the state that contains the tree.
      field: field of that state.
      format: format of the moments; None for float32.
    """

    tree: typing.Any
    state_class: type | None = None
    field: str = ""
    format: MomentFormat | None = None

    def formatted(self, choice: MomentChoice) -> "Slot":
        """Return the slot with its chosen format, which needs float32 moments."""
        field, known = self.field, fields_of(self.state_class)
        default = choice.averages if field in known.averages else None
        format_ = choice.by_field.get(field, default)
        if format_ is None:
            return self
        _check_wide(self, format_)
        is_second = known.is_second_moment(field)
        is_orthogonalized = field in known.orthogonalized
        format_ = format_.for_field(field, is_second, is_orthogonalized)
        if is_second and not format_.has_scales:
            _check_small(field, format_)
        is_known = is_second is not None or field in known.averages
        if not is_known and getattr(format_, "signed", False):
            owner = self.state_class.__name__ if self.state_class else "the state"
            warnings.warn(
                f"lowbit: moment {field!r} of {owner} is stored with a sign, because "
                "it is not known to be a second moment. If it is one, and its root "
                "divides the update, call lowbit_optax.formats.register_moments",
                stacklevel=2,
            )
        return dataclasses.replace(self, format=format_)


@dataclasses.dataclass(frozen=True)
class MomentStorage:
    """How one moment is stored.

    Args:
      leaf: path of its parameter.
      shape: shape of its parameter.
      slot: the tree in the inner state that contains it.
      format: its moment format; None for float32.
      number: its index among the parameter's moments with a format.
    """

    leaf: str
    shape: tuple[int, ...]
    slot: Slot
    format: MomentFormat | None
    number: int = 0

    def in_the_state(self):
        """Return the shapes and dtypes of its arrays in the state."""
        if self.format is not None:
            return _encoded_shape(self.format, self.shape)
        like = jax.ShapeDtypeStruct(self.shape, jnp.float32)
        others = self.slot.format
        return QuantizedMoment(like, None) if others and others.has_scales else like


@dataclasses.dataclass(frozen=True)
class MomentPlan:
    """The format in which each part of an inner state is stored.

    Args:
      slots: the result of :func:`.find_slots`; without leaves if all moments are
        float32 and receive no rounding errors.
      choice: the formats of the moments.
      leaves: the leaves of the parameters, with ShapeDtypeStructs instead of arrays.
      expected: the inner state before encoding, as ShapeDtypeStructs.
      min_sizes: dict from path to size; moments of this leaf with fewer elements may
        stay float32.
    """

    slots: tuple[trees.PyTreeDef, list]
    choice: MomentChoice
    leaves: Sequence[StoredLeaf]
    expected: typing.Any
    min_sizes: Mapping[str, int]

    @functools.cached_property
    def storage(self) -> list[MomentStorage | None]:
        """How each part is stored; None for parts without a moment format."""
        count = jax.tree.structure(self.expected).num_leaves
        moments = {} if self.choice.is_float32 else self.moments
        found = map(moments.get, range(count))
        return [x if x is not None and x.format is not None else None for x in found]

    @functools.cached_property
    def quantized(self) -> dict[str, list[BlockQuantized]]:
        """The formats of the quantized moments of each leaf, keyed by its path."""
        found: dict[str, list[BlockQuantized]] = {x.name: [] for x in self.leaves}
        for moment in self.storage:
            if moment is not None and isinstance(moment.format, BlockQuantized):
                found[moment.leaf].append(moment.format)
        return found

    @functools.cached_property
    def stored_first(self) -> frozenset[int]:
        """Indices of the moments that are stored before updates are computed."""
        readers = {
            leaf.name
            for leaf in self.leaves
            if leaf.format is not None and leaf.format.reads_stored_moments
        }
        moments = enumerate(self.storage)
        return frozenset(i for i, x in moments if x is not None and x.leaf in readers)

    def check_divided(self) -> None:
        """Raise a ValueError if a first moment is coarser than the second moment.

        A first moment below the smallest value of its format may be rounded up to that
        value. If the root of its second moment is much smaller, the update is too long.
        """
        if self.choice.is_float32:
            return
        by_leaf = collections.defaultdict(list)
        for moment in self.moments.values():
            by_leaf[moment.leaf, moment.slot.state_class].append(moment)
        for (name, kind), moments in by_leaf.items():
            for first, second in itertools.permutations(moments, 2):
                fields = second.slot.field, first.slot.field
                is_divided = fields_of(kind).divides(*fields)
                if is_divided and is_coarser(first.format, second.format):
                    raise ValueError(
                        f"lowbit: moment {fields[1]!r} of params{name} must not be "
                        f"coarser than {fields[0]!r}, whose root divides it, got "
                        f"{first.format} and {second.format or 'float32'}. Updates "
                        "of small gradients would be many times too long. Pass "
                        "one format for both, such as lowbit_optax.block_quantized(8), "
                        "or use lowbit_optax.factored_adamw, with 4 bits or more"
                    )

    def placed(self, leaves: Sequence[StoredLeaf]) -> list[StoredLeaf]:
        """Return the leaves, moved if their shards would split words or blocks."""
        return [on_whole_units(leaf, *self.packed(leaf)) for leaf in leaves]

    def packed(self, leaf: StoredLeaf) -> tuple[tuple[int, ...], int | None]:
        """Return the widths of a leaf's packed fields, and the size of its blocks."""
        quantized = self.quantized[leaf.name]
        bits = {x.bits for x in quantized}
        if leaf.format is not None and leaf.format.width:
            bits.add(leaf.format.width)
        block_size = max((x.block_size for x in quantized), default=None)
        return tuple(sorted(bits)), block_size

    def encode(
        self, parts: Sequence, draws: Mapping[str, Draws], stored: Collection[int] = ()
    ) -> list:
        """Return the stored form of the parts.

        Args:
          parts: the parts, with moments in float32.
          draws: random numbers for moments, keyed by the path of the leaf.
          stored: indices of the parts that are already in their stored form.
        """
        result = list(parts)
        for i, storage in enumerate(self.storage):
            if storage is not None and i not in stored:
                how = storage.format, draws[storage.leaf], storage.number
                result[i] = encoded(parts[i], *how)
        return result

    def decode(self, parts: Sequence, wanted: Collection[int] | None = None) -> list:
        """Return the parts, with the wanted moments (by default, all) in float32."""
        result = list(parts)
        for i, storage in enumerate(self.storage):
            if storage is not None and (wanted is None or i in wanted):
                result[i] = decoded(parts[i], storage.format, storage.shape)
        return result

    def structure(self, state) -> trees.PyTreeDef:
        """Return the structure of the parts of an inner state, stored or not."""
        # Without moment formats, a state may change its structure.
        return jax.tree.structure(state if self.choice.is_float32 else self.expected)

    def tree(
        self, structure: trees.PyTreeDef, parts: Sequence, before=None
    ) -> typing.Any:
        """Return the inner state with these parts and the blanks of ``before``."""
        state = structure.unflatten(parts)
        if self.choice.is_float32:
            return state
        rest = iter(jax.tree.structure(self.expected).flatten_up_to(state))

        def stored(leaf, old):
            if not isinstance(leaf, Slot):
                return next(rest)
            treedef = jax.tree.structure(leaf.tree)
            moments = list(itertools.islice(rest, treedef.num_leaves))
            return in_parallel_trees(leaf.format, treedef, moments, old)

        outer, leaves = self.slots
        olds = itertools.repeat(None) if before is None else outer.flatten_up_to(before)
        return outer.unflatten(map(stored, leaves, olds))

    def parts(self, state) -> list:
        """Check an inner state, and return its stored parts; inverts :meth:`tree`."""
        if self.choice.is_float32:
            self._check_float32(state)
            return jax.tree.leaves(state)
        parts: list = []
        outer, leaves = self.slots
        try:
            given = outer.flatten_up_to(state)
        except (ValueError, TypeError) as error:
            raise _of_another(state, outer) from error
        for leaf, stored in zip(leaves, given, strict=True):
            if isinstance(leaf, Slot):
                names, _, treedef = trees.named_leaves(leaf.tree)
                parts += leaf_by_leaf(names, treedef, stored, leaf.field)
            else:
                parts.append(stored)
        for i, moment in self.moments.items():
            want = trees.describe(moment.in_the_state())
            if trees.describe(parts[i]) != want:
                raise ValueError(
                    f"lowbit: moment {moment.slot.field!r} of params{moment.leaf} must "
                    f"be {want} for {moment.format or 'no format'}, got "
                    f"{trees.describe(parts[i])}. {trees.OTHER_STATE}"
                )
        for leaf, stored in zip(leaves, given, strict=True):
            if isinstance(leaf, Slot):
                check_container(leaf.format, stored, f"lowbit: moment {leaf.field!r}")
        return list(map(uncontained, parts))

    def _check_float32(self, state) -> None:
        # Without formats, the inner init need not support optax's placeholders, so this
        # function recognizes moments by their dtype.
        is_container = lambda x: isinstance(x, QuantizedMoment)

        def paired(x):
            return jax.tree.map(type(x), x.codes, x.scales) if is_container(x) else x

        state = jax.tree.map(paired, state, is_leaf=is_container)
        stored, structure = jax.tree.flatten(state, is_container)
        wanted, expected = jax.tree_util.tree_flatten_with_path(self.expected)
        if structure.num_leaves != expected.num_leaves:
            raise _of_another(state, expected)
        if structure != expected:
            return  # the inner transformation may support this
        for part, (path, want) in zip(stored, wanted, strict=True):
            is_float32 = getattr(want, "dtype", None) == jnp.float32
            if is_float32 and trees.describe(part) != trees.describe(want):
                raise ValueError(
                    f"lowbit: moment {jax.tree_util.keystr(path)} must be "
                    f"{trees.describe(want)} without moment formats, got "
                    f"{trees.describe(part)}. {trees.OTHER_STATE}"
                )

    @functools.cached_property
    def moments(self) -> dict[int, MomentStorage]:
        """The moments, keyed by part index."""
        params = {leaf.name: leaf.param for leaf in self.leaves}
        numbers: collections.Counter = collections.Counter()
        found, part = {}, itertools.count()
        for slot in self.slots[1]:
            if not isinstance(slot, Slot):
                next(part)
                continue
            for path, like in jax.tree_util.tree_flatten_with_path(slot.tree)[0]:
                i, name = next(part), jax.tree_util.keystr(path)
                param = params.get(name)
                if like.dtype != jnp.float32 or param is None:
                    continue
                if param.shape != like.shape or not trees.is_inexact(param):
                    continue
                format_ = slot.format
                if format_ is not None:
                    format_ = format_.for_leaf(like.shape, self.min_sizes[name])
                found[i] = MomentStorage(name, like.shape, slot, format_, numbers[name])
                numbers[name] += format_ is not None
        return found


def _of_another(state, expected: trees.PyTreeDef) -> ValueError:
    """Return the error for an inner state from another transformation."""
    wanted = trees.outline(expected.unflatten([0] * expected.num_leaves))
    return ValueError(
        f"lowbit: the inner state must be {wanted}, got {trees.outline(state)}. Pass "
        "the state that this transformation's init returned, and not the state of "
        "another transformation, such as ema_of_params"
    )


def encoded(
    moment: jax.Array, format_: MomentFormat | None, draws: Draws, number: int = 0
):
    """Return the stored form of a float32 moment or of a sum of gradients.

    Args:
      moment: float32 array.
      format_: its format; None for float32.
      draws, number: see :meth:`.MomentFormat.encode`.
    """
    if format_ is None:
        return moment
    return layerwise(functools.partial(_encode, format_, number, draws))(moment)


def decoded(stored, format_: MomentFormat | None, shape: tuple[int, ...]) -> jax.Array:
    """Return a float32 array from its stored form; inverts :func:`encoded`."""
    if format_ is None:
        return stored
    return layerwise(functools.partial(_decode, format_, shape))(stored)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(format_: MomentFormat, number: int, draws: Draws, moment):
    encode = lambda moment, draws: format_.encode(moment, draws, number)
    if not format_.has_scales:
        encode = straight_through(encode)
    return encode(moment, draws)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(format_: MomentFormat, shape: tuple[int, ...], stored):
    decode = lambda stored: format_.decode(stored, shape)
    return straight_through(decode)(stored)


@functools.lru_cache(maxsize=4096)
def _encoded_shape(format_: MomentFormat, shape: tuple[int, ...]):
    def encode(moment, seed):
        return format_.encode(moment, Draws(RandomBits(seed, seed)), 0)

    scalar = jax.ShapeDtypeStruct((), jnp.uint32)
    return jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32), scalar)


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


def _format(moment) -> MomentFormat | None:
    if isinstance(moment, str) and moment == "float32":
        return None
    if not isinstance(moment, MomentFormat):
        raise TypeError(
            "lowbit: moments must be 'float32' or a moment format, such as "
            "lowbit_optax.block_quantized(8) or lowbit_optax.cast(jnp.bfloat16), got "
            f"{moment!r}"
        )
    return moment


def find_slots(
    inner: optax.GradientTransformation, choice: MomentChoice, expected
) -> tuple[trees.PyTreeDef, list]:
    """Return structure and leaves of an inner state; each moment tree is a Slot."""
    try:
        state = optax.tree.map_params(inner, Slot, expected, is_leaf=lambda _: True)
    except Exception as error:
        # map_params calls the inner init with placeholders instead of parameters. An
        # init that does not support them can raise any exception.
        if not choice.is_default:
            raise ValueError(
                "lowbit: moments must be 'float32' for this inner transformation, "
                "because its moments cannot be found: optax.tree.map_params raised "
                f"{type(error).__name__}: {error}"
            ) from error
        state = expected
    leaves = list(_leaves(state, Slot(None)))
    fields = {x.field for x in leaves if isinstance(x, Slot)}
    unknown = sorted(set(choice.by_field) - fields)
    if unknown:
        raise NoSuchMomentError(
            "lowbit: moments must name moments of the inner transformation, "
            f"{sorted(fields)}, got {unknown[0]!r}"
        )
    leaves = [x.formatted(choice) if isinstance(x, Slot) else x for x in leaves]
    return jax.tree.structure(state), leaves


def _leaves(node, owner: Slot) -> Iterator:
    """Yield the leaves of a node; ``owner`` contains the state and field of slots."""
    if isinstance(node, Slot):
        yield dataclasses.replace(owner, tree=node.tree)
        return
    is_child = lambda x: x is not node
    for keys, child in jax.tree_util.tree_flatten_with_path(node, is_child)[0]:
        if child is node:
            yield node
            continue
        within = owner
        for key in keys:
            if isinstance(key, jax.tree_util.GetAttrKey):
                within = Slot(None, type(node), key.name)
            elif isinstance(key, jax.tree_util.DictKey):
                within = Slot(None, owner.state_class, str(key.key))
        yield from _leaves(child, within)


_LARGEST_ZERO = 1e-12
"""Smaller second moments may become 0, such as (1 - b2) g^2 for g = 3e-5."""


def _check_small(field: str, format_: MomentFormat) -> None:
    if format_.smallest_share > _LARGEST_ZERO:
        raise ValueError(
            f"lowbit: the format of moment {field!r}, whose root divides updates, must "
            f"store values of {_LARGEST_ZERO}, got {format_}, in which values below "
            f"{format_.smallest_share:.1e} become 0. Pass moments as a mapping, such "
            f"as moments={{{field!r}: lowbit_optax.cast('bfloat16')}}"
        )


def _check_wide(slot: Slot, format_: MomentFormat) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(slot.tree)[0]:
        if trees.is_narrow_array(leaf):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"lowbit: moment {slot.field!r} of params{name} must be float32 in the "
                f"inner transformation to be stored as {format_}, got {leaf.dtype}. "
                "Leave out mu_dtype (or accumulator_dtype), or pass a mapping without "
                "this moment, such as "
                f"moments={{'nu': lowbit_optax.block_quantized(8)}}"
            )
