"""An optimizer whose state is taken apart by the parameters that it belongs to."""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import optax

from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax.loss_scaling.guarded import guarded
from lowbit_optax.release.host_memory import on_device
from lowbit_optax.release.parts import Part
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss
from lowbit_optax.transformations.lowbit import step
from pallas_kernels.platforms import refused_gpu


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
            loss.tree_of(lambda leaf: params.get(leaf.name, leaf.value)),
            jax.tree.unflatten(self.state_treedef, state_leaves),
            loss.tree_of(lambda leaf: self._gradient(leaf, grads)),
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
        new_params, new_state = self._step(
            part.tree(loss, lambda leaf: leaf.value),
            part.structure.unflatten([self.state_leaves[n] for n in part.numbers]),
            part.tree(loss, lambda leaf: self._gradient(leaf, grads)),
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
