"""What an optimizer can update by itself: some of the leaves, or a layer of a stack.

A *part* is some of the leaves. The transformation gets trees in which
``optax.MaskedNode`` takes the place of all other leaves, as inside ``optax.masked``,
and that part of its state which it would keep for them.

A stack can be updated layer by layer if every layer of its new values is computed from
that layer of its own gradient, parameter and state, and from numbers that depend on no
gradient (a count, a schedule).

Whether such a step computes what the step on all leaves does is read off their graphs
(:mod:`lowbit_optax.release.step_graph`).
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import optax

from lowbit_optax._step import trees
from lowbit_optax.release.step_graph import (
    StepGraph,
    WaitsForWholeGradient,
    check_same,
)
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss
from lowbit_optax.states.state_leaves import state_leaves

Key = typing.TypeVar("Key")
Found = typing.TypeVar("Found")

StateStacks = Mapping[str, Sequence[int]]
"""By path of a stack, the numbers of the state's leaves that are stacks of one layer
for each of its layers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some leaves, and the state that a transformation keeps for them.

    Args:
      leaves: of the parameters.
      structure: of the state for them.
      numbers: of its leaves, in the whole state.
      exclusive: those of the numbers that no other leaf needs, such as moments. The
        others, such as a count, are in every part.
    """

    leaves: Sequence[ParamLeaf]
    structure: typing.Any
    numbers: Sequence[int]
    exclusive: frozenset[int]


def found_or_waiting(
    find: Callable[[Key], Found], keys: Iterable[Key]
) -> tuple[dict[Key, Found], dict[Key, str]]:
    """What is found for some of the keys, and why the others wait."""
    found, reasons = {}, {}
    for key in keys:
        try:
            found[key] = find(key)
        except WaitsForWholeGradient as reason:
            reasons[key] = str(reason)
    return found, reasons


class Parts:
    """What a transformation can update by itself.

    Args:
      tx: the transformation.
      opt_state: its state.
      loss: traced.

    Attributes:
      whole: the part of all leaves.
    """

    def __init__(self, tx: optax.GradientTransformation, opt_state, loss: TracedLoss):
        self._tx, self._loss = tx, loss
        with_path, structure = jax.tree_util.tree_flatten_with_path(opt_state)
        self._state = [trees.abstract(x) for _, x in with_path]
        self._numbers = {
            jax.tree_util.keystr(path): n for n, (path, _) in enumerate(with_path)
        }
        of_params = self._params_of(loss.leaves)
        each = enumerate(state_leaves(of_params, opt_state))
        self._blanks = {n for n, part in each if part.kind == "blank"}
        numbers = range(len(self._state))
        self.whole = Part(loss.leaves, structure, numbers, frozenset(numbers))

    @functools.cached_property
    def whole_step(self) -> StepGraph:
        """The graph of the step on all leaves."""
        return self._step_on(self.whole)

    def part(self, leaves: Sequence[ParamLeaf], is_last: bool = False) -> Part:
        """The part of these leaves, on which a step is that part of the whole step.

        Args:
          leaves: of the parameters.
          is_last: whether what belongs to no leaf is taken from this part, too.

        Raises:
          WaitsForWholeGradient: if there is no such part.
        """
        structure, numbers = self._state_of(leaves)
        part = Part(leaves, structure, numbers, frozenset(numbers) - self._shared)
        graph, whole = self._step_on(part), self.whole_step
        _check_alone(part, whole)
        inputs = {whole.state[n]: x for n, x in zip(numbers, graph.state, strict=True)}
        pairs = [
            (whole.new_state[n], x)
            for n, x in zip(numbers, graph.new_state, strict=True)
            if is_last or n in part.exclusive
        ]
        for leaf in leaves:
            name = leaf.name
            inputs[whole.gradients[name]] = graph.gradients[name]
            inputs |= zip(whole.params[name], graph.params[name], strict=True)
            pairs += zip(whole.new_params[name], graph.new_params[name], strict=True)
        check_same(
            whole,
            pairs,
            inputs,
            differs="the optimizer updates it otherwise when it is alone",
            other_numbers="the optimizer updates it by other numbers when it is alone",
        )
        return part

    def _step_on(self, part: Part) -> StepGraph:
        return StepGraph(
            self._tx,
            self._loss.tree_of({x.name: x.gradient for x in part.leaves}),
            part.structure.unflatten([self._state[n] for n in part.numbers]),
            self._params_of(part.leaves),
        )

    def _params_of(self, leaves: Sequence[ParamLeaf]):
        return self._loss.tree_of({x.name: trees.abstract(x.value) for x in leaves})

    @functools.cached_property
    def _shared(self) -> frozenset[int]:
        """Numbers of the state that belongs to no leaf."""
        return frozenset(self._state_of([])[1])

    def _state_of(self, leaves: Sequence[ParamLeaf]) -> tuple[typing.Any, list[int]]:
        """Structure of the state for these leaves, and its numbers in the whole."""
        try:
            state = jax.eval_shape(self._tx.init, self._params_of(leaves))
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            # A mask or a label by the user's function may not know MaskedNode.
            raise WaitsForWholeGradient(
                "the optimizer has no state for it alone: its init, without the other "
                f"parameters, raises {type(error).__name__}({str(error)!r})"
            ) from error
        with_path, structure = jax.tree_util.tree_flatten_with_path(state)
        numbers = []
        for path, leaf in with_path:
            name = jax.tree_util.keystr(path)
            number = self._numbers.get(name)
            if number is None or not _is_like(self._state[number], leaf, leaf.shape):
                raise WaitsForWholeGradient(
                    "the optimizer's state for it alone is no part of its state: "
                    f"state{name} differs"
                )
            numbers.append(number)
        return structure, numbers

    def updated_by_layer(
        self, stacks: Iterable[str]
    ) -> tuple[StateStacks, dict[str, str]]:
        """Find which stacks can be updated layer by layer.

        The whole step is traced twice, with the stacks and with one layer in place of
        each. The graphs differ where a mask asks which leaves are matrices, for
        example.

        Args:
          stacks: paths of the leaves whose first axis is one of layers.

        Returns:
          The state's stacks for those that can, and why the others cannot, by path.

        Raises:
          ValueError: if the update of one leaf needs the gradients of another.
        """
        state_stacks, reasons = found_or_waiting(self._state_stacks, stacks)
        if not state_stacks:
            return state_stacks, reasons
        of_stacks = self.whole_step
        waiting = _refuse_several_gradients(of_stacks, state_stacks)
        grads, params = self._layers_of(state_stacks)
        state = jax.eval_shape(self._tx.init, params)
        of_layers = StepGraph(self._tx, grads, state, params)
        inputs = dict(zip(of_stacks.inputs, of_layers.inputs, strict=True))

        def compared(name: str) -> Sequence[int]:
            if name in waiting:
                raise WaitsForWholeGradient(waiting[name])
            numbers = state_stacks[name]
            results = (x.results_of(name, numbers) for x in (of_stacks, of_layers))
            state = [of_stacks.state[n] for n in numbers]
            check_same(
                of_stacks,
                list(zip(*results, strict=True)),
                inputs,
                differs="the update of a layer is not that of the stack",
                other_numbers="a number in its update depends on the stack's shape",
                stack=[of_stacks.gradients[name], *of_stacks.params[name], *state],
            )
            return numbers

        updated, why_not = found_or_waiting(compared, state_stacks)
        return updated, reasons | why_not

    def _state_stacks(self, name: str) -> list[int]:
        """Numbers of the state's leaves with a layer for each layer of a stack.

        These are the leaves that change their shape when the parameter is one layer.
        """
        _, params = self._layers_of([name])
        layers, structure = jax.tree.flatten(jax.eval_shape(self._tx.init, params))
        if structure != self.whole.structure:
            raise WaitsForWholeGradient(
                "the state of one of its layers has another structure"
            )
        (leaf,) = (leaf for leaf in self._loss.leaves if leaf.name == name)
        depth = leaf.value.shape[0]
        found = []
        for number, (stack, layer) in enumerate(zip(self._state, layers, strict=True)):
            if number in self._blanks or _is_like(stack, layer, layer.shape):
                continue
            if not _is_like(stack, layer, (depth, *layer.shape)):
                raise WaitsForWholeGradient(
                    f"its state {stack.dtype}{list(stack.shape)} is not a stack of "
                    "layers"
                )
            found.append(number)
        return found

    def _layers_of(self, names: Iterable[str]) -> tuple[typing.Any, typing.Any]:
        """Gradients and parameters, with one layer in place of each of these stacks."""

        def layer(x):
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

        leaves = self._loss.leaves
        grads = {leaf.name: leaf.gradient for leaf in leaves}
        params = {leaf.name: trees.abstract(leaf.value) for leaf in leaves}
        for name in names:
            grads[name] = layer(grads[name])
            params[name] = jax.tree.map(layer, params[name])
        return self._loss.tree_of(grads), self._loss.tree_of(params)


def _is_like(array, other, shape) -> bool:
    return array.shape == shape and array.dtype == other.dtype


def _check_alone(part: Part, whole: StepGraph) -> None:
    """Raise if gradients of the part are needed elsewhere, or others in the part."""
    names = {leaf.name for leaf in part.leaves}
    gradients = [x for name, x in whole.gradients.items() if name in names]
    others = [x for name, x in whole.gradients.items() if name not in names]
    results = [whole.new_state[n] for n in part.exclusive]
    rest = [x for n, x in enumerate(whole.new_state) if n not in part.exclusive]
    for name, arrays in whole.new_params.items():
        (results if name in names else rest).extend(arrays)
    if any(whole.depends_on(node, others) for node in results):
        raise WaitsForWholeGradient("its update needs the gradients of other leaves")
    if any(whole.depends_on(node, gradients) for node in rest):
        raise WaitsForWholeGradient(
            "its gradient is needed for other leaves, or for the rest of the state"
        )


def _refuse_several_gradients(
    graph: StepGraph, state_stacks: StateStacks
) -> dict[str, str]:
    """Raise if a result depends on several leaves' gradients, one of them stacked.

    Returns:
      By path, why a leaf has to wait: where else its own gradient is needed.
    """
    waiting = {}
    for owner, result in _results(graph, state_stacks):
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


def _results(graph: StepGraph, state_stacks: StateStacks):
    """All results, each with the path of its leaf; None for the rest of the state."""
    for name in [*state_stacks, *(x for x in graph.params if x not in state_stacks)]:
        for result in graph.results_of(name, state_stacks.get(name, ())):
            yield name, result
    owned = {n for numbers in state_stacks.values() for n in numbers}
    for number, result in enumerate(graph.new_state):
        if number not in owned:
            yield None, result
