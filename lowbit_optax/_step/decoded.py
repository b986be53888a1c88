"""A run's parameters and state, read: masters, and the state with float32 moments.

    LowbitState(count, seed, residual, inner_state) --> inner_state, moments decoded

So the states of ``lowbit(adamw)`` and of ``adamw`` have one structure here. Each array
of the state becomes a :class:`Part`, which also knows how it is stored.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step import trees
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.prepared import checked_residuals
from lowbit_optax._step.recorded import Recorded, is_recorded, recorded_state
from lowbit_optax._step.state import LowbitState
from lowbit_optax.formats.base import MomentFormat, WeightFormat
from lowbit_optax.formats.leaves import join_leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """An array of a state; neither an array nor a pytree node itself.

    Args:
      value: in float32, if it is a moment that is stored in a format.
      stored: as the state has it.
      formats: the moment format, and that of the moment which it is relative to; both
        None for an array that no format stores.
    """

    value: typing.Any
    stored: typing.Any
    formats: tuple[MomentFormat | None, MomentFormat | None] = (None, None)


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """A parameter that a ``lowbit`` holds in a format.

    Args:
      format, residual: of the leaf.
      count: the steps that its ``lowbit`` has taken.
    """

    format: WeightFormat | None
    residual: typing.Any
    count: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class DecodedRun:
    """What :func:`decoded_run` reads.

    Args:
      params: leaves of the parameters, by path.
      held: those that a ``lowbit`` got; their format is None if they pass through.
      state: the state, with a :class:`Part` for every array.
    """

    params: dict[str, typing.Any]
    held: dict[str, Held]
    state: typing.Any

    def master(self, name: str):
        """The weight of a leaf in float32; wide floats and integers as they are."""
        leaf = self.params[name]
        held = self.held.get(name)
        if held is not None and held.format is not None:
            return join_leaf(held.format, leaf, held.residual)
        if trees.is_quantized(leaf):
            return leaf.dequantize()
        is_few_bits = trees.is_float(leaf) and is_narrow(leaf.dtype)
        return to_float32(leaf) if is_few_bits else leaf


def decoded_run(
    tx: optax.GradientTransformation, params: optax.Params, state: optax.OptState
) -> DecodedRun:
    """Read the parameters and the state of a transformation.

    Args:
      tx: any optax transformation.
      params, state: as in optax; arrays.

    Raises:
      ValueError, TypeError: if the state is not one of these, naming the leaf.
    """
    names, leaves, _ = trees.named_leaves(params)
    by_name = dict(zip(names, leaves, strict=True))
    recorded = recorded_state(tx, params)
    nodes, treedef = jax.tree_util.tree_flatten_with_path(recorded, is_recorded)
    try:
        parts = treedef.flatten_up_to(state)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"state is not one of from_tx for these params: {error}. Given "
            f"{jax.tree.structure(state)}"
        ) from error
    held, read = {}, []
    for (path, node), part in zip(nodes, parts, strict=True):
        where = jax.tree_util.keystr(path)
        if isinstance(node, Recorded):
            inner_state, own = _decoded(node, where, part, by_name)
            read.append(inner_state)
            held.update(own)
        else:
            _check_shape(where, part, node)
            read.append(Part(part, part))
    return DecodedRun(by_name, held, treedef.unflatten(read))


def plan_of(
    recorded: Recorded, leaves: list, formats: list[WeightFormat | None]
) -> MomentPlan:
    """How a ``lowbit`` stores the state of its inner transformation.

    Args:
      recorded: the ``lowbit``.
      leaves, formats: its parameters, arrays or shapes, and their weight formats.
    """
    masters = [
        trees.abstract(leaf)
        if format_ is None
        else jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        for leaf, format_ in zip(leaves, formats, strict=True)
    ]
    config = recorded.config
    expected = jax.eval_shape(config.inner.init, recorded.treedef.unflatten(masters))
    return config.moment_plan(recorded.names, leaves, expected)


def formats_of_parts(
    plan: MomentPlan,
) -> list[tuple[MomentFormat | None, MomentFormat | None]]:
    """Per part of an inner state, the formats as in :class:`Part`."""
    stored = plan.describe(plan.expected)
    formats = [None if how is None else how.format for how in stored]
    seconds = [
        None if how is None or how.reference is None else formats[how.reference]
        for how in stored
    ]
    return list(zip(formats, seconds, strict=True))


def _decoded(node: Recorded, where: str, state, by_name):
    """The inner state of a LowbitState as Parts, and what it holds."""
    if not isinstance(state, LowbitState):
        raise ValueError(
            f"state{where} is {trees.describe(state)}, but from_tx keeps a LowbitState "
            "there: was it made by another transformation?"
        )
    leaves = node.parameters("from_tx", by_name)
    formats = node.config.formats_of(node.names, leaves)
    residuals = checked_residuals(
        node.config, node.names, leaves, node.treedef, formats, state.residual
    )
    plan = plan_of(node, leaves, formats)
    expected, treedef = jax.tree_util.tree_flatten_with_path(plan.expected)
    stored = treedef.flatten_up_to(plan.from_parallel_trees(state.inner_state))
    values = treedef.flatten_up_to(plan.decode(state.inner_state))
    parts = []
    for (path, want), *part in zip(
        expected, values, stored, formats_of_parts(plan), strict=True
    ):
        inner = f"{where}.inner_state{jax.tree_util.keystr(path)}"
        _check_shape(inner, part[0], want)
        parts.append(Part(*part))
    held = {
        name: Held(format_, residual, state.count)
        for name, format_, residual in zip(node.names, formats, residuals, strict=True)
    }
    return treedef.unflatten(parts), held


def _check_shape(where: str, given, want) -> None:
    if getattr(given, "shape", ()) != want.shape:
        raise ValueError(
            f"state{where} is {trees.describe(given)}, but for these params from_tx "
            f"keeps {trees.describe(want)}"
        )
