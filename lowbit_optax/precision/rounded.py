"""``apply``: round the tensors and cotangents of a loss to their formats."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import primitives

from lowbit_optax._arguments import check_choice, check_type
from lowbit_optax._jaxprs.graph import Call, Node, as_closed_jaxpr, run, value_of
from lowbit_optax._jaxprs.program import LossProgram, ScanCall, Segment
from lowbit_optax._numerics.float_format import FloatFormat
from lowbit_optax._numerics.straight_through import with_tangent_of
from lowbit_optax._types import Function
from lowbit_optax.precision.assignment import Assignment, check_same
from lowbit_optax.precision.products import native_products
from lowbit_optax.precision.tensor_rounding import (
    TensorRounding,
    from_patterns,
    keeping_patterns,
    to_patterns,
)
from lowbit_optax.precision.tensor_search import TensorSearch

Products = typing.Literal["emulated", "native"]


def apply(
    loss_fn: Function,
    assignment: Assignment,
    *,
    has_aux: bool = False,
    seed: jax.Array | int | None = None,
    stored: bool = False,
    products: Products = "emulated",
) -> Function:
    """Return a loss that rounds each tensor and each cotangent to its format.

    With operators f_i, parameters theta_i and values v_i, the loss and its gradient are

        v_{i+1} = rnd(f_i(v_i, rnd(theta_i)))
        dv_i = rnd(df_i/dv (dv_{i+1}, v_i, theta_i)),  dtheta_i = rnd(df_i/dtheta(...))

    where rnd rounds to the assigned format. Values inside of an operator are not
    rounded, and neither are its sums. A tensor that is used several times is rounded
    once, and so is the sum of its cotangents. The result of the loss, and values that
    do not affect it, are not rounded.

    Args:
      loss_fn: the function that you passed to :func:`trace`. The sizes of arrays may
        change, but the operations must be the same.
      assignment: a format for each tensor, from a function such as :func:`demote`. If
        it is an argument of your jitted step, promotion does not recompile the step.
      has_aux: if True, the loss returns ``(loss, aux)``.
      seed: an integer or a uint32 scalar for stochastic rounding, which must differ
        from step to step. If None, rounding is to nearest.
      stored: if True, the backward pass keeps tensors as bit patterns of their formats,
        in arrays of 8, 16 or 32 bits, and recomputes all other values. The assignment
        must not be traced. If a tensor contains a NaN or infinity for which its format
        has no pattern, the whole tensor becomes NaN.
      products: if ``"native"``, a ``dot_general`` of two tensors and its backward
        products run in the dtypes of their formats: float8_e4m3fn and float8_e5m2 with
        any bias, with sums in float32, or otherwise bfloat16 if it represents all
        numbers of both formats. They ignore the ``precision`` that the loss sets. All
        other products do not change: convolutions, products of wider formats or of
        constants, and products in while loops or in functions with their own derivative
        rule. :func:`products` lists native products. The assignment must not be traced.

    Returns:
      A function ``(params, *batch) -> (loss, overflow)``, or
      ``(loss, (aux, overflow))`` with ``has_aux``. Differentiate it with
      ``jax.value_and_grad(..., has_aux=True)``. ``overflow``, a float32[tensors] for
      :func:`promote`, is the share of each tensor's elements whose magnitude was above
      the largest number of its format. In a scan or loop, it is the mean over the
      iterations that computed the tensor. It is 0 for branches that did not run.

    Raises:
      TypeError: if ``assignment`` is not an :class:`Assignment`.
      ValueError: if the assignment is traced and ``stored`` or native products are set.
        The returned function raises a ValueError if the assignment was made for another
        loss.

    References:
      Lee et al. 2023, equation (1); section 4.2.

    >>> import jax, jax.numpy as jnp
    >>> from lowbit_optax import precision
    >>> loss_fn = lambda w, x: jnp.sum(x @ w)
    >>> w, x = jnp.full((2, 1), 0.3), jnp.full((1, 2), 50.0)
    >>> assignment = precision.uniform(precision.trace(loss_fn, w, x))
    >>> loss, overflow = apply(loss_fn, assignment)(w, x)
    >>> print([tensor.name for tensor in assignment.plan.tensors], overflow)
    ['params', 'batch[0]', 'dot_general.0'] [0. 1. 0.]
    >>> print(precision.promote(assignment, overflow).low)
    [ True False  True]
    """
    accepted = "an Assignment, from demote, uniform or operator_based"
    check_type("apply: assignment", assignment, Assignment, accepted)
    check_choice("apply", "products", products, Products)
    is_native = products == "native"
    if (stored or is_native) and isinstance(assignment.low, Tracer):
        option = "stored=True" if stored else 'products="native"'
        raise ValueError(
            f"apply: assignment must not be traced with {option}, which chooses dtypes "
            "from it; close over the assignment instead of passing it to jit"
        )

    if isinstance(seed, int):
        seed %= 2**32
    # Use numpy arrays, because indexing a jax.Array under jit returns a tracer.
    known = lambda x: x if isinstance(x, Tracer) else np.asarray(x)

    @functools.wraps(loss_fn)
    def rounded(params, *batch):
        found = TensorSearch(loss_fn, has_aux, params, batch)
        check_same(assignment, found.tensors)
        bits = None if seed is None else jnp.asarray(seed, jnp.uint32)
        rounding = TensorRounding(jax.tree.map(known, assignment), bits, stored)
        native = native_products(found, assignment) if is_native else {}
        evaluation = _Evaluation(found, rounding, native)
        evaluate = evaluation.in_segments if stored else evaluation.all_at_once
        arguments = jax.tree.leaves((params, batch))
        outputs, shares = evaluate(found.program, arguments, jnp.uint32(0))
        result = jax.tree.unflatten(jax.tree.structure(found.result), outputs)
        overflow = jnp.zeros(0, jnp.float32)
        if found.tensors:
            total, times = jnp.stack([shares[n] for n in sorted(shares)]).T
            overflow = total / jnp.maximum(times, jnp.float32(1))
        if not has_aux:
            return result, overflow
        loss, aux = result
        return loss, (aux, overflow)

    return rounded


_MAX_RUNS = 2**16
"""Runs of a loop use different random bits up to this number of iterations."""


_Shares = dict[int, jax.Array]
"""A dict from the index of a tensor to a float32[2]: the sum of the shares of elements
that overflowed, and the number of times that the tensor was computed."""


class _Evaluation(typing.NamedTuple):
    """Evaluates a traced loss with its tensors rounded.

    Args:
      found: the tensors of the loss.
      rounding: rounds the tensors.
      native: functions that compute native products.
    """

    found: TensorSearch
    rounding: TensorRounding
    native: Mapping[Call, Callable[[Sequence], Sequence]]

    def all_at_once(
        self, program: LossProgram, arguments: Sequence, iteration: jax.Array
    ) -> tuple[list, _Shares]:
        """Return a program's outputs, and the shares of elements that overflowed.

        Args:
          program: the program of the loss or of a body.
          arguments: its arguments.
          iteration: the index of the scan's iteration, a uint32 scalar for random bits.
        """
        segment = Segment(program.calls, program.inputs, program.outputs)
        return self._run(segment, iteration, True, arguments)

    def in_segments(
        self, program: LossProgram, arguments: Sequence, iteration: jax.Array
    ) -> tuple[list, _Shares]:
        """Do the same as ``all_at_once``, but keep only patterns for the backward pass.

        The backward pass recomputes one segment between scans at a time. A scan is a
        segment of its own, and its iterations are recomputed one at a time, because
        recomputing them together would need memory for the values of all iterations.
        """
        known = dict(zip(program.inputs, arguments, strict=True))
        shares: _Shares = {}
        for i, segment in enumerate(program.segments()):
            evaluate = functools.partial(self._run, segment, iteration, i == 0)
            if not segment.is_scan:
                evaluate = keeping_patterns(evaluate)
            written, more = evaluate([known[node] for node in segment.reads])
            known.update(zip(segment.writes, written, strict=True))
            shares.update(more)
        return program.results(known), shares

    def _run(
        self, segment: Segment, iteration: jax.Array, is_first: bool, read: Sequence
    ) -> tuple[list, _Shares]:
        """Run a segment. The first one also rounds the inputs that it reads."""
        shares: _Shares = {}

        def changed(node: Node, x):
            number = self.found.numbers.get(node)
            if number is None:
                return x
            x, share = self.rounding.round(number, x, iteration)
            shares[number] = jnp.stack([share, jnp.float32(1)])
            return x

        def evaluate_bodies(call: Call, operands: Sequence):
            outputs, more = evaluators[call.primitive](call, operands, iteration)
            shares.update(more)
            return outputs

        evaluators = {
            primitives.remat_p: self._checkpoint,
            primitives.cond_p: self._conditional,
            primitives.while_p: self._loop,
            primitives.scan_p: self._scan,
        }
        bodies = {c: functools.partial(evaluate_bodies, c) for c in self.found.bodies}
        known = dict(zip(segment.reads, read, strict=True))
        if is_first:
            known = {node: changed(node, x) for node, x in known.items()}
        run(segment.calls, known, {**self.native, **bodies}, changed)
        return [value_of(node, known) for node in segment.writes], shares

    def _checkpoint(self, call: Call, operands: Sequence, iteration):
        (body,) = self.found.bodies[call].programs
        evaluate = jax.checkpoint(
            lambda iteration, *operands: self.all_at_once(body, operands, iteration),
            prevent_cse=call.params["prevent_cse"],
            policy=call.params["policy"],
        )
        return evaluate(iteration, *operands)

    def _conditional(self, call: Call, operands: Sequence, iteration):
        index, *operands = operands
        branches = self.found.bodies[call].programs
        none = {n: _NONE for body in branches for n in self.found.made_in(body)}

        def evaluate(branch: LossProgram, iteration, *operands):
            outputs, shares = self.all_at_once(branch, operands, iteration)
            return _typed(outputs, call), none | shares

        evaluators = [functools.partial(evaluate, branch) for branch in branches]
        return lax.switch(index, evaluators, iteration, *operands)

    def _loop(self, call: Call, operands: Sequence, iteration):
        bodies = self.found.bodies[call]
        (body,) = bodies.programs
        of_condition, constants, carry, _ = bodies.parts_of(operands)
        condition = LossProgram(as_closed_jaxpr(call.params["cond_jaxpr"]))
        rounding = dataclasses.replace(
            self.rounding, is_stored=False, has_cotangents=False
        )
        inner = self._replace(rounding=rounding)
        start = iteration * jnp.uint32(_MAX_RUNS)

        def goes_on(state):
            return condition.evaluate([*of_condition, *state[2]])[0]

        def run_once(state):
            i, sums, carry = state
            arguments = [*constants, *carry]
            outputs, shares = inner.all_at_once(body, arguments, start + i)
            sums = {n: sums[n] + share for n, share in shares.items()}
            return i + jnp.uint32(1), sums, _typed(outputs, call)

        sums = dict.fromkeys(self.found.made_in(body), _NONE)
        state = jnp.uint32(0), sums, list(carry)
        _, sums, carry = lax.while_loop(goes_on, run_once, state)
        return carry, sums

    def _scan(self, call: ScanCall, operands: Sequence, iteration):
        bodies, length = self.found.bodies[call], call.params["length"]
        (body,) = bodies.programs
        _, constants, carry, xs = bodies.parts_of(operands)
        first = iteration * jnp.uint32(length)
        is_stored = self.rounding.is_stored
        formats = self._carried_formats(call, body) if is_stored else {}

        def patterns_of(carry):
            wide = lambda i: lax.stop_gradient(carry[i]).astype(jnp.float32)
            return {i: to_patterns(fmt, wide(i)) for i, fmt in formats.items()}

        def iterate(carry, x):
            (carry, patterns), (i, x) = carry, x
            carry = list(carry)
            for j, fmt in formats.items():
                # Decode the patterns, so that the backward pass drops the carry.
                y = from_patterns(fmt, patterns[j]).astype(carry[j].dtype)
                carry[j] = with_tangent_of(carry[j], y)
            arguments = [*constants, *carry, *x]
            outputs, shares = self.all_at_once(body, arguments, first + i)
            carry = outputs[: call.carry]
            return (carry, patterns_of(carry)), (outputs[call.carry :], shares)

        iterations = jnp.arange(length, dtype=jnp.uint32)
        step = keeping_patterns(iterate, prevent_cse=False) if is_stored else iterate
        start, xs = (carry, patterns_of(carry)), (iterations, xs)
        (carry, _), (ys, shares) = lax.scan(step, start, xs, **call.options)
        return [*carry, *ys], {n: jnp.sum(x, axis=0) for n, x in shares.items()}

    def _carried_formats(
        self, call: ScanCall, body: LossProgram
    ) -> dict[int, FloatFormat]:
        """Return the formats, by index, of carries whose format never changes."""
        numbers, found = self.found.numbers, {}
        carried = call.inputs[call.constants :][: call.carry]
        for i, (before, after) in enumerate(zip(carried, body.outputs, strict=False)):
            if before in numbers and after in numbers:
                fmt = self.rounding.format(numbers[after])
                if fmt == self.rounding.format(numbers[before]):
                    found[i] = fmt
        return found


_NONE = np.zeros(2, np.float32)
"""The entry of ``_Shares`` for a tensor that was not computed."""


def _typed(outputs: Sequence, call: Call) -> list[jax.Array]:
    """Cast a body's outputs to the call's dtypes, because constants may differ."""
    pairs = zip(outputs, call.outputs, strict=True)
    return [jnp.asarray(x, node.aval.dtype) for x, node in pairs]
