"""``apply``: a loss whose tensors and cotangents are rounded to their formats."""

import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from lowbit_optax.loss_program import LossProgram, Step
from lowbit_optax.precision import tensors
from lowbit_optax.precision.assignment import Assignment
from lowbit_optax.precision.float_format import Grid, grid_of, round_to_grid
from lowbit_optax.precision.tensors import Tensors
from lowbit_optax.random_bits import RandomBits, leaf_number, random_bits

_STORED = "lowbit_optax.precision"
_BACKWARD_STREAM = 1


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
        evaluate = lambda *arguments: run(found.program, arguments, jnp.uint32(0))
        if stored:
            policy = jax.checkpoint_policies.save_only_these_names(_STORED)
            evaluate = jax.checkpoint(evaluate, policy=policy)
        outputs, shares = evaluate(*arguments)
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
                outputs, more = run(
                    step, self._found.nested[id(step)], given, iteration
                )
                shares.update(more)
                return outputs

            return results

        instead = {
            id(step): nested(step)
            for step in program.steps
            if id(step) in self._found.nested
        }
        outputs = program.evaluate(arguments, instead, changed)
        return outputs, shares

    def _checkpoint(self, step: Step, body: LossProgram, given, iteration):
        params = step.eqn.params
        run = lambda iteration, *given: self(body, given, iteration)
        run = jax.checkpoint(
            run, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
        return run(iteration, *given)

    def _scan(self, step: Step, body: LossProgram, given, iteration):
        scan = step.scan
        constants = given[: scan.constants]
        carry = given[scan.constants : scan.constants + scan.carry]
        xs = given[scan.constants + scan.carry :]
        first = iteration * jnp.uint32(scan.length)

        def turn(carry, x):
            i, x = x
            outputs, shares = self(body, [*constants, *carry, *x], first + i)
            return outputs[: scan.carry], (outputs[scan.carry :], shares)

        turns = jnp.arange(scan.length, dtype=jnp.uint32)
        carry, (ys, shares) = lax.scan(
            turn,
            carry,
            (turns, xs),
            length=scan.length,
            reverse=scan.reverse,
            unroll=scan.unroll,
        )
        return [*carry, *ys], jax.tree.map(_mean, shares)

    def _round(self, number: int, x: jax.Array, iteration: jax.Array):
        assignment, formats = self._assignment, self._assignment.formats
        bits = None
        if self._seed is not None:
            name = leaf_number(assignment.plan.tensors[number].name)
            (bits,) = random_bits(self._seed, iteration, [name])
        words = None if bits is None else bits.words(x.shape)
        low, low_backward = assignment.low[number], assignment.low_backward[number]
        grid = _choose(low, formats.low, formats.high)
        backward = _choose(low_backward, formats.low_backward, formats.high_backward)
        wide = lax.stop_gradient(x).astype(jnp.float32)
        y, overflows = round_to_grid(wide, grid, words)
        if self._stored:
            fmt = formats.low if low else formats.high
            kept = fmt.decode(checkpoint_name(fmt.encode(y), _STORED))
            if fmt.specials != "ieee":
                finite = checkpoint_name(jnp.all(jnp.isfinite(y)), _STORED)
                kept = jnp.where(finite, kept, jnp.float32(jnp.nan))
            y = kept
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
        bits = RandomBits(*backward.keys, stream=_BACKWARD_STREAM)
        words = bits.words(cotangent.shape)
    rounded, _ = round_to_grid(cotangent.astype(jnp.float32), backward.grid, words)
    return rounded.astype(cotangent.dtype), None, None


_with_rounded_cotangent.defvjp(_forward, _backward)


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
