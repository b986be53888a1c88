"""One step's arguments, leaf by leaf: checked, but not joined, decoded or widened yet.

A backend asks for what it needs. Kernels read leaves as they are stored, so masters and
float32 moments exist only for leaves without a kernel.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._numerics.random_bits import (
    Draws,
    RandomBits,
    leaf_number,
    moment_draws,
    random_bits,
    random_keys,
)
from lowbit_optax._step import context, trees
from lowbit_optax._step.guard import Guard, Unguarded, neutral_updates, unless_still
from lowbit_optax._step.layers import Layer
from lowbit_optax._step.leaf import (
    Landed,
    StoredLeaf,
    axes_of_shards,
    check_grad,
    check_residual,
    format_of,
    number_of_shard,
)
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.state import LowbitState
from lowbit_optax.formats.base import residual_bits_read

if typing.TYPE_CHECKING:
    from lowbit_optax._numerics.landing import Landing
    from lowbit_optax._step.engine import Lowbit


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A step of a transformation.

    Args:
      leaves: of the parameters, in the order of their tree.
      treedef: the structure of the parameters.
      plan: how the inner state is stored.
      state: of the transformation, as it is stored.
      parts: the parts of its inner state, as they are stored.
      guard: decides whether the step happens.
      landing: how new parameters take the old ones' places.
      layer: the layer that the leaves are of stacked parameters; None for whole ones.
    """

    leaves: list[StoredLeaf]
    treedef: trees.PyTreeDef
    plan: MomentPlan
    state: LowbitState
    parts: list
    guard: Guard | Unguarded
    landing: "Landing"
    layer: Layer | None

    def again(self) -> "Step":
        """The same step, for another branch of the program.

        What the one computes, the other cannot read.
        """
        return dataclasses.replace(self)

    def tree(self, leaves: Sequence):
        """A tree with the parameters' structure and these leaves."""
        return self.treedef.unflatten(leaves)

    @property
    def names(self) -> list[str]:
        """The paths of the leaves."""
        return [leaf.name for leaf in self.leaves]

    @property
    def params(self) -> list:
        """The parameters."""
        return [leaf.param for leaf in self.leaves]

    @functools.cached_property
    def masters(self) -> list:
        """The weights that the inner transformation sees."""
        return [leaf.master() for leaf in self.leaves]

    @functools.cached_property
    def grads(self) -> list:
        """The gradients that it sees: float32, and unscaled by the guard."""
        return self.guard.unscaled([leaf.wide_grad() for leaf in self.leaves])

    @property
    def structure(self) -> trees.PyTreeDef:
        """The structure of the inner state's parts."""
        return self.plan.structure(self.state.inner_state)

    def moments(self, wanted: Collection[int] | None = None) -> list:
        """The parts of the inner state, those that are wanted in float32."""
        return self.plan.decode(self.parts, wanted)

    def inner_update(self, update: Callable) -> tuple[list, typing.Any]:
        """Call the inner transformation.

        Args:
          update: of the inner transformation, from float32 gradients, its state and the
            masters.

        Returns:
          ``(updates, new inner state)`` in float32, the updates as a list.
        """
        inner_state = self.structure.unflatten(self.moments())
        updates, new_state = update(
            self.tree(self.grads), inner_state, self.tree(self.masters)
        )
        return self.parts_of_updates(updates), new_state

    def parts_of_updates(self, updates) -> list:
        """The inner updates of the leaves."""
        return trees.parts_of(self.names, self.treedef, updates, "inner updates")

    def error_parts(self) -> list[int | None]:
        """Per leaf, the part of the inner state that takes its rounding errors."""
        return error_parts(self.leaves, self.plan)

    def landed(self, number: int, update, still=None) -> Landed:
        """Add the inner update to the master of a leaf and store it.

        Args:
          number: of the leaf.
          update: its inner update.
          still: whether the leaf stays as it is, a truth value; None if it does not.
        """
        leaf, is_direct = self.leaves[number], self.landing.is_direct
        landed = leaf.landed(update, self.random[number], self.landing)
        unchanged = leaf.param if is_direct else neutral_updates(landed.result)
        result = unless_still(still, landed.result, unchanged)
        residual = unless_still(still, landed.residual, leaf.residual)
        if is_direct:
            result = self.guard.chosen(result, leaf.param)
        residual = self.guard.chosen(residual, leaf.residual)
        return Landed(result, residual, landed.error)

    @functools.cached_property
    def random(self) -> list[RandomBits]:
        """The random bits of each leaf."""
        seed, count = self.state.seed, self.state.count
        return random_of_leaves(self.names, self.params, seed, count)

    @functools.cached_property
    def draws(self) -> dict[str, Draws]:
        """By the paths of the leaves, the random numbers for their moments."""
        return draws_of_moments(self.leaves, self.random)

    @functools.cached_property
    def keys(self) -> tuple[jax.Array, jax.Array]:
        """The keys of the random bits, in the form that kernels take."""
        numbers = list(map(leaf_number, self.names))
        keys = random_keys(self.state.seed, self.state.count, numbers)
        if self.layer is None:
            return keys
        return self.layer.keys(keys, self.names, self.params)


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


def open_step(
    config: "Lowbit",
    params: optax.Params | None,
    state: LowbitState,
    grads: optax.Updates,
    guard: Guard | Unguarded,
    landing: "Landing",
) -> Step:
    """Check the arguments of a step, and take them apart into leaves.

    Args:
      config: of the transformation.
      params, state, grads: as in optax.
      guard, landing: see :class:`Step`.

    Raises:
      TypeError, ValueError: naming the leaf at which the arguments do not fit together.
    """
    if params is None:
        raise ValueError(
            "lowbit: update needs params; call tx.update(grads, state, params)"
        )
    if not isinstance(state, LowbitState):
        raise TypeError(
            f"lowbit: state is a {type(state).__name__}, not a LowbitState; was it "
            "made by this transformation's init?"
        )
    names, params, treedef = trees.named_leaves(params)
    leaves = stored_leaves(config, names, params, treedef, state.residual)
    given = trees.parts_of(names, treedef, grads, "grads")
    for leaf, grad in zip(leaves, given, strict=True):
        check_grad(leaf.name, grad, leaf.param)
    leaves = [
        dataclasses.replace(leaf, grad=grad)
        for leaf, grad in zip(leaves, given, strict=True)
    ]
    plan = plan_of(config, leaves, treedef)
    return Step(
        leaves,
        treedef,
        plan,
        state,
        plan.parts(state.inner_state),
        guard,
        landing,
        context.current().layer,
    )


def plan_of(config: "Lowbit", leaves: list[StoredLeaf], treedef) -> MomentPlan:
    """How the state of the inner transformation of these leaves is stored."""
    masters = [
        trees.abstract(leaf.param)
        if leaf.format is None
        else jax.ShapeDtypeStruct(leaf.param.shape, jnp.float32)
        for leaf in leaves
    ]
    expected = jax.eval_shape(config.inner.init, treedef.unflatten(masters))
    return moment_plan(config, leaves, expected)


def moment_plan(
    config: "Lowbit", leaves: Sequence[StoredLeaf], inner_state
) -> MomentPlan:
    """How an inner state, of arrays or shapes, is stored."""
    return MomentPlan(
        config.inner,
        config.moments,
        [leaf.name for leaf in leaves],
        [leaf.param for leaf in leaves],
        trees.abstract(inner_state),
        config.min_size,
    )


def stored_leaves(
    config: "Lowbit", names: list[str], params: list, treedef, residual
) -> list[StoredLeaf]:
    """The leaves of parameters with their residuals, after checking that they fit."""
    formats = [
        format_of(config.weights, config.min_size, name, param)
        for name, param in zip(names, params, strict=True)
    ]
    container = config.weights.container
    if type(residual) is not container:
        raise ValueError(
            f"lowbit: the state's residuals are {type(residual).__name__}, but "
            f"{config.weights} keeps {container.__name__}: was this state made by a "
            "transformation with other weights?"
        )
    residuals = [None] * len(params)
    if residual:
        residuals = trees.parts_of(names, treedef, residual[0], "residuals")
    leaves = list(map(StoredLeaf, names, params, formats, residuals))
    for leaf in leaves if residual else ():
        check_residual(leaf)
    return leaves


def error_parts(leaves: Sequence[StoredLeaf], plan: MomentPlan) -> list[int | None]:
    """Per leaf, the part of the inner state that takes its rounding errors, if any.

    Raises:
      ValueError: if no leaf has such a moment. One that is frozen needs none.
    """
    fields = [leaf.format and leaf.format.error_into for leaf in leaves]
    parts = {x: plan.parts_in(x) for x in set(fields) if x is not None}
    for leaf, field in zip(leaves, fields, strict=True):
        if field is not None and not parts[field] and leaf.param.shape:
            raise no_moment_for_errors(leaf.name, field)
    return [
        None if field is None else parts[field].get(leaf.name)
        for leaf, field in zip(leaves, fields, strict=True)
    ]


def no_moment_for_errors(name: str, field: str) -> ValueError:
    """The error of a leaf that has no moment to take its rounding errors."""
    return ValueError(
        f"lowbit: error_into is {field!r}, but the inner transformation has no float32 "
        f"moment of that name for params{name}; accepted is the field of its momentum, "
        "such as 'mu' of optax.adamw or 'trace' of optax.sgd(..., momentum=0.9), or "
        "error_into=None"
    )


def random_of_leaves(names, params, seed, count) -> list[RandomBits]:
    """The random bits of each leaf at one step."""
    numbers = list(map(leaf_number, names))
    if context.current().is_analysed:
        # Those of one leaf must not look as if they depended on what others there are.
        bits = [random_bits(seed, count, [number])[0] for number in numbers]
    else:
        bits = random_bits(seed, count, numbers)
    layer, axes = context.current().layer, map(axes_of_shards, params)
    if layer is not None:
        bits = map(layer.bits, bits, names, params)
    return [
        x.on_shard(number_of_shard(own)) if own else x
        for x, own in zip(bits, axes, strict=True)
    ]


def draws_of_moments(
    leaves: Sequence[StoredLeaf], random: Sequence[RandomBits]
) -> dict[str, Draws]:
    """By the paths of leaves, the random numbers for their moments."""
    return {
        leaf.name: moment_draws(bits, residual_bits_read(leaf.format, leaf.param))
        for leaf, bits in zip(leaves, random, strict=True)
    }
