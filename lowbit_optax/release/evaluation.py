"""A loss, evaluated with the wrappers in the places that a plan chose.

JAX differentiates the result. Before the first use of a parameter it goes through
:func:`lowbit_optax.release.released`, and scans over parameters that can be updated
layer by layer run as :func:`lowbit_optax.release.scan`.
"""

import itertools
import typing
from collections.abc import Callable, Sequence

import jax
from jax.extend import core
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import Call, Node, called_jaxpr, run, value_of
from lowbit_optax._jaxprs.program import ScanCall, without_barriers_on
from lowbit_optax.release.float_state import FloatState
from lowbit_optax.release.plan import OPAQUE, ReleasePlan, Stretch
from lowbit_optax.release.traced_loss import TracedLoss
from lowbit_optax.release.wrappers import released, released_loop

Rule = Callable[..., tuple]
"""``(stretch, (params, state), gradients, index) -> (params, state)``, all by path of
the parameter; ``index`` is a layer's, or None."""

_RECOMPUTED = frozenset(
    {
        "atan2", "broadcast_in_dim", "concatenate", "erf", "iota", "one_minus_square",
        "random_bits", "random_unwrap", "random_wrap", "rem", "reshape", "rev", "round",
        "slice", "squeeze", "threefry2x32", "transpose",
    }
)  # fmt: skip
"""Cheap primitives, beside those that kernels compute elementwise."""


def evaluate(
    loss: TracedLoss,
    plan: ReleasePlan,
    rule: Rule,
    arrays: dict[str, jax.Array],
    states: Sequence[FloatState],
) -> list:
    """The outputs of the loss's program.

    Args:
      loss, plan: of the optimizer.
      rule: updates parameters in the backward pass.
      arrays: by path, the arrays that are differentiated. They are parameters, or
        zeros that stand in for quantised ones that no loop updates.
      states: for each stretch that updates parameters, the quantised ones of these by
        path, and their state.
    """
    program, remaining = loss.program, iter(states)
    known = dict(zip(program.inputs, loss.arguments, strict=True))
    for leaf in loss.leaves:
        if leaf.gradient_value is not None and leaf.name in arrays:
            known[leaf.gradient_value] = arrays[leaf.name]
    for stretch, read_later in zip(
        plan.stretches, _read_later(plan, loss), strict=True
    ):
        if stretch.in_loop:
            _run_loop(stretch, rule, known, next(remaining))
            continue
        if stretch.part is not None:
            read = {x for call in stretch.calls for x in call.inputs} | read_later
            _release(loss, plan, stretch, rule, known, read, next(remaining))
        _run(stretch.calls, plan.active, known, read_later, loss.has_effects)
    return program.results(known)


def _read_later(plan: ReleasePlan, loss: TracedLoss) -> list[set[Node]]:
    """What is read after each stretch."""
    read, found = set(loss.program.outputs), []
    for stretch in reversed(plan.stretches):
        found.append(set(read))
        read.update(x for call in stretch.calls for x in call.inputs)
    return found[::-1]


def _release(loss, plan, stretch: Stretch, rule: Rule, known, read, state) -> None:
    """Pass a stretch's parameters, and all that a gradient flows through, on."""
    leaves = stretch.leaves
    names = {leaf.name: leaf.gradient_value for leaf in leaves}
    live = [
        x
        for x in known
        if x in plan.active and x in read and x not in loss.program.of_parameters
    ]
    is_array = [leaf.name for leaf in leaves if not leaf.is_quantized]

    def update(arrays, state, gradients):
        quantized, rest = state
        values = {name: arrays[name] for name in is_array} | quantized
        new, rest = rule(stretch, (values, rest), gradients, None)
        # The cotangent of what stands in for a quantised parameter is of no use.
        found = gradients | {name: new[name] for name in is_array}
        return found, ({name: new[name] for name in quantized}, rest)

    params = {name: known[node] for name, node in names.items()}
    arrays, activations = released(update, params, state, [known[x] for x in live])
    known |= {node: arrays[name] for name, node in names.items()}
    known |= zip(live, activations, strict=True)


def _run(calls: Sequence[Call], active, known: dict, read_later, has_effects) -> None:
    """Run calls. The backward pass computes what is cheap between products again."""
    if has_effects:
        return run(calls, known)
    is_opaque = lambda call: call.primitive.name in OPAQUE
    groups = [(x, list(each)) for x, each in itertools.groupby(calls, is_opaque)]
    for number, (opaque, group) in enumerate(groups):
        if opaque:
            run(group, known)
        else:
            later = [call for _, each in groups[number + 1 :] for call in each]
            needed = read_later.union(*(call.inputs for call in later))
            _run_again(group, active, known, needed)


def _run_again(calls: Sequence[Call], active, known: dict, read_later) -> None:
    """Run calls, of which the backward pass computes the cheap ones again.

    A value that is read both here and later is an output too. The sum of its
    cotangents then begins with those from later, as in ``jax.grad``, and so has the
    same bits.
    """
    made = [x for call in calls for x in call.outputs]
    reads = dict.fromkeys(x for call in calls for x in call.inputs)
    reads = [x for x in reads if x in known]
    outputs = [x for x in reads if x in active and x in read_later]
    outputs += [x for x in made if x in read_later]

    def function(values):
        local: dict[Node, typing.Any] = dict(zip(reads, values, strict=True))
        run(calls, local)
        return [local[x] for x in outputs]

    results = jax.checkpoint(function, policy=_is_kept)([known[x] for x in reads])
    known.update(zip(outputs, results, strict=True))


def _is_kept(primitive, *_, **params) -> bool:
    """Whether the backward pass keeps what a primitive computed, if it needs it."""
    if primitive in (p.custom_jvp_call_p, p.jit_p):
        inner = called_jaxpr(params).jaxpr.eqns
        return any(_is_kept(eqn.primitive, **eqn.params) for eqn in inner)
    is_elementwise = elementwise.is_elementwise(primitive)
    return not (is_elementwise or primitive.name in _RECOMPUTED)


def _run_loop(stretch: Stretch, rule: Rule, known, state) -> None:
    """Run a scan over layers that its backward loop updates."""
    (call,), leaves = stretch.calls, stretch.leaves
    assert isinstance(call, ScanCall)
    scan = call.scan
    where: dict[Node | None, int] = {node: n for n, node in enumerate(call.inputs)}
    plain = [leaf for leaf in leaves if not leaf.is_quantized]
    quantized = [leaf for leaf in leaves if leaf.is_quantized]
    of_layer = [where[leaf.gradient_value] for leaf in (*plain, *quantized)]
    of_codes = [where[node] for leaf in quantized for node in leaf.array_values]
    first_x = scan.constants + scan.carry
    of_xs = sorted({*range(first_x, len(call.inputs))} - {*of_layer, *of_codes})
    inner = core.jaxpr_as_fun(without_barriers_on(scan.body, of_codes))

    def body(shared, carry, layer, codes, xs):
        operands: dict = dict(enumerate((*shared, *carry)))
        operands |= zip(of_layer, layer, strict=True)
        operands |= zip(of_codes, jax.tree.leaves(codes), strict=True)
        operands |= zip(of_xs, xs, strict=True)
        results = inner(*(operands[n] for n in range(len(call.inputs))))
        return results[: scan.carry], results[scan.carry :]

    def update(layer, state, gradients, index):
        (codes, rest), names = state, [leaf.name for leaf in (*plain, *quantized)]
        old = dict(zip(names, layer, strict=False)) | codes
        by_name = dict(zip(names, gradients, strict=True))
        new, rest = rule(stretch, (old, rest), by_name, index)
        return [new[x.name] for x in plain], ({x: new[x] for x in codes}, rest)

    operands = [
        None if n in {*of_layer, *of_codes} else value_of(node, known)
        for n, node in enumerate(call.inputs)
    ]
    carry, ys = released_loop(
        body,
        update,
        operands[: scan.constants],
        operands[scan.constants : first_x],
        [value_of(call.inputs[n], known) for n in of_layer[: len(plain)]],
        state,
        [operands[n] for n in of_xs],
        length=scan.length,
        reverse=scan.reverse,
        unroll=scan.unroll,
        stand_ins=[
            jax.ShapeDtypeStruct(x.gradient.shape[1:], x.gradient.dtype)
            for x in quantized
        ],
    )
    known.update(zip(call.outputs, (*carry, *ys), strict=True))
