"""Parts of the parameters that an optimizer can update separately.

A :class:`Part` is a subset of the leaves, with the optimizer state that belongs to it.
The transformation usually sees ``optax.MaskedNode`` instead of every other leaf, as
inside ``optax.masked``.

A stack can be updated layer by layer if every layer of its new values depends only on
that layer of its gradient, parameter and state, and on scalars that do not depend on
gradients, such as a count or a schedule.

To check that such a step computes the same as the step on all leaves, both are traced
and their values are compared (:mod:`lowbit_optax.release.step_values`).
"""

import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping, Sequence

import jax

from lowbit_optax._step import trees
from lowbit_optax.release.step_values import Key, Value, step_values
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss
from lowbit_optax.states.state_leaves import state_leaves


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some leaves, and the state that a transformation keeps for them.

    Args:
      leaves: leaves of the parameters.
      structure: the structure of the state that the transformation receives.
      numbers: for each leaf of this state, its index in the whole state.
      exclusive: the indices of the state that is updated with the leaves, such as
        moments. Other state, such as a count, is only read.
      others: other leaves that the transformation receives. Their results are ignored.
      depth: the number of layers if a loop updates the leaves, which are then stacks.
    """

    leaves: Sequence[ParamLeaf]
    structure: typing.Any
    numbers: Sequence[int]
    exclusive: Sequence[int]
    others: Sequence[ParamLeaf] = ()
    depth: int | None = None


class Parts:
    """The parts that a transformation can update separately.

    Args:
      tx: the transformation.
      opt_state: the state of the transformation.
      loss: the traced loss.
      stacks: the leaves whose first axis is an axis of layers in a scan.

    Attributes:
      whole: the part with all leaves.
      stacks: for each leaf that can be updated layer by layer, the indices of the
        state's leaves that are stacks with the same layers.
      reasons: for each other stack, why it cannot be updated layer by layer.
    """

    def __init__(self, tx, opt_state, loss: TracedLoss, stacks: Iterable[ParamLeaf]):
        self._tx, self._loss, self._numbered = tx, loss, {}
        with_path, structure = jax.tree_util.tree_flatten_with_path(opt_state)
        self._state = [trees.abstract(x) for _, x in with_path]
        self._numbers = {
            jax.tree_util.keystr(k): n for n, (k, _) in enumerate(with_path)
        }
        of_state = enumerate(state_leaves(self._params_of(loss.leaves), opt_state))
        self._blanks = {n for n, part in of_state if part.kind == "blank"}
        numbers = range(len(self._state))
        self.whole = Part(loss.leaves, structure, numbers, numbers)
        found = {leaf: self._stacks_of(leaf) for leaf in stacks}
        self.stacks = {leaf: x for leaf, x in found.items() if not isinstance(x, str)}
        self.reasons = {leaf: x for leaf, x in found.items() if isinstance(x, str)}
        if self.stacks:
            self.reasons |= self._not_by_layer()
        for leaf in self.stacks.keys() & self.reasons:
            del self.stacks[leaf]

    @property
    def stack_numbers(self) -> set[int]:
        """The indices of the state that is updated layer by layer."""
        return {n for numbers in self.stacks.values() for n in numbers}

    def part(self, leaves: Sequence[ParamLeaf], is_last: bool = False) -> Part | str:
        """Return the part for these leaves, or why they cannot be updated separately.

        Args:
          leaves: leaves of the parameters.
          is_last: whether the part also updates the state that belongs to no leaf.
        """
        step, names = self._whole_step, {leaf.name for leaf in leaves}
        own = {key for key in step if _owner(key) in names}
        if any(step[key].needs - names for key in own):
            return "its update needs the gradients of other leaves"
        shared, found = self._shared, self._state_of(leaves)
        if isinstance(found, str) or isinstance(shared, str):
            return found if isinstance(found, str) else str(shared)
        structure, numbers = found
        exclusive = [n for n in numbers if n not in shared[1]]
        part = Part(leaves, structure, numbers, exclusive)
        own.update(exclusive)
        if any(step[key].needs & names for key in step.keys() - own):
            return "other leaves, or the rest of the state, also need its gradient"
        alone = self._step_on(part)
        compared = own.union(numbers if is_last else ())
        if any(step[k].numbers[0] != alone[k].numbers[0] for k in compared):
            return "the optimizer updates it differently without the other leaves"
        return part

    def in_loop(self, leaves: Sequence[ParamLeaf]) -> Part:
        """Return the part for leaves that a loop updates layer by layer."""
        part = self.with_others(leaves, [n for x in leaves for n in self.stacks[x]])
        return dataclasses.replace(part, depth=leaves[0].gradient.shape[0])

    def with_others(self, leaves: Sequence[ParamLeaf], numbers: list[int]) -> Part:
        """Return a part whose step runs on all leaves, but updates only ``leaves``."""
        others = [leaf for leaf in self._loss.leaves if leaf not in leaves]
        return dataclasses.replace(
            self.whole, leaves=leaves, exclusive=numbers, others=others
        )

    @functools.cached_property
    def _whole_step(self) -> dict[Key, Value]:
        """The values of the step on all leaves."""
        stacks = {leaf.name for leaf in self.stacks} | self.stack_numbers
        return self._step_on(self.whole, stacks)

    def _step_on(self, part: Part, stacks=()) -> dict[Key, Value]:
        grads = self._loss.tree_of({x.name: x.gradient for x in part.leaves})
        state = part.structure.unflatten([self._state[n] for n in part.numbers])
        arguments = grads, state, self._params_of(part.leaves)
        return step_values(self._tx, arguments, part.numbers, self._numbered, stacks)

    def _params_of(self, leaves: Iterable[ParamLeaf], layers: Iterable = ()):
        """Return shapes of parameters, with one layer for each stack in ``layers``."""
        shapes = {leaf.name: trees.abstract(leaf.value) for leaf in leaves}
        one = {leaf.name: jax.tree.map(_layer, shapes[leaf.name]) for leaf in layers}
        return self._loss.tree_of(shapes | one)

    @functools.cached_property
    def _shared(self) -> tuple | str:
        """The result of :meth:`_state_of` for the state that belongs to no leaf."""
        return self._state_of([])

    def _state_of(self, leaves: Sequence[ParamLeaf]) -> tuple | str:
        """Return the structure of the state for these leaves, and its indices.

        If the leaves cannot be updated separately, return the reason instead.
        """
        try:
            state = jax.eval_shape(self._tx.init, self._params_of(leaves))
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            # A user's function that masks or labels may not support MaskedNode.
            return (
                "the optimizer cannot initialize its state without the other leaves: "
                f"init raises {type(error).__name__}({str(error)!r})"
            )
        with_path, structure = jax.tree_util.tree_flatten_with_path(state)
        names = [jax.tree_util.keystr(path) for path, _ in with_path]
        numbers = [self._numbers.get(name, -1) for name in names]
        for name, number, (_, leaf) in zip(names, numbers, with_path, strict=True):
            if number < 0 or not _is_like(self._state[number], leaf, leaf.shape):
                return (
                    "the optimizer's state for it is different without the other "
                    f"leaves, in state{name}"
                )
        return structure, numbers

    def _stacks_of(self, leaf: ParamLeaf) -> list[int] | str:
        """Return the indices of the state's leaves that are stacked like ``leaf``.

        These leaves change their shape when a single layer replaces the parameter. If
        the state is not a stack of layers, return the reason instead.
        """
        params = self._params_of(self._loss.leaves, [leaf])
        layers, structure = jax.tree.flatten(jax.eval_shape(self._tx.init, params))
        if structure != self.whole.structure:
            return "the state of a single layer has a different structure"
        depth, found = leaf.value.shape[0], []
        for number, (stack, layer) in enumerate(zip(self._state, layers, strict=True)):
            if number in self._blanks or _is_like(stack, layer, layer.shape):
                continue
            if not _is_like(stack, layer, (depth, *layer.shape)):
                of = f"{stack.dtype}{list(stack.shape)}"
                return f"its state, {of}, is not a stack of layers"
            found.append(number)
        return found

    def _not_by_layer(self) -> dict[ParamLeaf, str]:
        """Return the stacks that cannot be updated layer by layer, with reasons.

        The step is traced twice, on the stacks and on one layer of each stack. The
        traces differ, for example, if a mask selects matrices.

        Raises:
          ValueError: if the update of a leaf needs the gradient of another leaf.
        """
        whole, leaves = self._whole_step, self._loss.leaves
        reasons = _refuse_several_gradients(whole, self.stacks)
        params = self._params_of(leaves, self.stacks)
        grads = {x.name: x.gradient for x in leaves}
        grads |= {x.name: _layer(x.gradient) for x in self.stacks}
        arguments = self._loss.tree_of(grads), jax.eval_shape(self._tx.init, params)
        layer = step_values(
            self._tx, (*arguments, params), self.whole.numbers, self._numbered
        )
        for leaf, numbers in self.stacks.items():
            own = [key for key in whole if _owner(key) == leaf.name or key in numbers]
            for key in own:
                if whole[key].several:
                    reasons.setdefault(
                        leaf, "its update needs values of several layers"
                    )
                elif whole[key].numbers[1] != layer[key].numbers[1]:
                    reasons.setdefault(
                        leaf, "the optimizer updates a layer differently than the stack"
                    )
        return reasons


def _owner(key: Key) -> str | None:
    """Return the path of the parameter to which a result belongs, or None."""
    return key[0] if isinstance(key, tuple) else None


def _layer(stack) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)


def _is_like(array, other, shape) -> bool:
    return array.shape == shape and array.dtype == other.dtype


def _refuse_several_gradients(
    step: Mapping[Key, Value], stacks: Mapping[ParamLeaf, Sequence[int]]
) -> dict[ParamLeaf, str]:
    """Raise an error if a result needs the gradients of a stack and of another leaf.

    Returns:
      The reasons why stacks have to wait for their whole gradients.
    """
    leaves = {leaf.name: leaf for leaf in stacks}
    owners = {n: leaf.name for leaf, numbers in stacks.items() for n in numbers}
    waiting = {}
    # Check the results of stacks first, so that error messages name stacks.
    own = lambda key: _owner(key) not in leaves and key not in owners
    for key in sorted(step, key=own):
        owner = owners.get(key) if _owner(key) is None else _owner(key)
        others = sorted(step[key].needs - {owner})
        if not others or not (owner in leaves or leaves.keys() & others):
            continue
        if owner is None and len(step[key].needs) == 1:
            waiting[leaves[others[0]]] = (
                "the state stores a number that depends on its whole gradient"
            )
            continue
        what = "its state" if owner is None else f"the update of params{owner}"
        other = next((name for name in others if name in leaves), others[0])
        raise ValueError(
            "release: tx must not need the gradients of several leaves at once, but "
            f"{what} depends on the gradient of params{other}, which is freed after "
            "its leaf is updated. Instead of optax.clip_by_global_norm, pass "
            "max_grad_norm to value_and_update. Other transformations that need all "
            "gradients, such as apply_if_finite or a norm in the state, work with "
            "lowbit_optax.step, without gradient release"
        )
    return waiting
