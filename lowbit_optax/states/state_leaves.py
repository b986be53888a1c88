"""Which parameter each leaf of an optimizer state belongs to, found by its path.

    params              ['dense']['kernel']
    state    [0].mu.codes_v2['dense']['kernel']
             `--field---'`------owner------'

Trees of moments, residuals and accumulators have the parameters' structure, whatever
wrappers surround them. So the path of a leaf of the state ends with the path of its
parameter.
"""

import dataclasses
import typing
from collections.abc import Iterator

import jax

from lowbit_optax.formats import quantized_tensor
from lowbit_optax.formats.block_quantized import QuantizedMoment, RelativeMoment

_CODES, _SCALES = zip(QuantizedMoment._fields, RelativeMoment._fields, strict=True)

KeyPath = tuple[typing.Any, ...]


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One array of an optimizer state.

    Args:
      path: the leaf's path in the state.
      leaf: a ShapeDtypeStruct or an array.
      owner: path of the parameter that the leaf belongs to; None for a leaf that
        belongs to no parameter, such as a count.
    """

    path: KeyPath
    leaf: typing.Any
    owner: KeyPath | None

    @property
    def field(self) -> KeyPath:
        """The path without the parameter's own: where in the state its tree is."""
        return self.path[: len(self.path) - len(self.owner or ())]

    @property
    def attributes(self) -> list[str]:
        """The names in ``field``, outermost first."""
        return [name for name in map(_name_of, self.field) if name is not None]

    @property
    def moment_field(self) -> str:
        """The state's field: ``mu`` for ``[0].mu.codes_v2``; "" if it has none."""
        names = self.attributes
        if names and names[-1] in _CODES + _SCALES:
            names = names[:-1]
        return names[-1] if names else ""

    @property
    def is_residual(self) -> bool:
        """Whether the leaf is a residual of a weight format."""
        return "residual" in self.attributes

    @property
    def is_codes(self) -> bool:
        """Whether the leaf is in a tree of codes: packed codes or an uncoded moment."""
        return any(name in _CODES for name in self.attributes[-1:])

    @property
    def is_scales(self) -> bool:
        """Whether the leaf is the scales of a quantised moment."""
        return any(name in _SCALES for name in self.attributes[-1:])


def state_leaves(params, state) -> Iterator[StateLeaf]:
    """The leaves of an optimizer state, in the order of its tree, with their owners.

    Args:
      params: tree of arrays or ShapeDtypeStructs; a QuantizedTensor is one parameter.
      state: the state of any transformation of these parameters.
    """
    with_path, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=quantized_tensor.is_quantized
    )
    owners = {path for path, _ in with_path}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        tails = (path[start:] for start in range(len(path) + 1))
        yield StateLeaf(path, leaf, next((x for x in tails if x in owners), None))


def _name_of(key) -> str | None:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return key.name
    if isinstance(key, jax.tree_util.DictKey):
        return str(key.key)
    return None
