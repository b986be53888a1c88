"""``apply``: a loss whose tensors and cotangents are rounded to their formats."""

import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from lowbit_optax._jaxprs.program import LossProgram, Step
from lowbit_optax._numerics.random_bits import RandomBits, leaf_number, random_bits
from lowbit_optax._numerics.streams import BACKWARD_STREAM, FORWARD_STREAM
from lowbit_optax.precision import tensors
from lowbit_optax.precision.assignment import Assignment
from lowbit_optax.precision.float_format import (
    FP32,
    FloatFormat,
    Grid,
    grid_of,
    round_to_grid,
)
from lowbit_optax.precision.tensors import Tensors

_STORED = "lowbit_optax.precision"


def apply(
    loss_fn: Callable,
    assignment: Assignment,
    *,
    has_aux: bool = False,
    seed: jax.Array | int | None = None,
    stored: bool = False,
) -> Callable:
    """The loss with each tensor and each cotangent rounded to its format.

    With rnd the rounding to the format that the assignment has for a tensor,

        v_{i+1} = rnd(f_i(v_i, rnd(theta_i)))
        dv_i = rnd(df_i/dv (dv_{i+1}, v_i, theta_i)),  dtheta_i = rnd(df_i/dtheta(...))

    and no rounding within an operator f_i, its accumulations among them. A tensor that
    is used several times is rounded once, and so is the sum of its cotangents. The
    result of the loss is not rounded, nor is what its value does not depend on.

    Args:
      loss_fn: as given to :func:`trace`; array sizes may be others, the operations may
        not.
      assignment: from :func:`demote` and the like. An argument of the jitted function
        around this call, it can be promoted without compiling anew.
      has_aux: whether the loss returns ``(loss, aux)``.
      seed: None rounds to nearest. An integer or uint32 scalar, another one each step,
        rounds stochastically.
      stored: whether what the backward pass needs is kept in patterns of the formats'
        bits, in arrays of 8, 16 or 32 bits, and everything between tensors computed
        again. The assignment must then be known when compiling, not an argument. A NaN
        or infinity that a format has no pattern for makes the whole tensor NaN.

    Returns:
      A function ``(params, *batch) -> (loss, overflow)``, or
      ``(loss, (aux, overflow))`` with ``has_aux``, for ``jax.value_and_grad`` with
      ``has_aux=True``. ``overflow`` is float32[tensors], the share of each tensor's
      elements whose magnitude was past its format's largest number, for
      :func:`promote`.

    Raises:
      ValueError: when called, if the loss is not the one that was traced; if ``stored``
        and the assignment is traced.

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
    if not isinstance(assignment, Assignment):
        raise TypeError(
            f"apply: assignment is a {type(assignment).__name__}; accepted is what "
            "demote, uniform or operator_based returns"
        )
    if stored and isinstance(assignment.low, jax.core.Tracer):
        raise ValueError(
            "apply: stored=True chooses dtypes, so the assignment must be known when "
            "compiling; it is traced. Close over it instead of passing it to jit"
        )

    @functools.wraps(loss_fn)
    def rounded(params, *batch):
        found, shapes = tensors.trace(loss_fn, has_aux, params, batch)
        _check_same(assignment, found)
        arguments = jax.tree.leaves((params, batch))
        run = _Run(assignment, found, seed, stored)
        evaluate = run.in_parts if stored else run
        outputs, shares = evaluate(found.program, arguments, jnp.uint32(0))
        result = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        overflow = [shares[i] for i in range(len(found.tensors))]
        overflow = jnp.stack(overflow) if overflow else jnp.zeros(0, jnp.float32)
        if not has_aux:
            return result, overflow
        loss, aux = result
        return loss, (aux, overflow)

    return rounded


class _Run:
    """Evaluates programs with their tensors rounded."""

    def __init__(self, assignment: Assignment, found: Tensors, seed, stored: bool):
        # Known levels as numpy: indexed under jit, an array of JAX's would be traced.
        known = lambda x: x if isinstance(x, jax.core.Tracer) else np.asarray(x)
        self._assignment = jax.tree.map(known, assignment)
        self._found = found
        self._stored = stored
        if isinstance(seed, int):
            seed %= 2**32
        self._seed = None if seed is None else jnp.asarray(seed, jnp.uint32)

    def __call__(
        self, program: LossProgram, arguments: Sequence, iteration: jax.Array
    ) -> tuple[list, dict[int, jax.Array]]:
        """The outputs, and by tensor the share of elements that overflowed.

        Args:
          program: the loss's, or a nested one.
          arguments: of it.
          iteration: uint32 scalar, counts a scan's turns, for random bits.
        """
        instead, changed, shares = self._hooks(program, iteration)
        return program.evaluate(arguments, instead, changed), shares

    def in_parts(
        self, program: LossProgram, arguments: Sequence, iteration: jax.Array
    ) -> tuple[list, dict[int, jax.Array]]:
        """The same, and between scans only tensors' patterns are kept.

        Computed again as a whole, a scan would have all its values at once; so it is
        apart, and its iterations are computed again one by one.
        """
        values = dict(zip(program.inputs, arguments, strict=True))
        shares: dict[int, jax.Array] = {}
        for i, part in enumerate(program.parts()):

            def run(*given, part=part, is_first=i == 0):
                instead, changed, shares = self._hooks(program, iteration)
                known = dict(zip(part.reads, given, strict=True))
                if is_first:
                    known = {n: changed(n, x) for n, x in known.items()}
                program.run(part.steps, known, instead, changed)
                return [known[n] for n in part.writes], shares

            is_scan = i % 2
            run = run if is_scan else _keeping_patterns(run)
            written, more = run(*(values[n] for n in part.reads))
            values.update(zip(part.writes, written, strict=True))
            shares.update(more)
        return program.results(values), shares

    def _hooks(self, program: LossProgram, iteration: jax.Array):
        """What rounds a program's tensors, and where it puts how much overflows."""
        shares: dict[int, jax.Array] = {}

        def changed(value: int, x):
            number = self._found.number(program, value)
            if number is None:
                return x
            x, shares[number] = self._round(number, x, iteration)
            return x

        def nested(step: Step):
            run = self._scan if step.scan is not None else self._checkpoint

            def results(given):
                outputs, more = run(program, step, given, iteration)
                shares.update(more)
                return outputs

            return results

        instead = {
            id(step): nested(step)
            for step in program.steps
            if id(step) in self._found.nested
        }
        return instead, changed, shares

    def _checkpoint(self, program: LossProgram, step: Step, given, iteration):
        body = self._found.nested[id(step)]
        params = step.eqn.params
        run = lambda iteration, *given: self(body, given, iteration)
        run = jax.checkpoint(
            run, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
        return run(iteration, *given)

    def _scan(self, program: LossProgram, step: Step, given, iteration):
        scan, body = step.scan, self._found.nested[id(step)]
        constants = given[: scan.constants]
        carry = given[scan.constants : scan.constants + scan.carry]
        xs = given[scan.constants + scan.carry :]
        first = iteration * jnp.uint32(scan.length)
        formats = self._carried(program, step) if self._stored else {}

        def packed(carry):
            wide = lambda i: lax.stop_gradient(carry[i]).astype(jnp.float32)
            return {i: _pack(fmt, wide(i)) for i, fmt in formats.items()}

        def seen(i, x, patterns):
            """A carry as its patterns: it itself need not be kept for its gradient."""
            if i not in formats:
                return x
            value = _unpack(formats[i], patterns[i]).astype(x.dtype)
            return _with_rounded_cotangent(x, value, _EXACT)

        def turn(carry, x):
            (carry, patterns), (i, x) = carry, x
            carry = [seen(j, c, patterns) for j, c in enumerate(carry)]
            outputs, shares = self(body, [*constants, *carry, *x], first + i)
            carry = outputs[: scan.carry]
            return (carry, packed(carry)), (outputs[scan.carry :], shares)

        turns = jnp.arange(scan.length, dtype=jnp.uint32)
        (carry, _), (ys, shares) = lax.scan(
            _keeping_patterns(turn, prevent_cse=False) if self._stored else turn,
            (carry, packed(carry)),
            (turns, xs),
            length=scan.length,
            reverse=scan.reverse,
            unroll=scan.unroll,
        )
        return [*carry, *ys], jax.tree.map(_mean, shares)

    def _carried(self, program: LossProgram, step: Step) -> dict[int, FloatFormat]:
        """The formats of a scan's carries, where they stay what they are at first."""
        scan, body = step.scan, self._found.nested[id(step)]
        found = {}
        for i in range(scan.carry):
            before = self._found.number(program, step.inputs[scan.constants + i])
            after = self._found.number(body, body.outputs[i])
            if before is not None and after is not None:
                fmt = self._format(after)
                if fmt == self._format(before):
                    found[i] = fmt
        return found

    def _format(self, number: int) -> FloatFormat:
        formats = self._assignment.formats
        return formats.low if self._assignment.low[number] else formats.high

    def _round(self, number: int, x: jax.Array, iteration: jax.Array):
        assignment, formats = self._assignment, self._assignment.formats
        bits = None
        if self._seed is not None:
            name = leaf_number(assignment.plan.tensors[number].name)
            (bits,) = random_bits(self._seed, iteration, [name])
        words = None if bits is None else bits.words(x.shape, FORWARD_STREAM)
        low, low_backward = assignment.low[number], assignment.low_backward[number]
        grid = _choose(low, formats.low, formats.high)
        backward = _choose(low_backward, formats.low_backward, formats.high_backward)
        wide = lax.stop_gradient(x).astype(jnp.float32)
        y, overflows = round_to_grid(wide, grid, words)
        if self._stored:
            fmt = self._format(number)
            y = _unpack(fmt, checkpoint_name(_pack(fmt, y), _STORED))
        share = _mean(overflows.astype(jnp.float32))
        keys = None if bits is None else (bits.key, bits.second)
        y = _with_rounded_cotangent(x, y.astype(x.dtype), _Backward(backward, keys))
        return y, share


class _Backward(typing.NamedTuple):
    """What a cotangent is rounded with; None for keys rounds to nearest."""

    grid: Grid
    keys: tuple[jax.Array, jax.Array] | None


@jax.custom_vjp
def _with_rounded_cotangent(x, y, backward):
    """y, whose cotangent is rounded and becomes that of x."""
    del x, backward
    return y


def _forward(x, y, backward):
    del x
    return y, backward


def _backward(backward, cotangent):
    words = None
    if backward.keys is not None:
        words = RandomBits(*backward.keys).words(cotangent.shape, BACKWARD_STREAM)
    rounded, _ = round_to_grid(cotangent.astype(jnp.float32), backward.grid, words)
    return rounded.astype(cotangent.dtype), None, None


_with_rounded_cotangent.defvjp(_forward, _backward)


_EXACT = _Backward(grid_of(FP32), None)


def _pack(fmt: FloatFormat, y: jax.Array) -> tuple[jax.Array, ...]:
    """A rounded tensor's patterns; whether it is finite, if they cannot tell."""
    if fmt.specials == "ieee":
        return (fmt.encode(y),)
    return fmt.encode(y), jnp.all(jnp.isfinite(y))


def _unpack(fmt: FloatFormat, packed: tuple[jax.Array, ...]) -> jax.Array:
    """The tensor; NaN everywhere if it was not finite and the format has no NaN."""
    y = fmt.decode(packed[0])
    if len(packed) == 1:
        return y
    return jnp.where(packed[1], y, jnp.float32(jnp.nan))


def _keeping_patterns(function: Callable, **options) -> Callable:
    """The function, of which named patterns are kept and the rest computed again."""
    policy = jax.checkpoint_policies.save_only_these_names(_STORED)
    return jax.checkpoint(function, policy=policy, **options)


def _mean(shares: jax.Array) -> jax.Array:
    """Nothing of no elements overflows."""
    return jnp.sum(shares) / jnp.float32(max(shares.size, 1))


def _choose(is_low, low, high) -> Grid:
    if isinstance(is_low, jax.Array):
        pick = lambda a, b: jnp.where(is_low, a, b)
        return jax.tree.map(pick, grid_of(low), grid_of(high))
    return grid_of(low if is_low else high)


def _check_same(assignment: Assignment, found: Tensors) -> None:
    planned = assignment.plan.tensors
    for i in range(max(len(planned), len(found.tensors))):
        now, then = (ts[i] if i < len(ts) else None for ts in (found.tensors, planned))
        if now is None or then is None or _what(now) != _what(then):
            raise ValueError(
                f"apply: the loss is not the one that was traced: tensor {i} is "
                f"{_describe(now)}, in the assignment {_describe(then)}"
            )
    if len(np.shape(assignment.low)) != 1 or len(assignment.low) != len(planned):
        raise ValueError(
            f"apply: the assignment's levels have shape {np.shape(assignment.low)} for "
            f"{len(planned)} tensors"
        )


def _what(tensor):
    return tensor.name, tensor.kind, tensor.group, len(tensor.shape)


def _describe(tensor) -> str:
    if tensor is None:
        return "none"
    return f"{tensor.name} of shape {list(tensor.shape)} in group {tensor.group}"
