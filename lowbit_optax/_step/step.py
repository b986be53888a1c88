"""``Step``: the checked arguments of one step, which the engine reads leaf by leaf.

:meth:`.engine.Lowbit.open` creates a step. Its arrays are still in their stored form;
the engine joins, decodes or widens only the arrays that it needs. Kernels read the
stored arrays, so float32 masters and moments exist only for leaves without a kernel.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax

from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import (
    Draws,
    RandomBits,
    leaf_number,
    random_bits,
    random_keys,
)
from lowbit_optax._step import context, trees
from lowbit_optax._step.guard import Guard
from lowbit_optax._step.leaf import Landed, StoredLeaf, axes_of_shards, number_of_shard
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.seeds import Layer
from lowbit_optax._step.state import LowbitState
from lowbit_optax._step.trees import STATIC


@dataclasses.dataclass(frozen=True, eq=False)
class LeafStep:
    """Leaves, and the random bits for one step.

    Args:
      leaves: the leaves of the parameters, in the order of their tree.
      seed, count: uint32 scalars that determine the random bits.
      layer: the layer of stacked parameters that the leaves belong to; None for whole
        parameters.
    """

    leaves: list[StoredLeaf]
    seed: jax.Array
    count: jax.Array
    layer: Layer | None

    @property
    def names(self) -> list[str]:
        return [leaf.name for leaf in self.leaves]

    @property
    def params(self) -> list:
        return [leaf.param for leaf in self.leaves]

    @functools.cached_property
    def random(self) -> list[RandomBits]:
        """The random bits of each leaf."""
        numbers = list(map(leaf_number, self.names))
        if context.current().is_analysed:
            # In an analyzed step, random bits must not depend on the other leaves.
            bits = [random_bits(self.seed, self.count, [x])[0] for x in numbers]
        else:
            bits = random_bits(self.seed, self.count, numbers)
        if self.layer is not None:
            bits = map(self.layer.bits, bits, self.names, self.params)
        return [
            x.on_shard(number_of_shard(axes)) if axes else x
            for x, axes in zip(bits, map(axes_of_shards, self.params), strict=True)
        ]

    @functools.cached_property
    def draws(self) -> dict[str, Draws]:
        """The random numbers for moments, keyed by the path of the leaf."""
        return {
            leaf.name: Draws(bits, spare=leaf.spare_stream)
            for leaf, bits in zip(self.leaves, self.random, strict=True)
        }

    @functools.cached_property
    def keys(self) -> tuple[jax.Array, jax.Array]:
        """The random keys for kernels: two vectors with an entry per leaf."""
        numbers = list(map(leaf_number, self.names))
        keys = random_keys(self.seed, self.count, numbers)
        if self.layer is None:
            return keys
        return self.layer.keys(keys, self.names, self.params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Step(LeafStep):
    """The arguments of one step of a transformation, as a tree of its arrays.

    Args:
      leaves, seed, count, layer: see :class:`LeafStep`.
      treedef: the structure of the parameters.
      plan: how the inner state is stored.
      state: the stored state of the transformation.
      parts: the stored parts of its inner state.
      guard: decides whether the step happens.
      landing: whether the step returns new parameters or updates.
    """

    treedef: trees.PyTreeDef = dataclasses.field(metadata=STATIC)
    plan: MomentPlan = dataclasses.field(metadata=STATIC)
    state: LowbitState
    parts: list
    guard: Guard
    landing: Landing = dataclasses.field(metadata=STATIC)

    def tree(self, leaves: Sequence):
        """Return a tree with these leaves and the structure of the parameters."""
        return self.treedef.unflatten(leaves)

    @functools.cached_property
    def masters(self) -> list:
        """The master weights for the inner transformation."""
        return [leaf.master() for leaf in self.leaves]

    @functools.cached_property
    def grads(self) -> list:
        """The gradients for the inner transformation, in float32 and unscaled."""
        wide = [leaf.wide_grad() for leaf in self.leaves]
        if context.current().is_analysed:
            # In an analyzed step, gradients must not depend on each other.
            return list(map(context.layerwise(self.guard.unscaled), wide))
        return self.guard.unscaled(wide)

    def unscaled_leaf(self, number: int) -> StoredLeaf:
        """Return a leaf whose gradient the guard has unscaled; see ``grads``."""
        return dataclasses.replace(self.leaves[number], grad=self.grads[number])

    @property
    def on_changes(self) -> Callable | None:
        """The function that gets bitmaps of the changed weights, if there is one.

        A step that returns updates has no new weights, and a wrapper may still change
        its updates.
        """
        return context.current().on_changes if self.landing.is_direct else None

    @property
    def structure(self) -> trees.PyTreeDef:
        """The structure of the parts of the inner state."""
        return self.plan.structure(self.state.inner_state)

    def inner_update(self, update: Callable) -> tuple[typing.Any, typing.Any]:
        """Return ``(updates, new inner state)``.

        ``update`` is a function of float32 gradients, inner state and masters.
        """
        inner_state = self.structure.unflatten(self.plan.decode(self.parts))
        return update(self.tree(self.grads), inner_state, self.tree(self.masters))

    def parts_of_updates(self, updates) -> list:
        """Return the inner updates as a list, one for each leaf."""
        return trees.parts_of(self.names, self.treedef, updates, "inner updates")

    def landed(self, number: int, update, ahead=None) -> Landed:
        """Add an inner update to the master of a leaf, and store it.

        For ``ahead``, see :meth:`.WeightFormat.advance`.
        """
        leaf = self.leaves[number]
        passes_through = leaf.format is None
        if passes_through:
            # The sum must match apply_updates. XLA's CPU compiler does not contract a
            # product and a sum that a selection separates.
            update = self.guard.updates(update)
        landed = leaf.landed(update, self.random[number], self.landing, ahead)
        result = landed.result
        if self.landing.is_direct and not passes_through:
            result = self.guard.chosen(result, leaf.param)
        residual = self.guard.chosen(landed.residual, leaf.residual)
        return Landed(result, residual, landed.error)
