"""Update with means: of the sums in accumulators, and of the last gradients.

To the inner transformation of ``lowbit`` the accumulators are moments. So one kernel
reads them and the last gradients, updates with the means, and leaves zeros.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._jaxprs.not_folded import not_folded
from lowbit_optax._numerics.random_bits import DrawsToNearest
from lowbit_optax._step import trees
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.guard import UNGUARDED
from lowbit_optax._step.moments import in_parallel_trees, leaf_by_leaf
from lowbit_optax._step.state import LowbitState
from lowbit_optax._step.stepper import Stepper
from lowbit_optax.formats import MomentFormat
from lowbit_optax.formats.moment_fields import declare_moments
from lowbit_optax.lpmm.sums import Sums, encoded


class Config(typing.Protocol):
    """What means depend on: see :func:`lowbit_optax.accumulate_gradients`."""

    @property
    def every(self) -> int:
        """How many gradients are summed."""
        ...

    @property
    def format(self) -> MomentFormat:
        """Of the accumulators."""
        ...

    @property
    def min_size(self) -> int:
        """Sums with fewer elements are float32."""
        ...


class MeansState(typing.NamedTuple):
    """State of an inner transformation that gets means, within a step.

    Args:
      inner_state: its own.
      accumulators: the sums of the gradients before the last.
    """

    inner_state: typing.Any
    accumulators: typing.Any


declare_moments(MeansState, averages=("accumulators",))


@dataclasses.dataclass(frozen=True)
class _Accumulators(MomentFormat):
    """A format of accumulators, with the size from which on they have it."""

    format: MomentFormat
    min_size: int

    @property
    def container(self):
        return self.format.container

    def for_leaf(self, shape, min_size):
        del min_size
        return self.format.for_leaf(shape, self.min_size)


@dataclasses.dataclass(frozen=True, eq=False)
class Means:
    """Means, for :func:`.step_wrapped`, of sums and the last gradients.

    Args:
      config: of the accumulation.
      sums: the accumulators and the last gradients, under the guard of the update.
      treedef: the structure of the parameters.
    """

    config: Config
    sums: Sums
    treedef: trees.PyTreeDef
    new: dict[int, typing.Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def seen(self):
        """The means in float32, a tree like the parameters."""
        share = jnp.float32(1 / self.config.every)
        means = [
            total * share if trees.is_float(leaf.param) else total
            for leaf, total in zip(self.sums.leaves, self.sums.totals(), strict=True)
        ]
        return self.treedef.unflatten(means)

    def among(self, lowbit: Lowbit, leaves: Sequence[int]) -> "_WithMeans":
        """The transformation of some leaves, of the last gradients."""
        return _WithMeans(lowbit, self, leaves)

    def emptied(self) -> list:
        """The accumulators after the update, those that no kernel has emptied too."""
        parts = list(self.sums.parts)
        for i, leaf in enumerate(self.sums.leaves):
            if i in self.new:
                parts[i] = self.new[i]
            elif parts[i] is not None:
                empty = encoded(
                    self.sums.formats[i],
                    not_folded(zeros(leaf.param)),
                    DrawsToNearest(),
                )
                parts[i] = self.sums.guard.chosen(empty, parts[i])
        return parts


@dataclasses.dataclass(frozen=True, eq=False)
class _WithMeans(Stepper):
    """A transformation whose gradients are the last ones of means.

    Args:
      lowbit: the transformation that updates with the means.
      means: of all leaves. What the accumulators become is left in ``means.new``.
      leaves: numbers of those that are updated.
    """

    lowbit: Lowbit
    means: Means
    leaves: Sequence[int]

    def init(self, params):
        """Its states are the transformation's."""
        return self.lowbit.init(params)

    def run(self, params, state, grads, landing, extra_args, guard=UNGUARDED):
        """See :meth:`.Stepper.run`."""
        names, _, treedef = trees.named_leaves(params)
        parts = [self.means.sums.parts[i] for i in self.leaves]
        format_ = self.means.config.format
        if isinstance(state, LowbitState):  # else the step says what it is
            accumulators = in_parallel_trees(format_, treedef, parts)
            inner_state = MeansState(state.inner_state, accumulators)
            state = state._replace(inner_state=inner_state)
        with_means = _with_means(self.means.config, self.lowbit)
        result, new = with_means.run(params, state, grads, landing, extra_args, guard)
        found = leaf_by_leaf(names, treedef, new.inner_state.accumulators, "sums")
        self.means.new.update(zip(self.leaves, map(uncontained, found), strict=True))
        return result, new._replace(inner_state=new.inner_state.inner_state)


def _with_means(config: Config, lowbit: Lowbit) -> Lowbit:
    """The transformation with accumulators among its moments, to update by means.

    It adds its gradient to the sums, hands the mean on, and leaves zeros.
    """
    within = optax.with_extra_args_support(lowbit.inner)

    def init(params):
        accumulators = jax.tree.map(_zeros_if_float, params)
        return MeansState(within.init(params), accumulators)

    def update(updates, state, params=None, **extra_args):
        share, zero = jnp.float32(1 / config.every), not_folded(jnp.float32(0))

        def mean(grad, total):
            return grad if total is None else (grad + total) * share

        means = jax.tree.map(mean, updates, state.accumulators)
        result, inner_state = within.update(
            means, state.inner_state, params, **extra_args
        )
        emptied = jax.tree.map(lambda x: jax.lax.full_like(x, zero), state.accumulators)
        return result, MeansState(inner_state, emptied)

    accumulators = {"accumulators": _Accumulators(config.format, config.min_size)}
    moments = dataclasses.replace(
        lowbit.moments,
        by_field={**lowbit.moments.by_field, **accumulators},
        is_default=lowbit.moments.is_default or lowbit.moments.is_float32,
    )
    inner = optax.GradientTransformationExtraArgs(init, update)
    return dataclasses.replace(lowbit, inner=inner, moments=moments)


def uncontained(part):
    """A part of a state's accumulators; the array alone of one without scales."""
    return part.codes if getattr(part, "scales", part) is None else part


def zeros(leaf) -> jax.Array:
    """Zeros in float32, of the shape of a leaf: an array or a QuantizedTensor.

    They lie on a mesh as the array does, whose zeros they are.
    """
    if trees.is_quantized(leaf):
        return jnp.zeros(leaf.shape, jnp.float32)
    return jnp.zeros_like(leaf, jnp.float32)


def _zeros_if_float(leaf):
    return zeros(leaf) if trees.is_float(leaf) else None
