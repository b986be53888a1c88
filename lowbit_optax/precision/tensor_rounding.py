"""Rounding one tensor, and later its cotangent, to the formats of an assignment."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from lowbit_optax._numerics.float_format import FloatFormat, grid_of
from lowbit_optax._numerics.grid import Grid, round_to_grid
from lowbit_optax._numerics.random_bits import (
    BACKWARD_STREAM,
    FORWARD_STREAM,
    leaf_number,
    random_bits,
)
from lowbit_optax._numerics.straight_through import with_tangent_of
from lowbit_optax.precision.assignment import Assignment

_STORED = "lowbit_optax.precision"


@dataclasses.dataclass(frozen=True)
class TensorRounding:
    """Rounds the tensors of an assignment.

    Args:
      assignment: which format each tensor is in; levels that are known are numpy's.
      seed: uint32 scalar; None rounds to nearest.
      is_stored: whether the backward pass keeps tensors as patterns of their formats.
      has_cotangents: whether tensors have cotangents, which are then rounded too; in a
        while loop they have none.
    """

    assignment: Assignment
    seed: jax.Array | None
    is_stored: bool
    has_cotangents: bool = True

    def format(self, number: int) -> FloatFormat:
        """The format of a forward tensor, where it is known when compiling."""
        return self.assignment.formats.forward(self.assignment.low[number])

    def round(
        self, number: int, x: jax.Array, iteration: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A tensor rounded, and the share of its elements that overflowed.

        Args:
          number: of the tensor.
          x: its value.
          iteration: uint32 scalar, counts a scan's iterations, for random bits.
        """
        assignment, formats = self.assignment, self.assignment.formats
        forward = assignment.low[number], formats.forward
        backward = assignment.low_backward[number], formats.backward
        # Where both are known to have all numbers of the dtype, x is not touched, so
        # that the compiler treats the loss as it would without rounding: between two
        # operations in bfloat16 it may keep float32.
        known = _known(*forward), _known(*backward)
        has_all = all(fmt is not None and fmt.has_all_of(x.dtype) for fmt in known)
        if has_all and not self.is_stored:
            return x, _share(jnp.isinf(lax.stop_gradient(x)))
        bits = words = None
        if self.seed is not None:
            name = leaf_number(assignment.plan.tensors[number].name)
            (bits,) = random_bits(self.seed, iteration, [name])
            words = bits.words(x.shape, FORWARD_STREAM)
        wide = lax.stop_gradient(x).astype(jnp.float32)
        y, overflows = round_to_grid(wide, _grid(*forward), words)
        if self.is_stored:
            fmt = self.format(number)
            y = from_patterns(fmt, checkpoint_name(to_patterns(fmt, y), _STORED))
        y, share = y.astype(x.dtype), _share(overflows)
        if not self.has_cotangents:
            return with_tangent_of(x, y), share
        return _with_rounded_cotangent(x, y, _grid(*backward), bits), share


def to_patterns(fmt: FloatFormat, y: jax.Array) -> tuple[jax.Array, ...]:
    """A rounded tensor's patterns; whether it is finite, if they cannot tell."""
    if fmt.specials == "ieee":
        return (fmt.encode(y),)
    return fmt.encode(y), jnp.all(jnp.isfinite(y))


def from_patterns(fmt: FloatFormat, stored: tuple[jax.Array, ...]) -> jax.Array:
    """The tensor; NaN everywhere if it was not finite and the format has no NaN."""
    y = fmt.decode(stored[0])
    return y if len(stored) == 1 else jnp.where(stored[1], y, jnp.float32(jnp.nan))


def keeping_patterns(function: Callable, **options) -> Callable:
    """The function, whose backward pass keeps patterns and computes the rest again."""
    policy = jax.checkpoint_policies.save_only_these_names(_STORED)
    return jax.checkpoint(function, policy=policy, **options)


@jax.custom_vjp
def _with_rounded_cotangent(x, y, grid, bits):
    """y, whose cotangent is rounded and becomes that of x.

    It cannot be used in a while loop, where custom gradients have no rule.
    """
    del x, grid, bits
    return y


def _forward(x, y, grid, bits):
    del x
    return y, (grid, bits)


def _backward(rounding, cotangent: jax.Array):
    grid, bits = rounding
    words = None if bits is None else bits.words(cotangent.shape, BACKWARD_STREAM)
    rounded, _ = round_to_grid(cotangent.astype(jnp.float32), grid, words)
    return rounded.astype(cotangent.dtype), None, None, None


_with_rounded_cotangent.defvjp(_forward, _backward)


def _share(overflows: jax.Array) -> jax.Array:
    """The share of elements that are true; 0 if there are none."""
    return jnp.sum(overflows.astype(jnp.float32)) / jnp.float32(max(overflows.size, 1))


def _known(is_low, of_level: Callable[..., FloatFormat]) -> FloatFormat | None:
    """The format, where it is known when compiling."""
    return None if isinstance(is_low, Tracer) else of_level(is_low)


def _grid(is_low, of_level: Callable[..., FloatFormat]) -> Grid:
    known = _known(is_low, of_level)
    if known is not None:
        return grid_of(known)
    pick = lambda a, b: jnp.where(is_low, a, b)
    return jax.tree.map(pick, grid_of(of_level(True)), grid_of(of_level(False)))
