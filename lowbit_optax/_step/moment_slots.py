"""Where an inner transformation keeps its moments, and in which format each is stored.

The inner ``init`` builds trees like the parameters, such as ``mu``, ``nu`` or
``trace``. A moment is a float32 array in such a tree, of the shape of the parameter in
whose place it is. ``optax.tree.map_params`` finds these trees. Each becomes a
:class:`Slot`, named by the state's field; the class of the state tells whether the
field is known to be a running average.
"""

import dataclasses
import typing
import warnings
from collections.abc import Callable, Collection, Mapping

import jax
import optax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax.formats.base import MomentFormat
from lowbit_optax.formats.block_quantized import block_quantized
from lowbit_optax.formats.low_moments import LowMoments
from lowbit_optax.formats.moment_fields import fields_of

FLOAT32: typing.Final = "float32"
LOW: typing.Final = "low"

Moment = MomentFormat | typing.Literal["float32", "low"]
Moments = Moment | Mapping[str, Moment] | None


class NoSuchMomentError(ValueError):
    """Moments are named that the inner transformation does not have."""


@dataclasses.dataclass(frozen=True)
class MomentChoice:
    """Which moments are stored in which format.

    Args:
      averages: the format of fields known to be running averages; None for float32.
      by_field: the formats of fields given by name, whether they are running averages
        or not; None for float32.
      is_default: whether the user left ``moments`` out. In that case moments that
        cannot be found stay float32 instead of raising an error.
    """

    averages: MomentFormat | None
    by_field: Mapping[str, MomentFormat | None]
    is_default: bool = False

    @staticmethod
    def of(moments: Moments) -> "MomentChoice":
        """The choice that the argument ``moments`` of ``lowbit`` stands for.

        Raises:
          TypeError: if it has something that is not a moment format.
        """
        if moments is None:
            return MomentChoice(block_quantized(8), {}, is_default=True)
        if isinstance(moments, Mapping):
            by_field = {field: _format(x) for field, x in moments.items()}
            return MomentChoice(None, by_field)
        return MomentChoice(_format(moments), {})

    @property
    def is_float32(self) -> bool:
        """Whether every moment stays float32."""
        # A mapping is looked at even so: it may name a field that is not there.
        return self.averages is None and not self.by_field

    def format_of(self, state_class: type | None, field: str) -> MomentFormat | None:
        """The moment format of one field of a state; None for float32."""
        if field in self.by_field:
            return self.by_field[field]
        return self.averages if field in fields_of(state_class).averages else None


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A tree of moments in the inner state.

    It is not registered as a pytree node, so it is a leaf of the state.

    Args:
      tree: ShapeDtypeStructs, with the parameters' structure.
      state: path of the state that holds it.
      field: the state's field that holds it.
      format: how its moments are stored; None for float32.
    """

    tree: typing.Any
    state: str = ""
    field: str = ""
    format: MomentFormat | None = None


def with_slots(
    inner: optax.GradientTransformation, choice: MomentChoice, expected
) -> typing.Any:
    """An inner state with a :class:`Slot` in place of each tree of moments.

    Args:
      inner: the inner transformation.
      choice: the formats of the moments.
      expected: the inner state as ShapeDtypeStructs.

    Raises:
      ValueError: if the moments cannot be found, if ``choice`` names a field that holds
        no moments, or if a moment to be stored in a format is in 16 bits already.
    """
    try:
        state = optax.tree.map_params(inner, Slot, expected, is_leaf=lambda _: True)
    except Exception as error:
        # map_params calls the inner init with placeholders instead of parameters, and
        # what an init that does not accept them raises may be anything.
        if choice.is_default:
            return expected
        raise ValueError(
            "lowbit: moments cannot be found in this inner transformation's state, "
            f"because optax.tree.map_params fails on it ({type(error).__name__}: "
            f"{error}); accepted for it is moments='float32'"
        ) from error
    owners: list[_Owner] = []
    _visit(state, lambda owner, slot: owners.append(owner) or slot)
    fields = sorted({owner.field for owner in owners})
    unknown = sorted(set(choice.by_field) - set(fields))
    if unknown:
        raise NoSuchMomentError(
            f"moments names {unknown[0]!r}, but the inner transformation's state has "
            f"these moments: {fields}"
        )

    def with_format(owner: _Owner, slot: Slot) -> Slot:
        format_ = choice.format_of(owner.state_class, owner.field)
        if format_ is not None:
            _check_wide(slot, owner.field, format_)
            known = fields_of(owner.state_class)
            is_second = known.is_second_moment(owner.field)
            bound = known.bounds.get(owner.field)
            format_ = format_.for_field(owner.field, is_second, bound)
            if is_second is None and owner.field not in known.averages:
                _warn_of_sign(owner, format_)
            _check_reference(format_, owner, owners)
        return Slot(slot.tree, owner.state, owner.field, format_)

    return _visit(state, with_format)


class _Owner(typing.NamedTuple):
    """What holds a slot: the class and path of the state, and its field."""

    state_class: type | None
    state: str
    field: str


_NOBODY = _Owner(None, "", "")


def _visit(node, change: Callable, owner: _Owner = _NOBODY, path: str = ""):
    """A copy of a node, which has this path, with ``change(owner, slot)`` for slots."""
    if isinstance(node, Slot):
        return change(owner, node)
    is_child = lambda x: x is not node
    children, treedef = jax.tree_util.tree_flatten_with_path(node, is_child)
    if jax.tree_util.treedef_is_leaf(treedef):
        return node
    visited = []
    for keys, child in children:
        own = owner
        for key in keys:
            if isinstance(key, jax.tree_util.GetAttrKey):
                own = _Owner(type(node), path, key.name)
            elif isinstance(key, jax.tree_util.DictKey):
                own = _Owner(owner.state_class, path, str(key.key))
        visited.append(_visit(child, change, own, path + jax.tree_util.keystr(keys)))
    return treedef.unflatten(visited)


def _warn_of_sign(owner: _Owner, format_: MomentFormat) -> None:
    """Say that a moment of which nothing is known is stored with a sign."""
    if not getattr(format_, "signed", False):
        return
    name = "the state" if owner.state_class is None else owner.state_class.__name__
    warnings.warn(
        f"lowbit: moment {owner.field!r} of {name} is stored with a sign, because "
        "nothing is known of it; if it is a second moment, whose root divides the "
        "update, say so by lowbit_optax.declare_moments",
        stacklevel=2,
    )


def _check_reference(
    format_: MomentFormat, owner: _Owner, owners: Collection[_Owner]
) -> None:
    beside = {x.field for x in owners if x.state == owner.state} - {owner.field}
    if format_.reference is not None and format_.reference not in beside:
        raise ValueError(
            f"lowbit: moment {owner.field!r} is to be stored relative to "
            f"{format_.reference!r}, but in the same state are {sorted(beside)}; "
            "accepted is one of these, or relative_to=None"
        )


def _check_wide(slot: Slot, field: str, format_: MomentFormat) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(slot.tree)[0]:
        if hasattr(leaf, "dtype") and is_narrow(leaf.dtype):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"lowbit: the inner transformation keeps the moment {field!r} of "
                f"params{name} in {leaf.dtype}, and moments would store it as "
                f"{format_}. Leave mu_dtype (or accumulator_dtype) out, or name the "
                "moments that have a format, such as "
                "moments={'nu': lowbit_optax.block_quantized(8)}"
            )


def _format(moment) -> MomentFormat | None:
    if isinstance(moment, str) and moment == FLOAT32:
        return None
    if isinstance(moment, str) and moment == LOW:
        return LowMoments()
    if not isinstance(moment, MomentFormat):
        raise TypeError(
            f"lowbit: moments has {moment!r}, not a moment format such as "
            "lowbit_optax.block_quantized(8) or lowbit_optax.cast(jnp.bfloat16), and "
            "not 'low' or 'float32'"
        )
    return moment
