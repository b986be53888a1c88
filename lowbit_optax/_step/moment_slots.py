"""``find_slots``: finds the moments in an inner state, and chooses their formats.

:class:`.moments.MomentPlan` calls :func:`find_slots` with the inner transformation and
a :class:`MomentChoice`, which :func:`lowbit_optax.lowbit` creates from ``moments``. The
inner ``init`` returns trees with the structure of the parameters, such as ``mu``,
``nu`` or ``trace``, and ``optax.tree.map_params`` finds these trees. A moment is a
float32 array in such a tree with the shape of its parameter. Each tree becomes a
:class:`Slot`. The class of the state determines whether a field is known to be a
running average.
"""

import dataclasses
import typing
import warnings
from collections.abc import Iterator, Mapping

import jax
import optax

from lowbit_optax._step import trees
from lowbit_optax.formats.base import MomentFormat
from lowbit_optax.formats.block_quantized import block_quantized
from lowbit_optax.formats.moment_fields import fields_of

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
