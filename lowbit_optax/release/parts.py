"""Some leaves of the parameters that an optimizer can update without the others.

The transformation gets trees in which ``optax.MaskedNode`` takes the place of all other
leaves, as inside ``optax.masked``, and that part of its state which it would keep for
them. Whether a step on a part computes what the step on all leaves does is read off
their graphs: both must consist of the same operations on the same inputs.
"""

import dataclasses
import typing
from collections.abc import Callable, Collection, Mapping

import jax
import optax

from lowbit_optax._jaxprs.graph import Node
from lowbit_optax._step import trees
from lowbit_optax.release.same_layers import (
    WaitsForWholeGradient,
    operation,
    same_constant,
)
from lowbit_optax.release.step_graph import StepGraph
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some leaves, and the state that a transformation keeps for them.

    Args:
      names: paths of the leaves.
      structure: of the state for them.
      numbers: of its leaves, in the whole state.
      own: those of the numbers that no other leaf needs, such as moments. The others,
        such as a count, are in every part.
    """

    names: frozenset[str]
    structure: typing.Any
    numbers: tuple[int, ...]
    own: frozenset[int]

    def tree(self, loss: TracedLoss, function: Callable[[ParamLeaf], typing.Any]):
        """A tree like the parameters, of a function of the part's leaves only."""
        masked = optax.MaskedNode()
        return loss.tree_of(lambda x: function(x) if x.name in self.names else masked)


class Parts:
    """Finds parts of a transformation's state, and whether steps on them are right.

    Args:
      tx: the transformation.
      opt_state: its state.
      loss: traced.
    """

    def __init__(self, tx: optax.GradientTransformation, opt_state, loss: TracedLoss):
        self._tx, self._loss = tx, loss
        with_path = jax.tree_util.tree_flatten_with_path(opt_state)[0]
        self._state = [trees.abstract(x) for _, x in with_path]
        self._numbers = {
            jax.tree_util.keystr(path): n for n, (path, _) in enumerate(with_path)
        }
        self._shared = frozenset(self._of([])[1])

    def part(self, names: Collection[str]) -> Part:
        """The part of these leaves.

        Raises:
          WaitsForWholeGradient: if the state for them is no part of the whole state.
        """
        structure, numbers = self._of(names)
        own = frozenset(numbers) - self._shared
        return Part(frozenset(names), structure, tuple(numbers), own)

    def check(self, part: Part, whole: StepGraph, is_last: bool = False) -> None:
        """Raise unless a step on a part is that part of the whole step.

        Args:
          part: of the leaves.
          whole: the graph of the step on all leaves.
          is_last: whether what belongs to no leaf is taken from this part, too.

        Raises:
          WaitsForWholeGradient: saying what differs.
        """
        graph = StepGraph(
            self._tx,
            part.tree(self._loss, lambda leaf: leaf.gradient),
            part.structure.unflatten([self._state[n] for n in part.numbers]),
            part.tree(self._loss, lambda leaf: trees.abstract(leaf.value)),
        )
        _check_alone(part, whole)
        inputs = {graph.gradients[name]: whole.gradients[name] for name in part.names}
        numbers = dict(enumerate(part.numbers))
        inputs |= {graph.state[a]: whole.state[b] for a, b in numbers.items()}
        pairs = [
            (graph.new_state[a], whole.new_state[b])
            for a, b in numbers.items()
            if is_last or b in part.own
        ]
        for name in part.names:
            inputs |= zip(graph.params_of(name), whole.params_of(name), strict=True)
            pairs += zip(
                graph.new_params_of(name), whole.new_params_of(name), strict=True
            )
        _check_same(pairs, inputs)

    def _of(self, names: Collection[str]) -> tuple[typing.Any, list[int]]:
        """Structure of the state for these leaves, and its numbers in the whole."""
        masked = optax.MaskedNode()
        params = self._loss.tree_of(
            lambda x: trees.abstract(x.value) if x.name in names else masked
        )
        try:
            state = jax.eval_shape(self._tx.init, params)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            # A mask or a label by the user's function may not know MaskedNode.
            raise WaitsForWholeGradient(
                f"the optimizer has no state for it alone: {error}"
            ) from error
        with_path, structure = jax.tree_util.tree_flatten_with_path(state)
        numbers = [self._numbers.get(jax.tree_util.keystr(p)) for p, _ in with_path]
        for number, (path, leaf) in zip(numbers, with_path, strict=True):
            like = None if number is None else self._state[number]
            if like is None or (like.shape, like.dtype) != (leaf.shape, leaf.dtype):
                raise WaitsForWholeGradient(
                    "the optimizer's state for it alone is no part of its state: "
                    f"state{jax.tree_util.keystr(path)} differs"
                )
        return structure, [n for n in numbers if n is not None]


def _check_alone(part: Part, whole: StepGraph) -> None:
    """Raise if gradients of the part are needed elsewhere, or others in the part."""
    gradients = [whole.gradients[name] for name in part.names]
    others = [x for name, x in whole.gradients.items() if name not in part.names]
    own = [whole.new_state[n] for n in part.own]
    for name in part.names:
        own += whole.new_params_of(name)
    if any(whole.depends_on(node, others) for node in own):
        raise WaitsForWholeGradient("its update needs the gradients of other leaves")
    rest = [x for n, x in enumerate(whole.new_state) if n not in part.own]
    for name in whole.gradients:
        if name not in part.names:
            rest += whole.new_params_of(name)
    if any(whole.depends_on(node, gradients) for node in rest):
        raise WaitsForWholeGradient(
            "its gradient is needed for other leaves, or for the rest of the state"
        )


def _check_same(pairs: list[tuple[Node, Node]], inputs: Mapping[Node, Node]) -> None:
    """Raise unless both of each pair are made by the same operations.

    Args:
      pairs: of values of the step on the part, and of the whole step.
      inputs: from the inputs of the one to those of the other.
    """
    waiting, compared = list(pairs), set()
    while waiting:
        a, b = pair = waiting.pop()
        if pair in compared:
            continue
        compared.add(pair)
        is_input = a in inputs or (b.call is None and b.constant is None)
        if is_input and inputs.get(a) is b:
            continue
        if is_input or operation(a) != operation(b) or a.aval.shape != b.aval.shape:
            raise WaitsForWholeGradient(
                "the optimizer updates it otherwise when it is alone"
            )
        if a.call is None or b.call is None:
            if not same_constant(a.constant, b.constant):
                raise WaitsForWholeGradient(
                    "the optimizer updates it by other numbers when it is alone"
                )
            continue
        waiting += zip(a.call.inputs, b.call.inputs, strict=True)
