"""What an optimizer can update by itself: some of the leaves, or a layer of a stack.

A *part* is some of the leaves. The transformation gets trees in which
``optax.MaskedNode`` takes the place of all other leaves, as inside ``optax.masked``,
and that part of its state which it would keep for them.

A stack can be updated layer by layer if every layer of its new values is computed from
that layer of its own gradient, parameter and state, and from numbers that depend on no
gradient (a count, a schedule).

Whether such a step computes what the step on all leaves does is read off the values of
both (:mod:`lowbit_optax.release.step_values`).
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import optax

from lowbit_optax._step import trees
from lowbit_optax.release.step_values import StepValues, WaitsForWholeGradient
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss
from lowbit_optax.states.state_leaves import state_leaves

_NEEDS_OTHERS = "its update needs the gradients of other leaves"

Key = typing.TypeVar("Key")
Found = typing.TypeVar("Found")


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some leaves, and the state that a transformation keeps for them.

    Args:
      leaves: of the parameters.
      structure: of the state for them.
      numbers: of its leaves, in the whole state.
      exclusive: those of the numbers that no other leaf needs, such as moments. The
        others, such as a count, are in every part.
      beside: other leaves that the transformation gets, too. Nothing reads what it
        makes of them.
    """

    leaves: Sequence[ParamLeaf]
    structure: typing.Any
    numbers: Sequence[int]
    exclusive: Sequence[int]
    beside: Sequence[ParamLeaf] = ()

    @property
    def names(self) -> list[str]:
        """Paths of the leaves."""
        return [leaf.name for leaf in self.leaves]


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
      stacks: the leaves whose first axis is one of layers in a scan.

    Attributes:
      whole: the part of all leaves.
      state_stacks: by stack that can be updated layer by layer, the numbers of the
        state's leaves that are stacks of one layer for each of its layers.
      reasons: why the other stacks cannot.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        opt_state,
        loss: TracedLoss,
        stacks: Iterable[ParamLeaf] = (),
    ):
        self._tx, self._loss, self._values = tx, loss, {}
        with_path, structure = jax.tree_util.tree_flatten_with_path(opt_state)
        self._state = [trees.abstract(x) for _, x in with_path]
        self._keys = {jax.tree_util.keystr(k): n for n, (k, _) in enumerate(with_path)}
        of_state = enumerate(state_leaves(self._params_of(loss.leaves), opt_state))
        self._blanks = {n for n, part in of_state if part.kind == "blank"}
        numbers = range(len(self._state))
        self.whole = Part(loss.leaves, structure, numbers, numbers)
        self.state_stacks, self.reasons = found_or_waiting(self._state_stacks, stacks)
        self.state_stacks, reasons = self._updated_by_layer()
        self.reasons |= reasons

    @functools.cached_property
    def _whole_step(self) -> StepValues:
        """The step on all leaves."""
        stacks = self.state_stacks
        numbers = {n for numbers in stacks.values() for n in numbers}
        return self._step_on(self.whole, {leaf.name for leaf in stacks} | numbers)

    def needs_no_gradient(self, number: int) -> bool:
        """Whether this leaf of the new state depends on no gradient, as a count."""
        return not self._whole_step.state[number].needs

    def part(self, leaves: Sequence[ParamLeaf], is_last: bool = False) -> Part:
        """The part of these leaves, on which a step is that part of the whole step.

        Args:
          leaves: of the parameters.
          is_last: whether what belongs to no leaf is taken from this part, too.

        Raises:
          WaitsForWholeGradient: if there is no such part.
        """
        names, whole = {leaf.name for leaf in leaves}, self._whole_step
        if any(x.needs - names for name in names for x in whole.params[name]):
            raise WaitsForWholeGradient(_NEEDS_OTHERS)
        structure, numbers = self._state_of(leaves)
        exclusive = [n for n in numbers if n not in self._shared]
        part = Part(leaves, structure, numbers, exclusive)
        results = {(name, x) for name in names for x in whole.params[name]}
        results |= {(n, whole.state[n]) for n in exclusive}
        rest = {(name, x) for name, xs in whole.params.items() for x in xs}
        rest = (rest | set(whole.state.items())) - results
        if any(x.needs - names for _, x in results):
            raise WaitsForWholeGradient(_NEEDS_OTHERS)
        if any(x.needs & names for _, x in rest):
            raise WaitsForWholeGradient(
                "its gradient is needed for other leaves, or for the rest of the state"
            )
        step, taken = self._step_on(part), numbers if is_last else exclusive
        pairs = [(whole.state[n], step.state[n]) for n in taken]
        for name in names:
            pairs += zip(whole.params[name], step.params[name], strict=True)
        if any(a.numbers[0] != b.numbers[0] for a, b in pairs):
            raise WaitsForWholeGradient(
                "the optimizer updates it otherwise when it is alone"
            )
        return part

    def in_loop(self, leaves: Sequence[ParamLeaf]) -> Part:
        """The part of which a loop updates these leaves, one layer at a time."""
        return dataclasses.replace(
            self.whole,
            leaves=leaves,
            exclusive=[n for leaf in leaves for n in self.state_stacks[leaf]],
            beside=[leaf for leaf in self._loss.leaves if leaf not in leaves],
        )

    def _step_on(self, part: Part, stacks=()) -> StepValues:
        grads = self._loss.tree_of({x.name: x.gradient for x in part.leaves})
        state = part.structure.unflatten([self._state[n] for n in part.numbers])
        arguments = grads, state, self._params_of(part.leaves)
        return StepValues(self._tx, *arguments, part.numbers, self._values, stacks)

    def _params_of(self, leaves: Iterable[ParamLeaf], layers: Iterable = ()):
        """The parameters' shapes, with one layer in place of each of some stacks."""
        shapes = {leaf.name: trees.abstract(leaf.value) for leaf in leaves}
        one = {leaf.name: jax.tree.map(_layer, shapes[leaf.name]) for leaf in layers}
        return self._loss.tree_of(shapes | one)

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
        names = [jax.tree_util.keystr(path) for path, _ in with_path]
        numbers = [self._keys.get(name, -1) for name in names]
        for name, number, (_, leaf) in zip(names, numbers, with_path, strict=True):
            if number < 0 or not _is_like(self._state[number], leaf, leaf.shape):
                raise WaitsForWholeGradient(
                    "the optimizer's state for it alone is no part of its state: "
                    f"state{name} differs"
                )
        return structure, numbers

    def _updated_by_layer(self):
        """The stacks that can be updated layer by layer, and why others cannot.

        The step is traced with the stacks and with one layer in place of each. The
        traces differ where a mask asks which leaves are matrices, for example.

        Raises:
          ValueError: if the update of one leaf needs the gradients of another.
        """
        stacks, leaves = self.state_stacks, self._loss.leaves
        if not stacks:
            return {}, {}
        whole = self._whole_step
        waiting = _refuse_several_gradients(whole, {x.name: stacks[x] for x in stacks})
        params = self._params_of(leaves, stacks)
        grads = {x.name: x.gradient for x in leaves}
        grads |= {x.name: _layer(x.gradient) for x in stacks}
        arguments = self._loss.tree_of(grads), jax.eval_shape(self._tx.init, params)
        keys = self.whole.numbers
        layer = StepValues(self._tx, *arguments, params, keys, self._values)

        def compared(leaf: ParamLeaf) -> list[int]:
            pairs = (x.results_of(leaf.name, stacks[leaf]) for x in (whole, layer))
            for of_stack, of_layer in zip(*pairs, strict=True):
                reason = waiting.get(leaf.name, of_stack.several)
                if not reason and of_stack.numbers[1] != of_layer.numbers[1]:
                    reason = "the update of a layer is not that of the stack"
                if reason:
                    raise WaitsForWholeGradient(reason)
            return stacks[leaf]

        return found_or_waiting(compared, stacks)

    def _state_stacks(self, leaf: ParamLeaf) -> list[int]:
        """Numbers of the state's leaves with a layer for each layer of a stack.

        These are the leaves that change their shape when the parameter is one layer.
        """
        params = self._params_of(self._loss.leaves, [leaf])
        layers, structure = jax.tree.flatten(jax.eval_shape(self._tx.init, params))
        if structure != self.whole.structure:
            raise WaitsForWholeGradient(
                "the state of one of its layers has another structure"
            )
        depth, found = leaf.value.shape[0], []
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


def _layer(stack) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)


def _is_like(array, other, shape) -> bool:
    return array.shape == shape and array.dtype == other.dtype


def _refuse_several_gradients(
    step: StepValues, stacks: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """Raise if a result depends on several leaves' gradients, one of them stacked.

    Returns:
      By path, why a leaf has to wait: where else its own gradient is needed.
    """
    owners = {n: name for name, numbers in stacks.items() for n in numbers}
    results = [(name, x) for name in stacks for x in step.results_of(name, ())]
    results += [(name, x) for name, xs in step.params.items() for x in xs]
    results += [(owners.get(n), x) for n, x in step.state.items()]
    waiting = {}
    for owner, value in results:
        others = sorted(value.needs - {owner})
        if not others or stacks.keys().isdisjoint([*others, owner]):
            continue
        if owner is None and len(value.needs) == 1:
            waiting[others[0]] = "the state keeps a number made of its whole gradient"
            continue
        what = "its state" if owner is None else f"the update of params{owner}"
        other = next((name for name in others if name in stacks), others[0])
        raise ValueError(
            "release: the optimizer needs the gradients of several leaves at once: "
            f"{what} depends on the gradient of params{other}. Inside the backward "
            "pass each gradient is forgotten after its leaf is updated. In place of "
            "optax.clip_by_global_norm, give max_grad_norm= to value_and_update. "
            "Anything else that needs all gradients (apply_if_finite, a norm in the "
            "state) works with lowbit_optax.step, without a release"
        )
    return waiting
