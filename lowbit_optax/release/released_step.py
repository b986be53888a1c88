"""Run a step: the loss, an optional pass that measures gradients, and the updates.

The loss runs with wrappers at the places that the plan chose. JAX differentiates the
result. Each parameter passes through ``released`` before its first use. A scan over
parameters that can be updated layer by layer runs as a ``ReleasedLoop``, like
``release.scan``.

The loss also passes a *token*, a small tree of floats, through every wrapper. No
operation of the loss reads it. In the backward pass, its cotangent visits the backward
rules of the wrappers in reverse order. Each rule reads the measurements of earlier
rules, such as the sum of squared gradients, and adds its own. JAX skips a backward rule
whose outputs have no cotangent. The token always has one, so JAX calls every rule, and
even a parameter that the loss does not use gets its new value.
"""

import functools
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import Node, called_jaxpr, run, value_of
from lowbit_optax._jaxprs.program import ScanCall, Segment, without_barriers_on
from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step import context, trees
from lowbit_optax._step.guard import UNGUARDED, Guard
from lowbit_optax.loss_scaling.sizes import Sizes
from lowbit_optax.loss_scaling.transformation import check_wide_loss
from lowbit_optax.release.parts import Part
from lowbit_optax.release.plan import (
    ReleasePlan,
    Stretch,
    is_opaque,
    loss_scaled,
    without_scale,
)
from lowbit_optax.release.traced_loss import TracedLoss
from lowbit_optax.release.wrappers import (
    ReleasedLoop,
    alone,
    as_floats,
    as_state,
    kept,
    released,
    tied,
)
from lowbit_optax.states.host_memory import on_device, placed, placed_like
from lowbit_optax.transformations.step import guarded

Rule = Callable[..., tuple]
"""``(part, (params, state), gradients, token) -> ((params, state), token)``.
Parameters and gradients are dictionaries by path, and ``token`` is the token's
cotangent. In a loop, the step's context contains the index of the layer."""

_RECOMPUTED = frozenset(
    {
        "atan2", "broadcast_in_dim", "concatenate", "erf", "iota", "one_minus_square",
        "random_bits", "random_unwrap", "random_wrap", "rem", "reshape", "rev", "round",
        "slice", "squeeze", "threefry2x32", "transpose",
    }
)  # fmt: skip
"""Cheap primitives that the backward pass recomputes, like elementwise ones."""


def released_step(
    loss: TracedLoss, plan: ReleasePlan, tx, opt_state, max_grad_norm, state_memory
) -> tuple:
    """Run a step, and return ``(value, params, opt_state)``.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      tx, opt_state, max_grad_norm, state_memory: see
        :func:`lowbit_optax.release.value_and_update`.
    """
    scaled, (inner, inner_state) = loss_scaled(tx), without_scale(tx, opt_state)
    state, treedef = jax.tree.flatten(inner_state)
    on_host = state_memory == "pinned_host"
    state = placed(state, plan.parts.stack_numbers if on_host else ())
    outputs, go_back = _differentiated(loss, plan, state)
    start, factor = jnp.ones_like(outputs[0]), None
    if scaled is not None:
        check_wide_loss("release", start)
        factor = opt_state.factor
        start *= jnp.asarray(opt_state.scale, start.dtype)
    guard, transform, sizes = UNGUARDED, lambda gradient: gradient, None
    if scaled is not None or max_grad_norm is not None:
        *_, found = go_back(start, _measuring(factor, max_grad_norm is not None))
        # Without this barrier, XLA would compute the gradients once for both passes and
        # keep all of them in memory.
        start, (squares, finite, largest) = tied((start, found))
        sizes = Sizes(finite > 0, largest)
        guard = UNGUARDED if factor is None else Guard(factor, sizes.finite)
        if max_grad_norm is not None:
            # Clipping uses the norm of the unscaled gradients.
            unscaled, norm = guard.unscaled, jnp.sqrt(squares)
            transform = lambda grad: _clipped(norm, max_grad_norm, unscaled(grad))
            if factor is not None:
                guard = Guard(jnp.float32(1), sizes.finite)
    rule = _updating(loss, plan, inner, treedef.unflatten(state), guard, transform)
    params, state, _ = go_back(start, rule)
    state = treedef.unflatten(state)
    if scaled is not None and sizes is not None:
        state = scaled.after(opt_state, state, sizes)
    return loss.result.unflatten(outputs), loss.tree_of(params), state


def _measuring(factor: jax.Array | None, squares: bool) -> Rule:
    """Return a rule that measures gradients without updating parameters.

    Its tokens are the sum of the squares of the unscaled gradients so far; 1 if all are
    finite, or 0; and their largest magnitude if all are finite.

    Args:
      factor: the factor that unscales gradients; None if they are not scaled, and
        therefore not checked for overflows.
      squares: whether to compute the sum of squares, for clipping.
    """

    def square(gradient: jax.Array) -> jax.Array:
        if factor is not None:
            gradient = Guard(factor, jnp.bool_(True)).times(gradient)
        return jnp.sum(jnp.square(gradient.astype(jnp.float32)))

    def rule(part: Part, state, gradients, found: tuple):
        del part
        total, finite, largest = found
        if squares:
            total = sum(map(square, gradients.values()), total)
        if factor is not None:
            sizes = Sizes.of(gradients, factor)
            finite *= sizes.finite.astype(jnp.float32)
            largest = jnp.maximum(largest, sizes.largest)
        return state, (total, finite, largest)

    return rule


def _updating(
    loss: TracedLoss, plan: ReleasePlan, tx, opt_state, guard, transform: Callable
) -> Rule:
    """Return a rule that updates parameters.

    The rule runs the step on all leaves, with zeros instead of the gradients of other
    parts, and uses the results of its own part. JAX drops the other operations when it
    lowers the program.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      tx, opt_state: the transformation without a loss scale, and its state.
      guard: decides whether all updates happen.
      transform: a function that is applied to every gradient before the step.
    """
    state, structure = jax.tree.flatten(opt_state)
    values = {leaf.name: leaf.value for leaf in loss.leaves}
    zeros = {leaf.name: transform(leaf.zero_gradient()) for leaf in loss.leaves}
    groups = {leaf.name: part for part in plan.updates for leaf in part.leaves}

    def step(params, state, gradients):
        """Return new parameters by path, and the new leaves of the state."""
        before = structure.unflatten(map(on_device, state))
        arguments = loss.tree_of(params), before, loss.tree_of(gradients)
        with context.changed(group_of=groups.get):
            new, after = guarded(tx, *arguments, guard, REPLACE, {})
        return trees.by_path(new), jax.tree.leaves(kept(before, after))

    # In a loop, the step depends on the loop's layer, and is traced for each loop.
    traced_once = jax.jit(step, inline=True)

    def rule(part: Part, state_of_part, gradients, token):
        params, numbered = state_of_part
        run = traced_once if part.depth is None else step
        gradients = {name: transform(x) for name, x in gradients.items()}

        def of_part(params, numbered):
            every = [numbered.get(n, x) for n, x in enumerate(state)]
            new, after = run(values | params, every, zeros | gradients)
            return {name: new[name] for name in params}, {n: after[n] for n in numbered}

        params, new = alone(of_part, params, jax.tree.map(on_device, numbered))
        return (params, jax.tree.map(placed_like, new, numbered)), token

    return rule


def _differentiated(loss: TracedLoss, plan: ReleasePlan, state) -> tuple:
    """Run the forward pass of a loss once.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      state: the leaves of the optimizer's state.

    Returns:
      The outputs of the loss's program, and a function that runs the backward pass with
      a rule. It may be called several times.
      From the cotangent of the loss and a rule, it returns the parameters by path, the
      leaves of the state, and the measurements.
    """
    nothing = tuple(map(jnp.float32, (0, 1, 0)))
    rules: list[Rule] = []

    def function(states, token):
        rule = lambda *args: rules[-1](*args)
        outputs, token = evaluate(loss, plan, rule, states, token)
        return (outputs[0], token), outputs

    states = [
        ({x.name: x.value for x in part.leaves}, {n: state[n] for n in part.numbers})
        for part in plan.updates
    ]
    primals = list(map(as_floats, states)), nothing
    _, pull, outputs = jax.vjp(function, *primals, has_aux=True)

    def go_back(start: jax.Array, rule: Rule) -> tuple:
        rules.append(rule)
        states, measured = pull((start, nothing))
        params, state = {}, {}
        for values, numbered in map(as_state, states):
            params |= values
            state |= numbered
        return params, [state[n] for n in sorted(state)], measured

    return outputs, go_back


def _clipped(norm: jax.Array, max_norm: float, grad: jax.Array) -> jax.Array:
    """Clip a gradient like ``optax.clip_by_global_norm``, given the global norm."""
    clipped = grad.astype(jnp.float32) / norm * jnp.float32(max_norm)
    return jnp.where(norm < jnp.float32(max_norm), grad, clipped.astype(grad.dtype))


def evaluate(
    loss: TracedLoss, plan: ReleasePlan, rule: Rule, states, token
) -> tuple[list, typing.Any]:
    """Return the outputs of the loss's program, and the token.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      rule: the function that updates parameters in the backward pass.
      states: for each stretch that updates parameters, the FloatState of the parameters
        by path and the optimizer state by index.
      token: any tree of floats.
    """
    program, remaining = loss.program, iter(states)
    known: dict = dict(zip(program.inputs, loss.arguments, strict=True))
    segments = program.segments([stretch.calls for stretch in plan.stretches])
    for stretch, segment in zip(plan.stretches, segments, strict=True):
        if stretch.part is not None and stretch.part.depth is not None:
            token = _run_loop(stretch, rule, known, next(remaining), token)
            continue
        if stretch.part is not None:
            needed = {*segment.reads, *segment.later}
            used = (plan.active & needed) - program.of_parameters
            live = [x for x in known if x in used]
            token = _release(stretch.part, rule, known, next(remaining), token, live)
        if loss.has_effects or any(map(is_opaque, stretch.calls)):
            run(stretch.calls, known)
        else:
            _run_again(segment, known)
    return program.results(known), token


def _release(part: Part, rule: Rule, known, state, token, live: Sequence[Node]):
    """Pass parameters, and all arrays that have a gradient, through ``released``."""
    nodes = {x.name: x.gradient_value for x in part.leaves if x.gradient_value}
    update = functools.partial(rule, part)
    values = {name: known[node] for name, node in nodes.items()}
    activations = [known[x] for x in live]
    values, token, activations = released(update, values, state, token, activations)
    known |= {nodes[name]: array for name, array in values.items()}
    known |= zip(live, activations, strict=True)
    return token


def _run_again(segment: Segment, known: dict) -> None:
    """Run the calls of a segment; the backward pass recomputes the cheap ones."""
    if not segment.calls:
        return

    def function(values):
        local = dict(zip(segment.reads, values, strict=True))
        run(segment.calls, local)
        return [local[x] for x in segment.writes]

    values = [known[x] for x in segment.reads]
    results = jax.checkpoint(function, policy=_is_kept)(values)
    known.update(zip(segment.writes, results, strict=True))


def _is_kept(primitive, *_, **params) -> bool:
    """Return whether to store the result of a primitive for the backward pass."""
    if primitive in (p.custom_jvp_call_p, p.jit_p):
        inner = called_jaxpr(params).jaxpr.eqns
        return any(_is_kept(eqn.primitive, **eqn.params) for eqn in inner)
    is_elementwise = elementwise.is_elementwise(primitive)
    return not (is_elementwise or primitive.name in _RECOMPUTED)


def _run_loop(stretch: Stretch, rule: Rule, known, state, token):
    """Run a scan over layers, and update each layer in its backward loop."""
    (call,), part = stretch.calls, stretch.part
    assert isinstance(call, ScanCall)
    assert part is not None
    quantized = [leaf for leaf in part.leaves if leaf.is_quantized]
    own = {node for leaf in part.leaves for node in leaf.nodes}
    of_codes = [node for leaf in quantized for node in leaf.nodes[:-1]]
    without_barriers = [call.inputs.index(node) for node in of_codes]
    inner = core.jaxpr_as_fun(without_barriers_on(call.body, without_barriers))

    def body(shared, carry, layer, stand_ins, xs):
        inside = {}
        for leaf in part.leaves:
            arrays = jax.tree.leaves((layer[leaf.name], stand_ins.get(leaf.name)))
            inside |= zip(leaf.nodes, arrays, strict=True)
        others = iter(xs)
        scanned = (inside[x] if x in own else next(others) for x in call.scanned)
        results = inner(*shared, *carry, *scanned)
        return results[: call.carry], results[call.carry :]

    def update(state, gradients, token):
        # JAX sorts dictionaries by path: [10] before [2].
        in_order = sorted(part.leaves, key=lambda leaf: leaf.is_quantized)
        gradients = {leaf.name: gradients[leaf.name] for leaf in in_order}
        return rule(part, state, gradients, token)

    def values(nodes: Iterable[Node]) -> list:
        return [value_of(node, known) for node in nodes]

    one = lambda like: jax.ShapeDtypeStruct(like.shape[1:], like.dtype)
    stand_ins = {leaf.name: one(leaf.gradient) for leaf in quantized}
    names = [leaf.name for leaf in part.leaves]
    carry, ys, token = ReleasedLoop(body, update, names, call.options, stand_ins)(
        values(call.inputs[: call.constants]),
        values(call.inputs[call.constants :][: call.carry]),
        state,
        values(x for x in call.scanned if x not in own),
        token,
    )
    known.update(zip(call.outputs, (*carry, *ys), strict=True))
    return token
