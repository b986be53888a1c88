"""Round tensors and their cotangents to the formats of an assignment."""

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
      assignment: the format of each tensor, in numpy arrays unless they are traced.
      seed: seed for stochastic rounding, a uint32 scalar; None rounds to nearest.
      is_stored: whether the backward pass keeps tensors as bit patterns.
      has_cotangents: whether to round cotangents too. Tensors in a while loop have no
        cotangents.
    """

    assignment: Assignment
    seed: jax.Array | None
    is_stored: bool
    has_cotangents: bool = True

    def format(self, number: int) -> FloatFormat:
        """Return the format of a forward tensor. The assignment must not be traced."""
        return self.assignment.formats.forward(self.assignment.low[number])

    def round(
        self, number: int, x: jax.Array, iteration: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Round a tensor, and return the share of its elements that overflow.

        Args:
          number: the index of the tensor.
          x: the value of the tensor.
          iteration: the index of the scan's iteration, a uint32 scalar.
        """
        assignment, formats = self.assignment, self.assignment.formats
        forward = assignment.low[number], formats.forward
        backward = assignment.low_backward[number], formats.backward
        # If both formats represent all numbers of the dtype, return x itself. The
        # compiler can then optimize as it would without rounding, for example keep
        # float32 between two bfloat16 operations.
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
    """Return a tensor's bit patterns, and whether it is finite if they lack NaN."""
    if fmt.specials == "ieee":
        return (fmt.encode(y),)
    return fmt.encode(y), jnp.all(jnp.isfinite(y))


def from_patterns(fmt: FloatFormat, stored: tuple[jax.Array, ...]) -> jax.Array:
    """Return the tensor. It is all NaN if it was not finite and patterns lack NaN."""
    y = fmt.decode(stored[0])
    return y if len(stored) == 1 else jnp.where(stored[1], y, jnp.float32(jnp.nan))


def keeping_patterns(function: Callable, **options) -> Callable:
    """Return a function whose backward pass keeps patterns and recomputes the rest."""
    policy = jax.checkpoint_policies.save_only_these_names(_STORED)
    return jax.checkpoint(function, policy=policy, **options)


@jax.custom_vjp
def _with_rounded_cotangent(x, y, grid, bits):
    """Return ``y``, and use its rounded cotangent as the cotangent of ``x``.

    Do not call it in while loops, in which JAX does not support custom gradients.
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
    """Return the share of elements that are True; 0 for an empty array."""
    return jnp.sum(overflows.astype(jnp.float32)) / jnp.float32(max(overflows.size, 1))


def _known(is_low, of_level: Callable[..., FloatFormat]) -> FloatFormat | None:
    """Return the format, or None if the assignment is traced."""
    return None if isinstance(is_low, Tracer) else of_level(is_low)


def _grid(is_low, of_level: Callable[..., FloatFormat]) -> Grid:
    known = _known(is_low, of_level)
    if known is not None:
        return grid_of(known)
    pick = lambda a, b: jnp.where(is_low, a, b)
    return jax.tree.map(pick, grid_of(of_level(True)), grid_of(of_level(False)))
