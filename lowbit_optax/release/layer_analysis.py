"""Which leaves can be updated layer by layer, before other gradients are there.

A stacked leaf can be updated inside the backward loop if every layer of its new values
is computed from that layer of its own gradient, parameter and state, and from numbers
that depend on no gradient (a count, a schedule). To find out, the whole step is traced
twice, with the stacks and with one layer in place of each, and the two graphs are
compared (:mod:`lowbit_optax.release.step_graph`). They differ where a mask asks which
leaves are matrices, for example.
"""

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import optax

from lowbit_optax._step import trees
from lowbit_optax.release.step_graph import (
    SameLayers,
    StateStacks,
    StepGraph,
    WaitsForWholeGradient,
)


class LayerAnalysis(typing.NamedTuple):
    """What :func:`analyse_layers` found, by path of a stacked leaf.

    Args:
      state_stacks: of each leaf that can be updated layer by layer, the numbers of the
        state's leaves that are stacks of one layer for each of its layers.
      reasons: why the other leaves cannot.
    """

    state_stacks: Mapping[str, tuple[int, ...]]
    reasons: Mapping[str, str]


def analyse_layers(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    stacked: Sequence[str],
    whole_step: Callable[[], StepGraph],
) -> LayerAnalysis:
    """Find which of the stacked leaves can be updated layer by layer.

    Args:
      tx: the transformation.
      grads, state, params: shapes and dtypes of its arguments.
      stacked: paths of the leaves whose first axis is one of layers.
      whole_step: gives the graph of a step on these arguments.

    Raises:
      ValueError: if the update of one leaf needs the gradients of another.
    """
    state_stacks, reasons = {}, {}
    for name in stacked:
        try:
            state_stacks[name] = _state_stacks(tx, state, params, name)
        except WaitsForWholeGradient as reason:
            reasons[name] = str(reason)
    if not state_stacks:
        return LayerAnalysis(state_stacks, reasons)
    of_stacks = whole_step()
    waiting = _refuse_several_gradients(of_stacks, state_stacks)
    layers = _layers_of(params, state_stacks)
    of_layers = StepGraph(
        tx,
        _layers_of(grads, state_stacks),
        jax.eval_shape(tx.init, layers),
        layers,
    )
    updated = {}
    for name in state_stacks:
        try:
            if name in waiting:
                raise WaitsForWholeGradient(waiting[name])
            _compare_layers(name, of_stacks, of_layers, state_stacks)
            updated[name] = state_stacks[name]
        except WaitsForWholeGradient as reason:
            reasons[name] = str(reason)
    return LayerAnalysis(updated, reasons)


def _state_stacks(tx, state, params, name: str) -> tuple[int, ...]:
    """Numbers of the state's leaves with a layer for each layer of a stacked leaf.

    These are the leaves that change their shape when the parameter is one layer.
    """
    names, leaves, _ = trees.named_leaves(params)
    depth = jax.tree.leaves(leaves[names.index(name)])[0].shape[0]
    state_of_layer = jax.eval_shape(tx.init, _layers_of(params, [name]))
    stacks, structure = jax.tree.flatten(state)
    if jax.tree.structure(state_of_layer) != structure:
        raise WaitsForWholeGradient(
            "the state of one of its layers has another structure"
        )
    found = []
    layers = jax.tree.leaves(state_of_layer)
    for number, (stack, layer) in enumerate(zip(stacks, layers, strict=True)):
        if stack.shape == layer.shape and stack.dtype == layer.dtype:
            continue
        if stack.shape != (depth, *layer.shape) or stack.dtype != layer.dtype:
            raise WaitsForWholeGradient(
                f"its state {stack.dtype}{list(stack.shape)} is not a stack of layers"
            )
        found.append(number)
    return tuple(found)


def _layers_of(tree, names: Iterable[str]):
    """A tree like the parameters, with one layer in place of each of these leaves."""
    names = set(names)

    def layer(name, leaf):
        if name not in names:
            return leaf
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), leaf)

    found, leaves, treedef = trees.named_leaves(tree)
    return treedef.unflatten(map(layer, found, leaves))


def _refuse_several_gradients(
    graph: StepGraph, state_stacks: StateStacks
) -> dict[str, str]:
    """Raise if a result depends on several leaves' gradients, one of them stacked.

    Returns:
      By path, why a leaf has to wait: where else its own gradient is needed.
    """
    waiting = {}
    for owner, result in graph.results(state_stacks):
        needed = {
            name
            for name, gradient in graph.gradients.items()
            if graph.depends_on(result, [gradient])
        }
        others = sorted(needed - {owner})
        if not others or state_stacks.keys().isdisjoint([*others, owner]):
            continue
        if owner is None and len(needed) == 1:
            waiting[others[0]] = "the state keeps a number made of its whole gradient"
            continue
        what = "its state" if owner is None else f"the update of params{owner}"
        other = next((name for name in others if name in state_stacks), others[0])
        raise ValueError(
            "release: the optimizer needs the gradients of several leaves at once: "
            f"{what} depends on the gradient of params{other}. Inside the backward "
            "pass each gradient is forgotten after its leaf is updated. In place of "
            "optax.clip_by_global_norm, give max_grad_norm= to value_and_update. "
            "Anything else that needs all gradients (apply_if_finite, a norm in the "
            "state) works with lowbit_optax.step, without a release"
        )
    return waiting


def _compare_layers(
    name: str, of_stacks: StepGraph, of_layers: StepGraph, state_stacks: StateStacks
) -> None:
    """Raise :class:`WaitsForWholeGradient` unless a leaf's layers are updated alone."""
    same = SameLayers(of_stacks, of_layers, of_stacks.inputs_of(name, state_stacks))
    for stack, layer in zip(
        of_stacks.results_of(name, state_stacks),
        of_layers.results_of(name, state_stacks),
        strict=True,
    ):
        same.check(stack, layer)
