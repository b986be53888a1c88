"""The optimizer's steps in a backward pass: on layers in loops, on leaves between."""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step import context
from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax._step.layers import Layer
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax.loss_scaling.guarded import Sizes, guarded
from lowbit_optax.release.host_memory import beside, is_on_host, on_device
from lowbit_optax.release.parts import Part
from lowbit_optax.release.plan import ReleasePlan
from lowbit_optax.release.scans import Cotangents
from lowbit_optax.release.stretches import Stretch
from lowbit_optax.release.traced_loss import TracedLoss
from pallas_kernels.platforms import refused_gpu

NewValues = tuple[dict[str, typing.Any], dict[int, jax.Array]]
"""Parameters by path, and leaves of the state by number."""

Gate = Callable[[Mapping[str, jax.Array]], tuple[Guard | Unguarded, typing.Any]]
"""From gradients to the guard of the update with them, and their :class:`Sizes`: () if
nothing had to be looked for."""

_NOTHING = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False)
class Updates:
    """A backward pass that steps on leaves as soon as their gradients are there.

    Its results are new values, and the sizes of the gradients that made them as the
    gate has found them, those of each layer after a loop. A loop carries the same.

    Args:
      tx: the transformation, without a loss scale.
      state: the leaves of its state.
      loss: whose parameters are updated.
      plan: when.
      gate: decides whether each update happens.
      transform_gradient: applied to every gradient before the step.
    """

    tx: optax.GradientTransformation
    state: Sequence[jax.Array]
    loss: TracedLoss
    plan: ReleasePlan
    gate: Gate
    transform_gradient: Callable[[jax.Array], jax.Array]

    def begin(self, stretch: Stretch) -> tuple[NewValues, typing.Any]:
        """The stacks before the step, and room for the sizes of each layer."""
        params = {leaf.name: leaf.value for leaf in stretch.in_loop}
        numbers = [n for name in params for n in self.plan.state_stacks[name]]
        length = stretch.scan_call.scan.length
        sizes = jax.eval_shape(lambda: self.gate({})[1])
        sizes = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), sizes)
        return (params, {n: self.state[n] for n in numbers}), sizes

    def params(self, stretch: Stretch, carried) -> dict[str, typing.Any]:
        """The parameters' stacks."""
        del stretch
        (params, _), _ = carried
        return params

    def update(self, stretch: Stretch, index, carried, grads: dict[str, jax.Array]):
        """What is carried after the update of a layer."""
        stacks, sizes = carried
        guard, sizes_of_layer = self.gate(grads)
        put_back = functools.partial(self._update_and_put_back, stretch, guard)
        in_stacks = functools.partial(self._update_in_stacks, stretch, guard)
        # Where results are chosen after a step, the stacks must not have been changed.
        can_skip = stepper_of(self.tx) is not None or isinstance(guard, Unguarded)
        # Kernels have no access to host memory.
        on_host = any(map(is_on_host, jax.tree.leaves(stacks)))
        if can_skip and refused_gpu() is None and not on_host:
            stacks = lax.platform_dependent(
                index, stacks, grads, cuda=in_stacks, default=put_back
            )
        else:
            stacks = put_back(index, stacks, grads)
        put = lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, index, 0)
        return stacks, jax.tree.map(put, sizes, sizes_of_layer)

    def _update_in_stacks(self, stretch: Stretch, guard, index, stacks, grads):
        """By kernels, which write into the stacks."""
        layer = _layer(stretch, index)
        new = self._step_on_layer(layer, jax.tree.map(layer.of, stacks), grads, guard)
        return jax.tree.map(layer.put, stacks, new)

    def _update_and_put_back(self, stretch: Stretch, guard, index, stacks, grads):
        """The layer is taken out, updated, and put back.

        If XLA fused the update with the reads and writes around it, the update of one
        stack would read the old layer of another, and XLA's CPU compiler would copy
        whole stacks in every iteration. It does not fuse what is inside a conditional
        with what is outside. (An optimization barrier does not prevent the fusion.)
        """
        layer = _layer(stretch, index)
        old = jax.tree.map(lambda stack: on_device(layer.of(stack)), stacks)
        new = lax.cond(
            index >= jnp.int32(0),
            lambda: self._step_on_layer(layer, old, grads, guard),
            lambda: old,
        )
        put = lambda stack, new: layer.put(stack, beside(new, stack))
        return jax.tree.map(put, stacks, new)

    def _step_on_layer(
        self, layer: Layer, old: NewValues, grads: Mapping[str, jax.Array], guard
    ) -> NewValues:
        """New layers for old ones.

        The transformation sees all leaves. Nothing reads what it makes of the others.
        """
        with context.one_layer(layer):
            params, state = self._step(self.plan.parts.whole, grads, guard, *old)
        names, numbers = old
        return {name: params[name] for name in names}, {n: state[n] for n in numbers}

    def take(self, stretch: Stretch, grads: dict[str, jax.Array]):
        """The result of a step on the leaves of a stretch."""
        part = stretch.part
        assert part is not None, "a stretch has leaves only if they are a part"
        guard, sizes = self.gate(grads)
        params, state = self._step(part, grads, guard)
        return (params, {n: state[n] for n in part.exclusive}), sizes

    def _step(
        self,
        part: Part,
        grads: Mapping[str, jax.Array],
        guard: Guard | Unguarded,
        params: Mapping[str, typing.Any] = _NOTHING,
        state: Mapping[int, jax.Array] = _NOTHING,
    ) -> NewValues:
        """One step on some of the leaves.

        Args:
          part: the leaves.
          grads: by path; zeros where there is none.
          guard: whether the step happens.
          params, state: values in place of the present ones, such as one layer.
        """
        tree_of, leaves = self.loss.tree_of, part.leaves
        gradients = {
            leaf.name: self.transform_gradient(grads[leaf.name])
            if leaf.name in grads
            else leaf.zero_gradient()
            for leaf in leaves
        }
        state_leaves = [
            state[n] if n in state else on_device(self.state[n]) for n in part.numbers
        ]
        new_params, new_state = guarded(
            self.tx,
            tree_of({leaf.name: params.get(leaf.name, leaf.value) for leaf in leaves}),
            part.structure.unflatten(state_leaves),
            tree_of(gradients),
            guard,
            REPLACE,
            {},
        )
        names = [leaf.name for leaf in self.loss.leaves]
        new_leaves = self.loss.treedef.flatten_up_to(new_params)
        found = dict(zip(names, new_leaves, strict=True))
        return (
            {leaf.name: found[leaf.name] for leaf in leaves},
            dict(zip(part.numbers, jax.tree.leaves(new_state), strict=True)),
        )

    def finished(
        self, results: Iterable[tuple], cotangents: Cotangents
    ) -> tuple[dict[str, typing.Any], list[jax.Array], dict[str, typing.Any]]:
        """All new parameters by path, the new state's leaves, and sizes by path.

        Args:
          results: of the backward pass.
          cotangents: those that are left, with which the other leaves are updated. If
            the optimizer can step on all leaves only, the gradients of the others are
            zeros, and what it makes of them is dropped.
        """
        params, state, sizes = {}, {}, {}
        for (new_params, new_state), found in results:
            params |= new_params
            state |= new_state
            sizes |= dict.fromkeys(new_params, found)
        grads = {
            leaf.name: cotangents[leaf.gradient_value]
            for leaf in self.loss.leaves
            if leaf.gradient_value in cotangents
        }
        last = self.plan.last
        guard, found = self.gate(grads)
        last_params, last_state = self._step(last, grads, guard)
        if isinstance(found, Sizes) and isinstance(guard, Guard):
            # What needs no gradient, such as a count, goes on if any update happens.
            checked = [each.finite for each in sizes.values()]
            checked += [found.finite] if grads else []
            proceed = jnp.any(jnp.stack([jnp.any(x) for x in checked]))
            finite = {n: jnp.where(found.finite, x, 0) for n, x in grads.items()}
            # Of this step only these numbers are computed.
            _, shared = self._step(last, finite, Guard(guard.factor, proceed))
            numbers = self.plan.of_no_gradient().intersection(shared)
            last_state |= {n: shared[n] for n in numbers}
            sizes = dict.fromkeys(last_params, found) | sizes
        new = last_state | state
        return last_params | params, [new[n] for n in range(len(self.state))], sizes


def _layer(stretch: Stretch, index) -> Layer:
    names = frozenset(leaf.name for leaf in stretch.in_loop)
    return Layer(index, stretch.scan_call.scan.length, names)
