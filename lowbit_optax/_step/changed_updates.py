"""Errors for wrappers that change an update of ``lowbit``.

An update of ``lowbit`` is the difference of two stored parameters, and the residual in
the new state belongs to the new parameter. A wrapper may return the update unchanged,
or skip the step by returning zeros and the old state. Any other update leads to a
parameter that does not match the residual, and small updates are lost.
:mod:`.wrapped` calls :func:`check_updates` with the graph of a wrapper's update.
"""

import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import (
    UNCHANGED,
    Call,
    Graph,
    Node,
    calls_between,
    is_constant_number,
    is_zero,
    scalar_of,
)
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees
from lowbit_optax._step.state import holds_lowbit
from lowbit_optax._step.stepper import update_p

_MOVES = UNCHANGED | {
    "concatenate", "device_put", "dynamic_slice", "optimization_barrier", "reshape",
    "rev", "slice", "split", "squeeze", "stack", "transpose", "unstack",
}  # fmt: skip
"""Operations that move the elements of arrays without changing them."""


class ChangedUpdateError(ValueError):
    """A wrapper changes updates that ``lowbit`` has already rounded.

    Args:
      params: dict from paths to parameters, for parameters with changed updates.
    """

    def __init__(self, params: dict):
        self.names = tuple(params)
        name, leaf = next(iter(params.items()))
        others = f" ({len(params) - 1} more)" if len(params) > 1 else ""
        super().__init__(
            "lowbit: a transformation after or around lowbit must not change updates, "
            f"but changes the update of params{name}, {trees.describe(leaf)}{others}. "
            "This update is rounded to match the residual, so a changed update would "
            "lose the low bits of the weights. Put the transformation inside, as in "
            "lowbit(optax.chain(optax.adamw(1e-3), optax.scale(0.5))). Around lowbit, "
            "use only wrappers that return its updates unchanged, or zeros together "
            "with the old state"
        )


def check_updates(
    graph: Graph, updates: Sequence[Node], nodes: Sequence, params
) -> None:
    """Raise ChangedUpdateError if a wrapper changes an update of ``lowbit``.

    Args:
      graph: the graph of the wrapper's update, in which each update of this package is
        a call of :data:`.stepper.update_p`.
      updates: the resulting updates, in the order of the parameters' leaves.
      nodes: the parameters in the graph, in the same order, each a tree of nodes.
      params: tree of the parameters.
    """
    changes = _Changes(graph)
    _raise_for(params, map(changes.changed, updates, nodes))


def check_state(state, params) -> None:
    """Raise ChangedUpdateError for the state of a wrapper that changes updates.

    This check finds ``optax.contrib.mechanize`` by its state, because JAX cannot trace
    its update if gradients and parameters differ in dtype.
    """
    if any(map(holds_lowbit, trees.all_of(optax.contrib.MechanicState, state))):
        _raise_for(params, itertools.repeat(True))


def _raise_for(params, is_changed: Iterable[bool]) -> None:
    """Raise an error if the update of a narrow or quantised parameter is changed."""
    leaves = trees.by_path(params).items()
    changed = {
        name: leaf
        for (name, leaf), changes in zip(leaves, is_changed, strict=False)
        if changes and (trees.is_quantized(leaf) or is_narrow(jnp.asarray(leaf).dtype))
    }
    if changed:
        raise ChangedUpdateError(changed)


class _Changes:
    """Decides which updates in a graph differ from the updates of ``lowbit``."""

    def __init__(self, graph: Graph):
        self._outputs = frozenset(graph.outputs)
        self._made_of_updates: set[Node] = set()
        """The updates of ``lowbit``, and all nodes that are computed from them."""
        self._stepped: set[Node] = set()
        """The parameters of all updates of ``lowbit`` whose new state is used."""
        for call in calls_between(graph.outputs, ()):
            if call.primitive is update_p:
                updates = call.outputs[: call.params["updates"]]
                _, state, params, *_ = call.params["structure"].unflatten(call.inputs)
                if holds_lowbit(state):
                    self._made_of_updates.update(updates)
                    self._stepped.update(
                        () if self._keeps_state(call) else jax.tree.leaves(params)
                    )
            elif not self._made_of_updates.isdisjoint(call.inputs):
                self._made_of_updates.update(call.outputs)

    def changed(self, update: Node, param) -> bool:
        """Return whether the update of a parameter differs from ``lowbit``'s update.

        A wrapper may freeze the parameter, but only together with the old state.
        """
        if update in self._made_of_updates:
            return not self._is_passed_on(update)
        return not self._stepped.isdisjoint(jax.tree.leaves(param))

    def _keeps_state(self, call: Call) -> bool:
        """Return whether the wrapper drops the new state of an update."""
        return self._outputs.isdisjoint(call.outputs[call.params["updates"] :])

    def _is_passed_on(self, node: Node, is_skipped: bool = False) -> bool:
        """Return whether a node is an unchanged update, or zeros in a skipped step.

        ``is_skipped`` is True if later operations replace the node by zeros in some
        steps.
        """
        if node not in self._made_of_updates:
            return is_zero(node)
        call = node.call
        assert call is not None, "an input of the graph is not computed from an update"
        operands = call.inputs
        if call.primitive is update_p:
            is_first = self._made_of_updates.isdisjoint(operands)
            return is_first and (self._keeps_state(call) or not is_skipped)
        # A cast to one of these dtypes keeps every bit of an update.
        is_wide = node.aval.dtype in (jnp.float32, jnp.float64)
        is_widened = call.primitive is p.convert_element_type_p and is_wide
        if call.primitive.name in _MOVES or is_widened:
            made = [x for x in operands if x in self._made_of_updates]
            return all(self._is_passed_on(x, is_skipped) for x in made)
        if call.primitive is p.select_n_p and scalar_of(operands[0]) is not None:
            return all(self._is_passed_on(x, True) for x in operands[1:])
        if call.primitive not in (p.add_p, p.mul_p):
            return False
        other, update = sorted(operands, key=self._made_of_updates.__contains__)
        if call.primitive is p.add_p:
            return _is_nothing(other) and self._is_passed_on(update, is_skipped)
        is_one = _is_one(other)
        is_factor = is_one or _is_truth_value(other)
        return is_factor and self._is_passed_on(update, is_skipped or not is_one)


def _is_one(node: Node) -> bool:
    scalar = scalar_of(node)
    return scalar is not None and is_constant_number(scalar) and scalar.constant == 1


def _is_nothing(node: Node) -> bool:
    """Return whether a node is 0 or a product with 0, as for a weight decay of 0."""
    call = node.call
    if call is not None and call.primitive in (p.convert_element_type_p, p.mul_p):
        return any(map(_is_nothing, call.inputs))
    return is_zero(node)


def _is_truth_value(node: Node) -> bool:
    """Return whether a node is a scalar, 0 or 1, that is cast from a bool."""
    scalar = scalar_of(node)
    while scalar is not None and scalar.aval.dtype != jnp.bool_:
        call = scalar.call
        is_cast = call is not None and call.primitive is p.convert_element_type_p
        scalar = call.inputs[0] if is_cast and call is not None else None
    return scalar is not None
