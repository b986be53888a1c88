"""Some leaves of the parameters that an optimizer can update without the others.

The transformation gets trees in which ``optax.MaskedNode`` takes the place of all other
leaves, as inside ``optax.masked``, and that part of its state which it would keep for
them. Whether a step on a part computes what the step on all leaves does is read off
their graphs: both must consist of the same operations on the same inputs.

``Optimizer`` takes such steps, with the transformation at a state.
"""

import dataclasses
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import jax
import optax

from lowbit_optax._jaxprs.graph import Node
from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step import trees
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax.loss_scaling.guarded import guarded
from lowbit_optax.release.host_memory import on_device
from lowbit_optax.release.step_graph import (
    StepGraph,
    WaitsForWholeGradient,
    operation,
    same_constant,
)
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss
from lowbit_optax.transformations.lowbit import step
from pallas_kernels.platforms import refused_gpu


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

    def leaves(self, loss: TracedLoss) -> list[ParamLeaf]:
        """Its leaves in a loss."""
        return [leaf for leaf in loss.leaves if leaf.name in self.names]


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
        leaves = part.leaves(self._loss)
        graph = StepGraph(
            self._tx,
            self._loss.tree_of({x.name: x.gradient for x in leaves}),
            part.structure.unflatten([self._state[n] for n in part.numbers]),
            self._loss.tree_of({x.name: trees.abstract(x.value) for x in leaves}),
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
        leaves = [leaf for leaf in self._loss.leaves if leaf.name in names]
        params = self._loss.tree_of({x.name: trees.abstract(x.value) for x in leaves})
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


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """A transformation at a state.

    Args:
      tx: the transformation, without a loss scale.
      state_leaves: of its state.
      state_treedef: the state's structure.
      state_stacks: as in :class:`lowbit_optax.release.plan.ReleasePlan`.
      transform_gradient: applied to every gradient before the step.
    """

    tx: optax.GradientTransformation
    state_leaves: Sequence[jax.Array]
    state_treedef: typing.Any
    state_stacks: Mapping[str, tuple[int, ...]]
    transform_gradient: Callable[[jax.Array], jax.Array]

    def step(
        self,
        loss: TracedLoss,
        grads: Mapping[str, jax.Array],
        params: Mapping[str, typing.Any],
        state: Mapping[int, jax.Array],
        guard: Guard | Unguarded,
    ) -> tuple[dict[str, typing.Any], list]:
        """One step with some of the gradients, and zeros for the others.

        Args:
          loss: whose parameters are updated.
          grads: by path.
          params: by path, leaves in place of the loss's own, such as one layer.
          state: by number, leaves in place of the state's own.
          guard: whether the step happens.

        Returns:
          ``(params, state_leaves)``: by path, and a list.
        """
        state_leaves = [
            state[n] if n in state else on_device(x)
            for n, x in enumerate(self.state_leaves)
        ]
        new_params, new_state = self._step(
            loss.tree_of({x.name: params.get(x.name, x.value) for x in loss.leaves}),
            jax.tree.unflatten(self.state_treedef, state_leaves),
            loss.tree_of({x.name: self._gradient(x, grads) for x in loss.leaves}),
            guard,
        )
        names = [leaf.name for leaf in loss.leaves]
        new_leaves = loss.treedef.flatten_up_to(new_params)
        return dict(zip(names, new_leaves, strict=True)), jax.tree.leaves(new_state)

    def step_on(
        self,
        part: Part,
        loss: TracedLoss,
        grads: Mapping[str, jax.Array],
        guard: Guard | Unguarded,
    ) -> tuple[dict[str, typing.Any], dict[int, jax.Array]]:
        """One step on some of the parameters.

        Args:
          part: the parameters.
          loss: whose parameters they are.
          grads: theirs, by path; zeros where there is none.
          guard: whether the step happens.

        Returns:
          ``(params, state_leaves)``: by path, and by number.
        """
        leaves = part.leaves(loss)
        new_params, new_state = self._step(
            loss.tree_of({leaf.name: leaf.value for leaf in leaves}),
            part.structure.unflatten([self.state_leaves[n] for n in part.numbers]),
            loss.tree_of({leaf.name: self._gradient(leaf, grads) for leaf in leaves}),
            guard,
        )
        found = zip(loss.leaves, loss.treedef.flatten_up_to(new_params), strict=True)
        params = {leaf.name: new for leaf, new in found if leaf.name in part.names}
        return params, dict(zip(part.numbers, jax.tree.leaves(new_state), strict=True))

    def writes_into_stacks(self, guard: Guard | Unguarded) -> bool:
        """Whether kernels may write a layer into its stacks.

        Where results are chosen after a step, the stacks must not have been changed.
        """
        is_lowbit = isinstance(stepper_of(self.tx), Lowbit)
        can_skip = is_lowbit or isinstance(guard, Unguarded)
        return can_skip and refused_gpu() is None

    def _step(self, params, state, grads, guard: Guard | Unguarded):
        if isinstance(guard, Unguarded):
            return step(self.tx, params, state, grads)
        return guarded(self.tx, params, state, grads, guard, REPLACE, {})

    def _gradient(self, leaf: ParamLeaf, grads: Mapping[str, jax.Array]) -> jax.Array:
        if leaf.name not in grads:
            return leaf.zero_gradient()
        return self.transform_gradient(grads[leaf.name])

    def stacks(self, leaves: Sequence[ParamLeaf]) -> list[jax.Array]:
        """The arrays of these leaves, and then the stacks of the state for them."""
        arrays = [x for leaf in leaves for x in leaf.arrays]
        return arrays + [self.state_leaves[n] for n in self.stack_numbers(leaves)]

    def stack_numbers(self, leaves: Sequence[ParamLeaf]) -> list[int]:
        """Numbers of the state's leaves that are stacks for these parameters."""
        return [n for leaf in leaves for n in self.state_stacks[leaf.name]]

    def by_leaf(
        self, leaves: Sequence[ParamLeaf], arrays: Iterable[jax.Array]
    ) -> tuple[dict[str, typing.Any], dict[int, jax.Array]]:
        """Parameters by path and parts of the state by number.

        Args:
          leaves: of the parameters.
          arrays: in the order of :meth:`stacks`, whole or of one layer.
        """
        remaining = iter(arrays)
        params = {
            leaf.name: leaf.with_arrays([next(remaining) for _ in leaf.arrays])
            for leaf in leaves
        }
        return params, {n: next(remaining) for n in self.stack_numbers(leaves)}
