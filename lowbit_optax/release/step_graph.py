"""The graph of an optimizer's step: which results depend on which gradients."""

from collections.abc import Iterable, Mapping, Sequence

import jax
import optax

from lowbit_optax._jaxprs.graph import Graph, Node
from lowbit_optax._step import context, trees
from lowbit_optax._step.context import LAYERWISE
from lowbit_optax.transformations.lowbit import step

StateStacks = Mapping[str, Sequence[int]]
"""By path of a stacked parameter, the numbers of the state's leaves that are stacks of
one layer for each of its layers."""


class StepGraph:
    """The graph of a step, and its inputs and results by leaf.

    Args:
      tx: the transformation.
      grads, state, params: shapes and dtypes of the step's arguments.

    Attributes:
      gradients: by path, the leaves' gradients.
      state, new_state: the state's leaves before and after the step.
      input_numbers: of the nodes that are inputs.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
    ):
        with context.analysis():
            closed, shapes = jax.make_jaxpr(
                lambda grads, state, params: step(tx, params, state, grads),
                return_shape=True,
            )(grads, state, params)
        graph = Graph(closed, opaque={LAYERWISE})
        names, leaves, _ = trees.named_leaves(params)
        gradients, self.state, self._params = _split_like(
            graph.inputs, (grads, state, params)
        )
        self._new_params, self.new_state = _split_like(graph.outputs, shapes)
        if len(self.new_state) != len(self.state):
            raise ValueError(
                "release: the optimizer's update returns a state of another structure"
            )
        self.gradients = dict(zip(names, gradients, strict=True))
        self.input_numbers = {node: n for n, node in enumerate(graph.inputs)}
        numbers = iter(range(len(self._params)))
        self._arrays = {
            name: [next(numbers) for _ in jax.tree.leaves(leaf)]
            for name, leaf in zip(names, leaves, strict=True)
        }
        # By node, a bit for every input that it depends on.
        self._dependencies = {node: 1 << n for node, n in self.input_numbers.items()}

    def inputs_of(self, name: str, state_stacks: StateStacks) -> list[Node]:
        """A leaf's gradient, its arrays and its stacks of the state."""
        stacks = [self.state[n] for n in state_stacks[name]]
        return [self.gradients[name], *self.params_of(name), *stacks]

    def params_of(self, name: str) -> list[Node]:
        """A leaf's arrays."""
        return [self._params[n] for n in self._arrays[name]]

    def new_params_of(self, name: str) -> list[Node]:
        """A leaf's new arrays."""
        return [self._new_params[n] for n in self._arrays[name]]

    def results_of(self, name: str, state_stacks: StateStacks) -> list[Node]:
        """A leaf's new arrays and new stacks of the state."""
        stacks = [self.new_state[n] for n in state_stacks[name]]
        return [*self.new_params_of(name), *stacks]

    def results(self, state_stacks: StateStacks) -> list[tuple[str | None, Node]]:
        """All results, each with the path of the leaf that it belongs to.

        What belongs to no leaf, the rest of the state, has None for a path.
        """
        found: list[tuple[str | None, Node]] = [
            (name, node)
            for name in state_stacks
            for node in self.results_of(name, state_stacks)
        ]
        for name in self._arrays:
            if name not in state_stacks:
                found += [(name, node) for node in self.new_params_of(name)]
        owned = {n for numbers in state_stacks.values() for n in numbers}
        rest = (x for n, x in enumerate(self.new_state) if n not in owned)
        return found + [(None, node) for node in rest]

    def depends_on(self, node: Node, inputs: Iterable[Node]) -> bool:
        """Whether a value is computed from any of these inputs."""
        wanted = 0
        for each in inputs:
            wanted |= self._dependencies[each]
        return bool(self._dependencies_of(node) & wanted)

    def _dependencies_of(self, node: Node) -> int:
        waiting = [node]
        while waiting:
            node = waiting[-1]
            if node in self._dependencies:
                waiting.pop()
                continue
            inputs = node.call.inputs if node.call is not None else ()
            missing = [x for x in inputs if x not in self._dependencies]
            if missing:
                waiting.extend(missing)
                continue
            bits = 0
            for x in inputs:
                bits |= self._dependencies[x]
            self._dependencies[node] = bits
        return self._dependencies[node]


def _split_like(nodes: Iterable[Node], trees: Sequence) -> list[list[Node]]:
    """One list of nodes for every tree, as long as the tree has leaves."""
    remaining = iter(nodes)
    return [[next(remaining) for _ in jax.tree.leaves(tree)] for tree in trees]
