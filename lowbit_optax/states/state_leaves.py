"""Find the parameter that an array of an optimizer state belongs to.

    params              ['dense']['kernel']
    state    [0].mu.codes_v2['dense']['kernel']
             `--field---'`------owner------'

Trees of moments, residuals and accumulators have the structure of the parameters, with
any wrappers around them. Therefore, the path of a leaf of the state ends with the path
of its parameter.
"""

import dataclasses
import typing
from collections.abc import Container, Iterator

import jax
import jax.numpy as jnp

from lowbit_optax._step import trees
from lowbit_optax._step.state import NO_RESIDUAL, NOT_HELD
from lowbit_optax.formats.block_quantized import QuantizedMoment

_CODES, _SCALES = QuantizedMoment._fields

_NAMED_KEYS = (jax.tree_util.GetAttrKey, jax.tree_util.DictKey)

KeyPath = tuple[typing.Any, ...]


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One array of an optimizer state.

    Args:
      path: path of the leaf in the state.
      leaf: a ShapeDtypeStruct or an array.
      owner: path of the leaf's parameter, as a string; None for a leaf without a
        parameter, such as a count.
      field: the path without the path of the parameter.
    """

    path: KeyPath
    leaf: typing.Any
    owner: str | None
    field: KeyPath

    @property
    def attributes(self) -> list[str]:
        """Names in ``field``, outermost first."""
        return [
            jax.tree_util.keystr((key,), simple=True)
            for key in self.field
            if isinstance(key, _NAMED_KEYS)
        ]

    @property
    def kind(self) -> typing.Literal["residual", "codes", "scales", "blank"] | None:
        """The part of a format that the leaf stores, or None if it has no format.

        A leaf in a tree of codes contains packed codes or a moment that is not encoded.
        A blank marks a parameter for which nothing is stored; see
        :mod:`lowbit_optax._step.state`.
        """
        names = self.attributes
        last = names[-1] if names else ""
        if self.owner is not None and self.leaf.dtype in (NO_RESIDUAL, NOT_HELD):
            return "blank"
        if "residual" in names or last == _SCALES:
            return "residual" if "residual" in names else "scales"
        return "codes" if last.startswith(_CODES) else None

    @property
    def moment_field(self) -> str:
        """Name of the field, such as ``mu`` in ``[0].mu.codes_v2``, or ""."""
        names = [x for x in self.attributes if not x.startswith((_CODES, _SCALES))]
        return names[-1] if names else ""


def state_leaves(params, state) -> Iterator[StateLeaf]:
    """Yield the leaves of an optimizer state, in the order of its tree.

    Args:
      params: tree of arrays or ShapeDtypeStructs; a QuantizedTensor is one parameter.
      state: the state of any transformation of these parameters.
    """
    names = set(trees.named_leaves(params)[0])
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        yield StateLeaf(path, leaf, *owner_and_field(path, names))


def owner_and_field(path: KeyPath, names: Container[str]) -> tuple[str | None, KeyPath]:
    """Split a path into the path of its parameter, or None, and the path before it."""
    for start in range(len(path) + 1):
        name = jax.tree_util.keystr(path[start:])
        if name in names:
            return name, path[:start]
    return None, path


def is_scalar_of_the_state(part: StateLeaf, shape: tuple[int, ...]) -> bool:
    """Return whether a leaf at a parameter's path is a count or hyperparameter."""
    if part.kind is not None:
        return False
    if not jnp.issubdtype(part.leaf.dtype, jnp.inexact):
        return True
    if part.leaf.shape:
        return False
    return bool(shape) or (not part.owner and "hyperparams" in part.attributes)
