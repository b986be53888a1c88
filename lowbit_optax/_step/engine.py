"""One step of a wrapped transformation: join, run the inner update, split.

    grads, any float dtype                      new param --> update that lands exactly
        | to float32                                ^
        v                                           | split
    join(param, residual) --> master --> inner.update --> master + update
    decode(codes) --> moments -->          |        --> moments --> encode --> codes

The inner transformation sees whole trees; formats work leaf by leaf.

    prepare (prepared.py) --> advance (implementations.py) --> next state (here)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._jaxprs.not_folded import not_folded
from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics.landing import ADD, REPLACE, Landing
from lowbit_optax._numerics.random_bits import ToNearest
from lowbit_optax._step import context, direct, trees
from lowbit_optax._step.choices import Choices
from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax._step.implementations import advance
from lowbit_optax._step.prepared import (
    draws_of_moments,
    error_parts,
    prepare,
    random_of_leaves,
)
from lowbit_optax._step.recorded import Recorded
from lowbit_optax._step.refusals import refuse_multi_steps
from lowbit_optax._step.state import LowbitState
from lowbit_optax._step.stepper import Stepper


@dataclasses.dataclass(frozen=True, eq=False)
class Lowbit(Choices, Stepper):
    """The methods of a transformation that one call of :func:`lowbit` makes."""

    def init(self, params: optax.Params) -> LowbitState | Recorded:
        """The initial state, with which every master equals its parameter.

        Within ``context.initial_masters``, the masters given there take their place.
        Within ``context.recording`` no state is made.
        """
        if params is None:
            raise ValueError("lowbit: init needs params")
        names, leaves, treedef = trees.named_leaves(params)
        if any(map(trees.is_quantized, leaves)):
            refuse_multi_steps()
        if context.current().is_recorded:
            return Recorded(self, names, treedef)
        formats = self.formats_of(names, leaves)
        given = context.current().masters
        masters, residuals = [], []
        for name, leaf, format_ in zip(names, leaves, formats, strict=True):
            if format_ is None:
                masters.append(leaf)
                residuals.append(None)
            elif name in given:
                masters.append(given[name])
                residuals.append(traced_once(_residual, format_)(given[name], leaf))
            else:
                masters.append(traced_once(format_.widen)(leaf))
                residuals.append(format_.init(leaf))
        # Made here and not at import, so that they are placed like the parameters.
        count, seed = jnp.zeros([], jnp.uint32), jnp.asarray(self.seed, jnp.uint32)
        inner_state = self.inner.init(treedef.unflatten(masters))
        self._check_inner_state(inner_state)
        self.check_start(names, leaves, formats, inner_state)
        inner_state = jax.tree.map(not_folded, inner_state)
        plan = self.moment_plan(names, leaves, inner_state)
        error_parts(names, leaves, formats, plan)  # raises for leaves without one
        random = random_of_leaves(names, leaves, seed, count)
        draws = draws_of_moments(leaves, formats, random)
        inner_state = plan.encode(inner_state, draws)
        residual = self.in_container(treedef.unflatten(residuals))
        return LowbitState(count, seed, residual, inner_state)

    def update(self, updates, state, params=None, **extra_args):
        """As in optax: ``(updates that land exactly, new state)``."""
        if context.current().wants_params:
            with context.params_wanted(False):
                params, state = self.step(params, state, updates, **extra_args)
            return direct.as_new_params(params), state
        return self.guarded(params, state, updates, Unguarded(), ADD, **extra_args)

    def step(self, params, state, grads, **extra_args):
        """``(new params, new state)``, without forming differences."""
        return self.guarded(params, state, grads, Unguarded(), REPLACE, **extra_args)

    def guarded(
        self,
        params: optax.Params | None,
        state: LowbitState,
        grads: optax.Updates,
        guard: Guard | Unguarded,
        landing: Landing,
        **extra_args,
    ):
        """A step that happens only if the guard allows it.

        Args:
          params, state, grads: as in optax.
          guard: decides on the device whether the step happens.
          landing: ``REPLACE`` for new parameters, ``ADD`` for updates.
          **extra_args: for the inner transformation.

        Returns:
          ``(new params or updates, new state)``.
        """
        prepared = prepare(self, params, state, grads, guard)
        reports = context.current().reports
        if reports is not None:
            update = optax.with_extra_args_support(self.inner).update
            reports.add(prepared, functools.partial(update, **extra_args))
            masters = prepared.tree(prepared.masters)
            return jax.tree.map(jnp.zeros_like, masters), state
        results, residuals, inner_state = advance(self, prepared, landing, extra_args)
        if not landing.is_direct:
            results = guard.updates(results)
        count = optax.safe_increment(state.count)
        count = jnp.asarray(guard.chosen(count, state.count))
        residual = self.in_container(prepared.tree(residuals))
        new_state = LowbitState(count, state.seed, residual, inner_state)
        return prepared.tree(results), new_state

    @staticmethod
    def _check_inner_state(inner_state) -> None:
        is_lowbit = lambda x: isinstance(x, LowbitState)
        if any(map(is_lowbit, jax.tree.leaves(inner_state, is_leaf=is_lowbit))):
            raise ValueError(
                "lowbit: the inner transformation is, or holds, one of this package "
                "already, such as kahan_adamw; give lowbit the optax transformation, "
                "such as optax.adamw, or use the alias alone"
            )


def _residual(format_, master, param):
    return format_.residual(master, param, ToNearest())
