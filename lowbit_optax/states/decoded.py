"""A run's parameters and state, read: masters, and the state with float32 moments.

    LowbitState(count, seed, residual, inner_state) --> inner_state, moments decoded

So the states of ``lowbit(adamw)`` and of ``adamw`` have one structure here. Each array
of the state becomes a :class:`Part`, which also knows how it is stored.
"""

import dataclasses
import typing

import jax
import optax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step import trees
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.state import LowbitState
from lowbit_optax.formats.base import MomentFormat, WeightFormat
from lowbit_optax.formats.leaves import join_leaf
from lowbit_optax.states.recorded import Recorded, is_recorded, recorded_state


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


def formats_of_parts(
    plan: MomentPlan,
) -> list[tuple[MomentFormat | None, MomentFormat | None]]:
    """Per part of an inner state, the formats as in :class:`Part`."""
    formats = [None if x is None else x.format for x in plan.storage]
    seconds = [
        None if x is None or x.reference is None else formats[x.reference]
        for x in plan.storage
    ]
    return list(zip(formats, seconds, strict=True))


def _decoded(node: Recorded, where: str, state, by_name):
    """The inner state of a LowbitState as Parts, and what it holds."""
    if not isinstance(state, LowbitState):
        raise ValueError(
            f"state{where} is {trees.describe(state)}, but from_tx keeps a LowbitState "
            "there: was it made by another transformation?"
        )
    params = [leaf.param for leaf in node.leaves("from_tx", by_name)]
    leaves = node.config.stored_leaves(node.names, params, node.treedef, state.residual)
    plan = node.plan(leaves)
    expected, treedef = jax.tree_util.tree_flatten_with_path(plan.expected)
    stored = plan.parts(state.inner_state)
    formats = formats_of_parts(plan)
    parts = []
    for (path, want), *part in zip(
        expected, plan.decode(stored), stored, formats, strict=True
    ):
        inner = f"{where}.inner_state{jax.tree_util.keystr(path)}"
        _check_shape(inner, part[0], want)
        parts.append(Part(*part))
    held = {x.name: Held(x.format, x.residual, state.count) for x in leaves}
    return treedef.unflatten(parts), held


def _check_shape(where: str, given, want) -> None:
    if getattr(given, "shape", ()) != want.shape:
        raise ValueError(
            f"state{where} is {trees.describe(given)}, but for these params from_tx "
            f"keeps {trees.describe(want)}"
        )
