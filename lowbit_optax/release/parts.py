"""What an optimizer can update by itself: some of the leaves, or a layer of a stack.

A :class:`Part` is a subset of the leaves, with the optimizer state that belongs to it.
The transformation usually sees ``optax.MaskedNode`` in place of every other leaf, as
inside ``optax.masked``.

A stack can be updated layer by layer if every layer of its new values is computed from
that layer of its own gradient, parameter and state, and from numbers that depend on no
gradient (a count, a schedule).

Whether such a step computes what the step on all leaves does is read off the values of
both (:mod:`lowbit_optax.release.step_values`).
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
      leaves: of the parameters.
      structure: of the state that the transformation gets.
      numbers: of its leaves, in the whole state.
      exclusive: those that are updated with the leaves, such as moments. The others,
        such as a count, are only read.
      others: leaves that the transformation gets, too. Nothing reads what it
        makes of them.
    """

    leaves: Sequence[ParamLeaf]
    structure: typing.Any
    numbers: Sequence[int]
    exclusive: Sequence[int]
    others: Sequence[ParamLeaf] = ()

    @property
    def names(self) -> list[str]:
        """Paths of the leaves."""
        return [leaf.name for leaf in self.leaves]

    @property
    def depth(self) -> int:
        """How many layers the leaves have, if they are stacks."""
        return len(jax.tree.leaves(self.leaves[0].value)[0])


class Parts:
    """What a transformation can update by itself.

    Args:
      tx: the transformation.
      opt_state: its state.
      loss: traced.
      stacks: the leaves whose first axis is one of layers in a scan.

    Attributes:
      whole: the part of all leaves.
      stacks: by leaf that can be updated layer by layer, the numbers of the state's
        leaves that are stacks of one layer for each of its layers.
      reasons: why the other stacks cannot.
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

    @functools.cached_property
    def counts(self) -> list[int]:
        """Numbers of the state's leaves that need no gradient, such as a count."""
        return [n for n in self.whole.numbers if not self._whole_step[n].needs]

    def part(self, leaves: Sequence[ParamLeaf], is_last: bool = False) -> Part | str:
        """The part of these leaves, or why they cannot be updated alone.

        Args:
          leaves: of the parameters.
          is_last: whether what belongs to no leaf is taken from this part, too.
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
            return (
                "its gradient is needed for other leaves, or for the rest of the state"
            )
        alone = self._step_on(part)
        compared = own.union(numbers if is_last else ())
        if any(step[k].numbers[0] != alone[k].numbers[0] for k in compared):
            return "the optimizer updates it otherwise when it is alone"
        return part

    def in_loop(self, leaves: Sequence[ParamLeaf]) -> Part:
        """The part for leaves that a loop updates layer by layer."""
        return self.with_others(leaves, [n for x in leaves for n in self.stacks[x]])

    def with_others(self, leaves: Sequence[ParamLeaf], numbers: list[int]) -> Part:
        """A part that steps on all leaves, and keeps these leaves and this state."""
        others = [leaf for leaf in self._loss.leaves if leaf not in leaves]
        return dataclasses.replace(
            self.whole, leaves=leaves, exclusive=numbers, others=others
        )

    @functools.cached_property
    def _whole_step(self) -> dict[Key, Value]:
        """The step on all leaves."""
        numbers = {n for numbers in self.stacks.values() for n in numbers}
        return self._step_on(self.whole, {leaf.name for leaf in self.stacks} | numbers)

    def _step_on(self, part: Part, stacks=()) -> dict[Key, Value]:
        grads = self._loss.tree_of({x.name: x.gradient for x in part.leaves})
        state = part.structure.unflatten([self._state[n] for n in part.numbers])
        arguments = grads, state, self._params_of(part.leaves)
        return step_values(self._tx, arguments, part.numbers, self._numbered, stacks)

    def _params_of(self, leaves: Iterable[ParamLeaf], layers: Iterable = ()):
        """The parameters' shapes; some stacks are replaced by one of their layers."""
        shapes = {leaf.name: trees.abstract(leaf.value) for leaf in leaves}
        one = {leaf.name: jax.tree.map(_layer, shapes[leaf.name]) for leaf in layers}
        return self._loss.tree_of(shapes | one)

    @functools.cached_property
    def _shared(self) -> tuple | str:
        """The result of :meth:`_state_of` for the state that belongs to no leaf."""
        return self._state_of([])

    def _state_of(self, leaves: Sequence[ParamLeaf]) -> tuple | str:
        """Structure of the state for these leaves and its numbers, or why not."""
        try:
            state = jax.eval_shape(self._tx.init, self._params_of(leaves))
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            # A mask or a label by the user's function may not know MaskedNode.
            return (
                "the optimizer has no state for it alone: its init, without the other "
                f"parameters, raises {type(error).__name__}({str(error)!r})"
            )
        with_path, structure = jax.tree_util.tree_flatten_with_path(state)
        names = [jax.tree_util.keystr(path) for path, _ in with_path]
        numbers = [self._numbers.get(name, -1) for name in names]
        for name, number, (_, leaf) in zip(names, numbers, with_path, strict=True):
            if number < 0 or not _is_like(self._state[number], leaf, leaf.shape):
                return (
                    "the optimizer's state for it alone is no part of its state: "
                    f"state{name} differs"
                )
        return structure, numbers

    def _stacks_of(self, leaf: ParamLeaf) -> list[int] | str:
        """Numbers of the state's leaves with a layer for each layer of a stack.

        These are the leaves that change their shape when the parameter is one layer.
        """
        params = self._params_of(self._loss.leaves, [leaf])
        layers, structure = jax.tree.flatten(jax.eval_shape(self._tx.init, params))
        if structure != self.whole.structure:
            return "the state of one of its layers has another structure"
        depth, found = leaf.value.shape[0], []
        for number, (stack, layer) in enumerate(zip(self._state, layers, strict=True)):
            if number in self._blanks or _is_like(stack, layer, layer.shape):
                continue
            if not _is_like(stack, layer, (depth, *layer.shape)):
                of = f"{stack.dtype}{list(stack.shape)}"
                return f"its state {of} is not a stack of layers"
            found.append(number)
        return found

    def _not_by_layer(self) -> dict[ParamLeaf, str]:
        """Why stacks cannot be updated layer by layer.

        The step is traced twice, on the stacks and on one layer of each. The traces
        differ where a mask asks which leaves are matrices, for example.

        Raises:
          ValueError: if the update of one leaf needs the gradients of another.
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
                reason = whole[key].several
                if not reason and whole[key].numbers[1] != layer[key].numbers[1]:
                    reason = "the update of a layer is not that of the stack"
                if reason:
                    reasons.setdefault(leaf, reason)
        return reasons


def _owner(key: Key) -> str | None:
    """Path of the parameter that a step's result is an array of."""
    return key[0] if isinstance(key, tuple) else None


def _layer(stack) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)


def _is_like(array, other, shape) -> bool:
    return array.shape == shape and array.dtype == other.dtype


def _refuse_several_gradients(
    step: Mapping[Key, Value], stacks: Mapping[ParamLeaf, Sequence[int]]
) -> dict[ParamLeaf, str]:
    """Raise if a result depends on several leaves' gradients, one of them stacked.

    Returns:
      Why a stack has to wait: where else its own gradient is needed.
    """
    leaves = {leaf.name: leaf for leaf in stacks}
    owners = {n: leaf.name for leaf, numbers in stacks.items() for n in numbers}
    waiting = {}
    # The stacks' own results first: a message names them before what they are in.
    own = lambda key: _owner(key) not in leaves and key not in owners
    for key in sorted(step, key=own):
        owner = owners.get(key) if _owner(key) is None else _owner(key)
        others = sorted(step[key].needs - {owner})
        if not others or not (owner in leaves or leaves.keys() & others):
            continue
        if owner is None and len(step[key].needs) == 1:
            waiting[leaves[others[0]]] = (
                "the state keeps a number made of its whole gradient"
            )
            continue
        what = "its state" if owner is None else f"the update of params{owner}"
        other = next((name for name in others if name in leaves), others[0])
        raise ValueError(
            "release: the optimizer needs the gradients of several leaves at once: "
            f"{what} depends on the gradient of params{other}. Inside the backward "
            "pass each gradient is forgotten after its leaf is updated. In place of "
            "optax.clip_by_global_norm, give max_grad_norm= to value_and_update. "
            "Anything else that needs all gradients (apply_if_finite, a norm in the "
            "state) works with lowbit_optax.step, without a release"
        )
    return waiting
