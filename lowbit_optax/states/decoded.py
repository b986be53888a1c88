"""Decode the parameters of a run to masters, and the moments to float32.

    LowbitState(count, seed, residual, inner_state) --> inner_state, moments decoded

This gives the states of ``lowbit(adamw)`` and ``adamw`` the same structure. Each array
of the state becomes a :class:`Part`, which also contains the stored array.

Only optax's wrappers define how they nest states. Therefore, ``init`` of the whole
transformation is called in a context in which ``lowbit`` returns a :class:`Recorded`:

    chain(clip, masked(lowbit(adamw)))   -->   (EmptyState, MaskedState(Recorded))
"""

import dataclasses
import typing
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step import context, trees
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.leaf import StoredLeaf
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.state import LowbitState, check_made_by
from lowbit_optax._types import Transformation
from lowbit_optax.formats.base import MomentFormat
from lowbit_optax.formats.leaves import join_leaf
from lowbit_optax.states.host_memory import on_device
from lowbit_optax.states.state_leaves import KeyPath


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """Arguments of one call of ``lowbit``'s ``init``, as a pytree without leaves.

    Args:
      config: the arguments of ``lowbit``.
      names, treedef: paths and structure of the parameters that its wrappers pass to
        it.
    """

    config: Lowbit
    names: list[str]
    treedef: trees.PyTreeDef

    def leaves(self, what: str, by_name: Mapping[str, typing.Any]) -> list[StoredLeaf]:
        """Return the leaves that were passed to ``lowbit``, without residuals.

        ``by_name`` contains all parameters, and ``what`` names the transformation in
        errors. A ValueError is raised if a wrapper passes other parameters, as
        ``optax.flatten`` does, or if the weight format does not support a leaf.
        """
        unknown = [name for name in self.names if name not in by_name]
        if unknown:
            raise ValueError(
                f"wrappers in {what} must keep the structure of params, but one passes "
                f"params{unknown[0]} to lowbit, which params do not contain"
            )
        return self.config.leaves(self.names, [by_name[name] for name in self.names])

    def plan(self, leaves: list[StoredLeaf]) -> MomentPlan:
        return self.config.plan_of(leaves, self.treedef)


def recorded_nodes(
    tx: Transformation, params
) -> tuple[list[tuple[KeyPath, typing.Any]], trees.PyTreeDef]:
    """Return the nodes of a new state of ``tx`` with paths, and their structure.

    A node is a :class:`Recorded`, which replaces a LowbitState, or a ShapeDtypeStruct.
    Parameters may be arrays or ShapeDtypeStructs. A parameter that belongs to two
    ``lowbit`` transformations raises a ValueError.
    """

    def record(config: Lowbit, params) -> Recorded:
        names, _, treedef = trees.named_leaves(params)
        return Recorded(config, names, treedef)

    # optax.inject_hyperparams calls its function with tracers, which a config contains.
    with jax.check_tracer_leaks(False):
        state = context.init_with(record, tx, trees.abstract(params))
    is_recorded = lambda x: isinstance(x, Recorded)
    nodes, treedef = jax.tree_util.tree_flatten_with_path(state, is_recorded)
    named = [(path, x.names) for path, x in nodes if is_recorded(x)]
    check_one_state_each(named, "put both optimizers into one lowbit(optax.chain(...))")
    return nodes, treedef


def check_one_state_each(
    states: Iterable[tuple[KeyPath, Iterable[str]]], advice: str
) -> None:
    """Raise a ValueError if a parameter belongs to more than one ``lowbit``.

    Args:
      states: paths of states of ``lowbit``, with the parameters of each.
      advice: the remedy that the error gives.
    """
    owners: dict[str, str] = {}
    for path, names in states:
        where = f"state{jax.tree_util.keystr(path)}"
        for name in names:
            first = owners.setdefault(name, where)
            if first != where:
                raise ValueError(
                    f"params{name} must have one lowbit state, but {first} and {where} "
                    f"are both states of it; {advice}"
                )


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Wraps an array of a state, so that JAX treats both of its forms as one leaf.

    Args:
      value: the array, decoded to float32 if it is a moment in a format.
      stored: the array in the state.
      format: format of ``stored``; None if the inner transformation made it.
    """

    value: typing.Any
    stored: typing.Any
    format: MomentFormat | None = None

    def copied(self) -> "Part":
        """Return a copy, so that a step can donate both arrays."""
        return Part(jnp.array(self.value), jnp.array(self.stored), self.format)

    @property
    def shape(self) -> tuple[int, ...]:
        return jnp.shape(self.value)

    @property
    def dtype(self) -> np.dtype:
        return jnp.result_type(self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class DecodedRun:
    """Result of :func:`decoded_run`.

    Args:
      params: leaves of the parameters, by path.
      leaves: leaves that belong to a ``lowbit``, by path.
      noise: for each of these leaves, the seed argument of its ``lowbit``, and the
        count and the seed in the state.
      state: the state, with a :class:`Part` for every array.
    """

    params: dict[str, typing.Any]
    leaves: dict[str, StoredLeaf]
    noise: dict[str, tuple[int, jax.Array, jax.Array]]
    state: typing.Any

    @property
    def steps(self) -> Part | None:
        """Number of steps that a ``lowbit`` has made; None without a ``lowbit``."""
        counts = [count.astype(jnp.int32) for _, count, _ in self.noise.values()]
        return Part(counts[0], counts[0]) if counts else None

    def master(self, name: str):
        """Return a weight in float32; wide floats and integers do not change."""
        param, leaf = self.params[name], self.leaves.get(name)
        if leaf is not None and leaf.format is not None:
            return join_leaf(leaf.format, param, leaf.residual)
        if trees.is_quantized(param):
            return param.dequantize()
        return to_float32(param) if trees.is_narrow_array(param) else param


def decoded_run(tx: Transformation, params, state) -> DecodedRun:
    """Decode the parameters and state of any transformation. Errors name the leaf."""
    by_name = trees.by_path(params)
    nodes, treedef = recorded_nodes(tx, params)
    try:
        stored = treedef.flatten_up_to(jax.tree.map(on_device, state))
    except (ValueError, TypeError):
        check_made_by("convert: from_tx", tx, params, state)
        raise
    leaves, noise, parts = {}, {}, []
    for (path, node), part in zip(nodes, stored, strict=True):
        where = f"state{jax.tree_util.keystr(path)}"
        if isinstance(node, Recorded):
            of_node, inner_state = _decoded(node, where, part, by_name)
            leaves |= {leaf.name: leaf for leaf in of_node}
            drawn = node.config.seed, part.count, part.seed
            noise |= dict.fromkeys(node.names, drawn)
            parts.append(inner_state)
        else:
            _check_shape(where, part, node)
            parts.append(Part(part, part))
    return DecodedRun(by_name, leaves, noise, treedef.unflatten(parts))


def _decoded(node: Recorded, where: str, state, by_name):
    """Return the leaves of a LowbitState, and its inner state as Parts."""
    if not isinstance(state, LowbitState):
        raise ValueError(
            f"{where} must be a LowbitState, got {trees.describe(state)}; pass the "
            "transformation that made the state as from_tx"
        )
    params = [leaf.param for leaf in node.leaves("from_tx", by_name)]
    leaves = node.config.stored_leaves(node.names, params, node.treedef, state.residual)
    plan = node.plan(leaves)
    stored = plan.parts(state.inner_state)
    expected, treedef = jax.tree_util.tree_flatten_with_path(plan.expected)
    values = plan.decode(stored)
    for (path, want), value in zip(expected, values, strict=True):
        _check_shape(f"{where}.inner_state{jax.tree_util.keystr(path)}", value, want)
    formats = [storage and storage.format for storage in plan.storage]
    parts = map(Part, values, stored, formats)
    return leaves, treedef.unflatten(parts)


def _check_shape(where: str, given, want) -> None:
    if getattr(given, "shape", ()) != want.shape:
        raise ValueError(
            f"{where} must be {trees.describe(want)} for these params and from_tx, got "
            f"{trees.describe(given)}"
        )
