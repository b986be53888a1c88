"""The choices of one :func:`lowbit_optax.lowbit` call, and the formats of each leaf."""

import dataclasses

import jax
import optax

from lowbit_optax._numerics.float_layouts import NARROW_DTYPES, is_narrow
from lowbit_optax._step import trees
from lowbit_optax._step.known_averages import start_of
from lowbit_optax._step.moment_slots import MomentChoice
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.shards import check_shards
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.quantized_weights import QuantizedWeights
from pallas_kernels.platforms import Implementation


class InexactWeightsError(ValueError):
    """The weight format rounds what the inner transformation needs exact."""


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """The arguments of one :func:`lowbit_optax.lowbit` call.

    Args:
      inner: the wrapped optax transformation.
      weights: format of the parameters that are narrow floats.
      moments: which moments are stored in which format.
      seed: of stochastic rounding.
      min_size: leaves with fewer elements may be stored in a simpler format.
      implementation: see :data:`pallas_kernels.platforms.Implementation`.
    """

    inner: optax.GradientTransformation
    weights: WeightFormat
    moments: MomentChoice
    seed: int
    min_size: int
    implementation: Implementation = None

    def is_held(self, leaf) -> bool:
        """Whether this leaf is stored in a weight format; other leaves pass through."""
        is_narrow_float = trees.is_float(leaf) and is_narrow(leaf.dtype)
        return trees.is_quantized(leaf) or is_narrow_float

    def formats_of(self, names, leaves) -> list[WeightFormat | None]:
        """The weight format of each leaf; None for leaves that pass through.

        Raises:
          TypeError, ValueError: naming a leaf that is not an array, or that the weight
            format cannot hold.
        """
        return [
            self._format_of(name, leaf)
            for name, leaf in zip(names, leaves, strict=True)
        ]

    def in_container(self, residuals):
        """A tree of residuals in the container type of the weight format."""
        container = self.weights.container
        return container(residuals) if container._fields else container()

    def check_start(self, names, leaves, formats, inner_state) -> None:
        """Raise where the inner state would measure distances in rounding noise.

        Args:
          names, leaves, formats: of the parameters.
          inner_state: of the inner transformation, before encoding.

        Raises:
          InexactWeightsError: naming the leaf and the state's field.
        """
        has_start = lambda x: start_of(type(x)) is not None
        starts = {}
        for state in jax.tree.leaves(inner_state, is_leaf=has_start):
            field = start_of(type(state))
            if field is not None:
                kept = trees.named_leaves(getattr(state, field))[0]
                starts |= dict.fromkeys(kept, f"{type(state).__name__}.{field}")
        for name, leaf, format_ in zip(names, leaves, formats, strict=True):
            if format_ is None or format_.is_exact(leaf.dtype) or name not in starts:
                continue
            raise InexactWeightsError(
                "lowbit: the inner transformation learns its step size from how far "
                f"weights are from where they started ({starts[name]}), and would take "
                f"the rounding of params{name}, {trees.describe(leaf)}, by "
                f"{self.weights} for distance; accepted are "
                "weights=lowbit_optax.extra_bits(), which keeps all bits of float32, "
                "and master_copy()"
            )

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
            if trees.is_float(leaf) and leaf.dtype.itemsize < 4:
                raise ValueError(
                    f"lowbit: params{name} is {leaf.dtype}, which no weight format "
                    f"holds; accepted are {', '.join(map(str, NARROW_DTYPES))}, and "
                    "float32"
                )
            return None
        if trees.is_quantized(leaf):
            with trees.naming(name):
                trees.check_quantized(leaf)
            is_chosen = isinstance(self.weights, QuantizedWeights)
            return self.weights if is_chosen else QuantizedWeights()
        why_not = self.weights.check(leaf.dtype)
        if why_not:
            raise ValueError(f"lowbit: params{name}: {why_not}")
        format_ = self.weights.for_leaf(leaf.shape, leaf.dtype, self.min_size)
        if format_.width:
            check_shards(name, leaf, format_.width)
        return format_
