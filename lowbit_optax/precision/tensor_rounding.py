"""Rounding one tensor, and later its cotangent, to the formats of an assignment."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from lowbit_optax._numerics.float_format import FP32, FloatFormat, grid_of
from lowbit_optax._numerics.grid import Grid, round_to_grid
from lowbit_optax._numerics.random_bits import (
    BACKWARD_STREAM,
    FORWARD_STREAM,
    RandomBits,
    leaf_number,
    random_bits,
)
from lowbit_optax.precision.assignment import Assignment

_STORED = "lowbit_optax.precision"


class TensorRounding:
    """Rounds the tensors of an assignment.

    Args:
      assignment: which format each tensor is in.
      seed: None rounds to nearest, else see ``apply``.
      is_stored: whether the backward pass keeps tensors as patterns of their formats.
      has_cotangents: whether tensors have cotangents, which are then rounded too.
    """

    def __init__(
        self,
        assignment: Assignment,
        seed: jax.Array | int | None,
        is_stored: bool,
        has_cotangents: bool = True,
    ):
        # Known levels as numpy: indexed under jit, a jax.Array would become a tracer.
        known = lambda x: x if isinstance(x, Tracer) else np.asarray(x)
        self._assignment = jax.tree.map(known, assignment)
        self.is_stored = is_stored
        self._has_cotangents = has_cotangents
        if isinstance(seed, int):
            seed %= 2**32
        self._seed = None if seed is None else jnp.asarray(seed, jnp.uint32)

    def forward_only(self) -> "TensorRounding":
        """The same for tensors without cotangents, as in a while loop."""
        return TensorRounding(self._assignment, self._seed, False, False)

    def format(self, number: int) -> FloatFormat:
        """The format of a forward tensor, where it is known when compiling."""
        formats = self._assignment.formats
        return formats.low if self._assignment.low[number] else formats.high

    def round(
        self, number: int, x: jax.Array, iteration: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A tensor rounded, and the share of its elements that overflowed.

        Args:
          number: of the tensor.
          x: its value.
          iteration: uint32 scalar, counts a scan's iterations, for random bits.
        """
        assignment, formats = self._assignment, self._assignment.formats
        low, low_backward = assignment.low[number], assignment.low_backward[number]
        forward = low, formats.low, formats.high
        backward = low_backward, formats.low_backward, formats.high_backward
        # Where both are known to have all numbers of the dtype, x is not touched, so
        # that the compiler treats the loss as it would without rounding: between two
        # operations in bfloat16 it may keep float32.
        chosen = _known(*forward), _known(*backward)
        has_all = all(fmt is not None and fmt.has_all_of(x.dtype) for fmt in chosen)
        if has_all and not self.is_stored:
            is_past = jnp.isinf(lax.stop_gradient(x))
            return x, mean(is_past.astype(jnp.float32))
        bits = None
        if self._seed is not None:
            name = leaf_number(assignment.plan.tensors[number].name)
            (bits,) = random_bits(self._seed, iteration, [name])
        words = None if bits is None else bits.words(x.shape, FORWARD_STREAM)
        wide = lax.stop_gradient(x).astype(jnp.float32)
        y, overflows = round_to_grid(wide, _grid(*forward), words)
        if self.is_stored:
            fmt = self.format(number)
            y = unpack(fmt, checkpoint_name(pack(fmt, y), _STORED))
        share = mean(overflows.astype(jnp.float32))
        if not self._has_cotangents:
            return _with_its_tangent(x, y.astype(x.dtype)), share
        cotangent = _CotangentRounding(_grid(*backward), bits)
        return _with_rounded_cotangent(x, y.astype(x.dtype), cotangent), share


def replaced(x: jax.Array, y: jax.Array) -> jax.Array:
    """y, whose cotangent becomes that of x as it is."""
    return _with_rounded_cotangent(x, y, _UNROUNDED)


def pack(fmt: FloatFormat, y: jax.Array) -> tuple[jax.Array, ...]:
    """A rounded tensor's patterns; whether it is finite, if they cannot tell."""
    if fmt.specials == "ieee":
        return (fmt.encode(y),)
    return fmt.encode(y), jnp.all(jnp.isfinite(y))


def unpack(fmt: FloatFormat, packed: tuple[jax.Array, ...]) -> jax.Array:
    """The tensor; NaN everywhere if it was not finite and the format has no NaN."""
    y = fmt.decode(packed[0])
    if len(packed) == 1:
        return y
    return jnp.where(packed[1], y, jnp.float32(jnp.nan))


def keeping_patterns(function: Callable, **options) -> Callable:
    """The function, whose backward pass keeps patterns and computes the rest again."""
    policy = jax.checkpoint_policies.save_only_these_names(_STORED)
    return jax.checkpoint(function, policy=policy, **options)


def mean(x: jax.Array) -> jax.Array:
    """The mean of float32 elements; 0 if there are none."""
    return jnp.sum(x) / jnp.float32(max(x.size, 1))


class _CotangentRounding(typing.NamedTuple):
    """How a cotangent is rounded.

    Args:
      grid: to which format.
      random: None rounds to nearest.
    """

    grid: Grid
    random: RandomBits | None


def _second(x, y, rounding):
    """y; its cotangent is rounded and becomes that of x."""
    del x, rounding
    return y


def _forward(x, y, rounding):
    del x
    return y, rounding


def _backward(rounding: _CotangentRounding, cotangent: jax.Array):
    words = None
    if rounding.random is not None:
        words = rounding.random.words(cotangent.shape, BACKWARD_STREAM)
    rounded, _ = round_to_grid(cotangent.astype(jnp.float32), rounding.grid, words)
    return rounded.astype(cotangent.dtype), None, None


_with_rounded_cotangent = jax.custom_vjp(_second)
_with_rounded_cotangent.defvjp(_forward, _backward)


@jax.custom_jvp
def _with_its_tangent(x, y):
    """y, with the tangent of x; a while loop has no rule for the backward pass."""
    del x
    return y


@_with_its_tangent.defjvp
def _tangent(primals, tangents):
    return primals[1], tangents[0]


_UNROUNDED = _CotangentRounding(grid_of(FP32), None)


def _known(is_low, low: FloatFormat, high: FloatFormat) -> FloatFormat | None:
    """The format, where it is known when compiling."""
    if isinstance(is_low, Tracer):
        return None
    return low if is_low else high


def _grid(is_low, low: FloatFormat, high: FloatFormat) -> Grid:
    known = _known(is_low, low, high)
    if known is not None:
        return grid_of(known)
    pick = lambda a, b: jnp.where(is_low, a, b)
    return jax.tree.map(pick, grid_of(low), grid_of(high))
