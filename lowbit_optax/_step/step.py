"""One step's arguments, leaf by leaf: checked, but not joined, decoded or widened yet.

A backend asks for what it needs. Kernels read leaves as they are stored, so masters and
float32 moments exist only for leaves without a kernel.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Sequence

import jax

from lowbit_optax._numerics.even_words import phase_at
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import (
    Draws,
    RandomBits,
    leaf_number,
    moment_draws,
    random_bits,
    random_keys,
)
from lowbit_optax._step import context, trees
from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax._step.layers import Layer
from lowbit_optax._step.leaf import Landed, StoredLeaf, axes_of_shards, number_of_shard
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.state import LowbitState


@dataclasses.dataclass(frozen=True, eq=False)
class LeafStep:
    """Leaves, and the random bits of a step over them.

    Args:
      leaves: of the parameters, in the order of their tree.
      seed, count: of the random bits, uint32 scalars.
      layer: which layer of stacked parameters the leaves are; None for whole ones.
    """

    leaves: list[StoredLeaf]
    seed: jax.Array
    count: jax.Array
    layer: Layer | None

    @property
    def names(self) -> list[str]:
        """The paths of the leaves."""
        return [leaf.name for leaf in self.leaves]

    @property
    def params(self) -> list:
        """The parameters."""
        return [leaf.param for leaf in self.leaves]

    @functools.cached_property
    def random(self) -> list[RandomBits]:
        """The random bits of each leaf."""
        return random_of_leaves(self.names, self.params, self.seed, self.count)

    @functools.cached_property
    def phase(self) -> jax.Array:
        """Of the moments that are rounded evenly, see :class:`.Draws`."""
        return phase_at(self.seed, self.count)

    @functools.cached_property
    def keys(self) -> tuple[jax.Array, jax.Array]:
        """Their keys in the form that kernels take, a vector of each."""
        numbers = list(map(leaf_number, self.names))
        keys = random_keys(self.seed, self.count, numbers)
        if self.layer is None:
            return keys
        return self.layer.keys(keys, self.names, self.params)


@dataclasses.dataclass(frozen=True, eq=False)
class Step(LeafStep):
    """A step of a transformation.

    Args:
      leaves, seed, count, layer: as of :class:`LeafStep`.
      treedef: the structure of the parameters.
      plan: how the inner state is stored.
      state: of the transformation, as it is stored.
      parts: the parts of its inner state, as they are stored.
      guard: decides whether the step happens.
      landing: how new parameters take the old ones' places.
    """

    treedef: trees.PyTreeDef
    plan: MomentPlan
    state: LowbitState
    parts: list
    guard: Guard | Unguarded
    landing: Landing

    def for_another_branch(self) -> "Step":
        """The same step for another branch of the program; they share no values."""
        return dataclasses.replace(self)

    def tree(self, leaves: Sequence):
        """A tree with the parameters' structure and these leaves."""
        return self.treedef.unflatten(leaves)

    @functools.cached_property
    def masters(self) -> list:
        """The weights that the inner transformation sees."""
        return [leaf.master() for leaf in self.leaves]

    @functools.cached_property
    def grads(self) -> list:
        """The gradients that it sees: float32, and unscaled by the guard."""
        wide = [leaf.wide_grad() for leaf in self.leaves]
        if context.current().is_analysed:
            # No gradient must look as if it depended on another one.
            return list(map(self.guard.unscaled_alone, wide))
        return self.guard.unscaled(wide)

    @property
    def structure(self) -> trees.PyTreeDef:
        """The structure of the inner state's parts."""
        return self.plan.structure(self.state.inner_state)

    def moments(self, wanted: Collection[int] | None = None) -> list:
        """The parts of the inner state, those that are wanted in float32."""
        return self.plan.decode(self.parts, wanted)

    def inner_update(self, update: Callable) -> tuple[list, typing.Any]:
        """``(updates of the leaves, new inner state)``.

        ``update`` takes float32 gradients, inner state and masters.
        """
        inner_state = self.structure.unflatten(self.moments())
        updates, new_state = update(
            self.tree(self.grads), inner_state, self.tree(self.masters)
        )
        return self.parts_of_updates(updates), new_state

    def parts_of_updates(self, updates) -> list:
        """The inner updates of the leaves."""
        return trees.parts_of(self.names, self.treedef, updates, "inner updates")

    def landed(self, number: int, update, ahead=None) -> Landed:
        """Add an inner update to a leaf's master and store it.

        ``ahead`` is as of :meth:`WeightFormat.advance`.
        """
        leaf, is_direct = self.leaves[number], self.landing.is_direct
        passes_through = leaf.format is None
        if passes_through:
            # The sum is that of apply_updates, which XLA's CPU compiler does not
            # contract with a product behind a selection either.
            update = self.guard.updates(update)
        landed = leaf.landed(update, self.random[number], self.landing, ahead)
        result = landed.result
        if is_direct and not passes_through:
            result = self.guard.chosen(result, leaf.param)
        residual = self.guard.chosen(landed.residual, leaf.residual)
        return Landed(result, residual, landed.error)

    @functools.cached_property
    def draws(self) -> dict[str, Draws]:
        """By the paths of the leaves, the random numbers for their moments."""
        phase = self.phase if self.plan.rounds_evenly else None
        return draws_of_moments(self.leaves, self.random, phase)


class Stepped(typing.NamedTuple):
    """The results of a step.

    Args:
      results: per leaf, the new parameter, or the update where updates are asked for.
      residuals: per leaf, the new residual; None where there is none.
      inner_state: the inner state as it is stored.
    """

    results: list
    residuals: list
    inner_state: typing.Any


def random_of_leaves(names, params, seed, count) -> list[RandomBits]:
    """The random bits of each leaf at one step."""
    numbers, around = list(map(leaf_number, names)), context.current()
    if around.is_analysed:
        # Those of one leaf must not look as if they depended on what others there are.
        bits = [random_bits(seed, count, [number])[0] for number in numbers]
    else:
        bits = random_bits(seed, count, numbers)
    if around.layer is not None:
        bits = map(around.layer.bits, bits, names, params)
    return [
        x.on_shard(number_of_shard(axes)) if axes else x
        for x, axes in zip(bits, map(axes_of_shards, params), strict=True)
    ]


def draws_of_moments(
    leaves: Sequence[StoredLeaf], random: Sequence[RandomBits], phase=None
) -> dict[str, Draws]:
    """By the paths of leaves, the random numbers for their moments."""
    return {
        leaf.name: moment_draws(bits, leaf.spare_stream, phase)
        for leaf, bits in zip(leaves, random, strict=True)
    }
