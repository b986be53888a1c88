"""What one :func:`lowbit_optax.lowbit` call has chosen, and what follows for leaves."""

import dataclasses
import typing

import optax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees
from lowbit_optax._step.moment_slots import MomentChoice
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.quantized_weights import QuantizedWeights

Implementation = typing.Literal["xla", "pallas"]


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """The arguments of one :func:`lowbit_optax.lowbit` call."""

    inner: optax.GradientTransformation
    weights: WeightFormat
    moments: MomentChoice
    seed: int
    min_size: int
    implementation: Implementation | None = None

    def is_held(self, leaf) -> bool:
        """Whether a weight format holds this leaf; others pass through."""
        is_narrow_float = trees.is_float(leaf) and is_narrow(leaf.dtype)
        return trees.is_quantized(leaf) or is_narrow_float

    def formats_of(self, names, leaves) -> list[WeightFormat | None]:
        """The leaves' weight formats; None for those that pass through.

        Raises:
          TypeError, ValueError: naming a leaf that is no array or that its format
            cannot hold.
        """
        return [
            self._format_of(name, leaf)
            for name, leaf in zip(names, leaves, strict=True)
        ]

    def moment_plan(self, names, leaves, inner_state) -> MomentPlan:
        """How the inner transformation's moments are stored."""
        expected = trees.abstract(inner_state)
        return MomentPlan(
            self.inner, self.moments, names, leaves, expected, self.min_size
        )

    def _format_of(self, name: str, leaf) -> WeightFormat | None:
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise TypeError(f"lowbit: params{name} is {leaf!r}, not an array")
        if not self.is_held(leaf):
            return None
        if trees.is_quantized(leaf):
            with trees.naming(name):
                trees.check_quantized(leaf)
            is_chosen = isinstance(self.weights, QuantizedWeights)
            return self.weights if is_chosen else QuantizedWeights()
        why_not = self.weights.check(leaf.dtype)
        if why_not:
            raise ValueError(f"lowbit: params{name}: {why_not}")
        return self.weights.for_leaf(leaf.shape, leaf.dtype, self.min_size)
