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
from collections.abc import Iterator, Mapping

import jax
import optax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees
from lowbit_optax.formats.base import MomentFormat
from lowbit_optax.formats.block_quantized import LowMoments, block_quantized
from lowbit_optax.formats.moment_fields import fields_of

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


def _format(moment) -> MomentFormat | None:
    if isinstance(moment, str) and moment in ("float32", "low"):
        return LowMoments() if moment == "low" else None
    if not isinstance(moment, MomentFormat):
        raise TypeError(
            f"lowbit: moments has {moment!r}, not a moment format such as "
            "lowbit_optax.block_quantized(8) or lowbit_optax.cast(jnp.bfloat16), and "
            "not 'low' or 'float32'"
        )
    return moment


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A tree of moments in the inner state.

    It is not registered as a pytree node, so it is a leaf of the state.

    Args:
      tree: ShapeDtypeStructs, with the parameters' structure.
      state_class: of the state that holds it, which tells whether the field is known to
        be a running average.
      state: path of that state.
      field: the state's field that holds it.
      format: how its moments are stored; None for float32.
    """

    tree: typing.Any
    state_class: type | None = None
    state: str = ""
    field: str = ""
    format: MomentFormat | None = None

    def formatted(self, choice: MomentChoice) -> "Slot":
        """The slot with the format of its moments.

        Raises:
          ValueError: if a moment to be stored in a format is in 16 bits already.
        """
        field, known = self.field, fields_of(self.state_class)
        default = choice.averages if field in known.averages else None
        format_ = choice.by_field.get(field, default)
        if format_ is None:
            return self
        _check_wide(self, format_)
        is_second = known.is_second_moment(field)
        bound, is_equal = known.bounds.get(field), field in known.orthogonalized
        format_ = format_.for_field(field, is_second, bound, is_equal)
        is_known = is_second is not None or field in known.averages
        if not is_known and getattr(format_, "signed", False):
            owner = self.state_class.__name__ if self.state_class else "the state"
            warnings.warn(
                f"lowbit: moment {field!r} of {owner} is stored with a sign, because "
                "nothing is known of it; if it is a second moment, whose root divides "
                "the update, say so by lowbit_optax.formats.register_moments",
                stacklevel=2,
            )
        return dataclasses.replace(self, format=format_)


def find_slots(
    inner: optax.GradientTransformation, choice: MomentChoice, expected
) -> tuple[trees.PyTreeDef, list]:
    """Structure and leaves of an inner state, with a :class:`Slot` for each tree.

    Raises:
      ValueError: if the moments cannot be found, if ``choice`` names a field that holds
        no moments, or if they cannot be stored in their format.
    """
    try:
        state = optax.tree.map_params(inner, Slot, expected, is_leaf=lambda _: True)
    except Exception as error:
        # map_params calls the inner init with placeholders instead of parameters, and
        # what an init that does not accept them raises may be anything.
        if not choice.is_default:
            raise ValueError(
                "lowbit: moments cannot be found in this inner transformation's state, "
                f"because optax.tree.map_params fails on it ({type(error).__name__}: "
                f"{error}); accepted for it is moments='float32'"
            ) from error
        state = expected
    leaves = list(_leaves(state, Slot(None)))
    fields = {x.field for x in leaves if isinstance(x, Slot)}
    unknown = sorted(set(choice.by_field) - fields)
    if unknown:
        raise NoSuchMomentError(
            f"moments names {unknown[0]!r}, but the inner transformation's state has "
            f"these moments: {sorted(fields)}"
        )
    leaves = [x.formatted(choice) if isinstance(x, Slot) else x for x in leaves]
    slots = [x for x in leaves if isinstance(x, Slot)]
    for slot in slots:
        beside = {x.field for x in slots if x.state == slot.state} - {slot.field}
        reference = slot.format and slot.format.reference
        if reference is not None and reference not in beside:
            raise ValueError(
                f"lowbit: moment {slot.field!r} is to be stored relative to "
                f"{reference!r}, but in the same state are {sorted(beside)}; accepted "
                "is one of these, or relative_to=None"
            )
    return jax.tree.structure(state), leaves


def _leaves(node, owner: Slot, path: str = "") -> Iterator:
    """The leaves of a state's node; slots with the names of the owner that holds it."""
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
                within = Slot(None, type(node), path, key.name)
            elif isinstance(key, jax.tree_util.DictKey):
                within = Slot(None, owner.state_class, path, str(key.key))
        yield from _leaves(child, within, path + jax.tree_util.keystr(keys))


def _check_wide(slot: Slot, format_: MomentFormat) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(slot.tree)[0]:
        if hasattr(leaf, "dtype") and is_narrow(leaf.dtype):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"lowbit: the inner transformation keeps the moment {slot.field!r} of "
                f"params{name} in {leaf.dtype}, and moments would store it as "
                f"{format_}. Leave mu_dtype (or accumulator_dtype) out, or name the "
                "moments that have a format, such as "
                "moments={'nu': lowbit_optax.block_quantized(8)}"
            )
