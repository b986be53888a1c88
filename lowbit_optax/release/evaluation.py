"""Evaluate a loss with wrappers at the places that the plan chose.

JAX differentiates the result. Each parameter passes through ``released`` before its
first use. A scan over parameters that can be updated layer by layer runs as a
``ReleasedLoop``, like ``release.scan``.

The loss also passes a *token*, a small tree of floats, through every wrapper. No
operation of the loss reads it. In the backward pass, its cotangent visits the backward
rules of the wrappers in reverse order. Each rule reads the measurements of earlier
rules, such as the sum of squared gradients, and adds its own. JAX skips a backward rule
whose outputs have no cotangent. The token always has one, so JAX calls every rule, and
even a parameter that the loss does not use gets its new value.
"""

import typing
from collections.abc import Callable, Iterable, Sequence

import jax
from jax.extend import core
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import Node, called_jaxpr, run, value_of
from lowbit_optax._jaxprs.program import ScanCall, Segment, without_barriers_on
from lowbit_optax.release.parts import Part
from lowbit_optax.release.plan import ReleasePlan, Stretch, is_opaque
from lowbit_optax.release.traced_loss import TracedLoss
from lowbit_optax.release.wrappers import ReleasedLoop, released

Rule = Callable[..., tuple]
"""``(part, params, state, gradients, token) -> (params, state, token)``.
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


def evaluate(
    loss: TracedLoss, plan: ReleasePlan, rule: Rule, arrays, states, token
) -> tuple[list, typing.Any]:
    """Return the outputs of the loss's program, and the token.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      rule: the function that updates parameters in the backward pass.
      arrays: the differentiated arrays by path: parameters, or zeros that stand in for
        quantised parameters that no loop updates.
      states: for each stretch that updates parameters, a pair: the parameters that
        :func:`carried` returns, and the optimizer state.
      token: any tree of floats.
    """
    program, remaining = loss.program, iter(states)
    known: dict = dict(zip(program.inputs, loss.arguments, strict=True))
    known |= {x.gradient_value: arrays[x.name] for x in loss.leaves if x.name in arrays}
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


def carried(part: Part) -> dict[str, typing.Any]:
    """Return the quantised and integer parameters by path.

    They are passed along with the state, because their cotangents cannot represent
    their new values.
    """
    return {
        leaf.name: leaf.value
        for leaf in part.leaves
        if leaf.is_quantized or leaf.gradient_value is None
    }


def _release(part: Part, rule: Rule, known, state, token, live: Sequence[Node]):
    """Pass parameters, and all arrays that have a gradient, through ``released``."""
    nodes = {x.name: x.gradient_value for x in part.leaves if x.gradient_value}

    def update(params, state, gradients):
        (arrays, _), (values, rest), (gradients, token) = params, state, gradients
        new, rest, token = rule(part, arrays | values, rest, gradients, token)
        # The cotangents of arrays that stand in for quantised parameters are not used.
        found = gradients | {x: new[x] for x in arrays if x not in values}
        return (found, token), ({x: new[x] for x in values}, rest)

    params = {name: known[node] for name, node in nodes.items()}, token
    params, activations = released(update, params, state, [known[x] for x in live])
    known |= {nodes[name]: array for name, array in params[0].items()}
    known |= zip(live, activations, strict=True)
    return params[1]


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
    plain = [leaf for leaf in part.leaves if not leaf.is_quantized]
    quantized = [leaf for leaf in part.leaves if leaf.is_quantized]
    of_codes = [node for leaf in quantized for node in leaf.array_values]
    own = {*of_codes, *(leaf.gradient_value for leaf in part.leaves)}
    without_barriers = [call.inputs.index(node) for node in of_codes]
    inner = core.jaxpr_as_fun(without_barriers_on(call.body, without_barriers))

    def body(shared, carry, layers, codes, xs):
        arrays = layers[0] | layers[1]
        inside = {leaf.gradient_value: arrays[leaf.name] for leaf in part.leaves}
        # A dictionary's leaves are in the order of its sorted paths: [10] before [2].
        in_order = jax.tree.leaves([codes[leaf.name] for leaf in quantized])
        inside |= zip(of_codes, in_order, strict=True)
        others = iter(xs)
        scanned = (inside[x] if x in own else next(others) for x in call.scanned)
        results = inner(*shared, *carry, *scanned)
        return results[: call.carry], results[call.carry :]

    def update(layer, state, gradients, token):
        codes, rest = state
        found = gradients[0] | gradients[1]
        in_order = {leaf.name: found[leaf.name] for leaf in (*plain, *quantized)}
        new, rest, token = rule(part, layer | codes, rest, in_order, token)
        return {x: new[x] for x in layer}, ({x: new[x] for x in codes}, rest), token

    def values(nodes: Iterable[Node]) -> list:
        return [value_of(node, known) for node in nodes]

    one = lambda like: jax.ShapeDtypeStruct(like.shape[1:], like.dtype)
    stand_ins = {leaf.name: one(leaf.gradient) for leaf in quantized}
    names = [leaf.name for leaf in part.leaves]
    carry, ys, token = ReleasedLoop(body, update, names, call.options, stand_ins)(
        values(call.inputs[: call.constants]),
        values(call.inputs[call.constants :][: call.carry]),
        {leaf.name: known[leaf.gradient_value] for leaf in plain},
        state,
        values(x for x in call.scanned if x not in own),
        token,
    )
    known.update(zip(call.outputs, (*carry, *ys), strict=True))
    return token
