"""A body's functions, traced for the registers of a TPU."""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.spec import BlockBody, Body, Operand
from pallas_kernels.fused_update.tpu.rules import Function
from pallas_kernels.fused_update.tpu.tiling import LANES, SUBLANES

REGISTER = (SUBLANES, LANES)
"""The shape of a vector register of 32-bit values."""


@dataclasses.dataclass(frozen=True)
class Functions:
    """A body's functions, traced for registers.

    Args:
      run: the body itself.
      before: of a :class:`.BlockBody`; None of a body without.
      rounds: of each round of maxima, ``statistics`` and ``after``.
    """

    run: Function
    before: Function | None = None
    rounds: tuple[tuple[Function, Function], ...] = ()

    @property
    def are_supported(self) -> bool:
        """Whether TPU kernels have all their operations."""
        parts = (self.run, self.before, *(x for pair in self.rounds for x in pair))
        return all(x is None or x.is_supported for x in parts)


def traced(
    body: Body | BlockBody,
    operands: Sequence[Operand],
    sizes: Sequence[int],
    count: int,
) -> Functions:
    """A body's functions.

    Args:
      body: see :data:`pallas_kernels.fused_update.Body`.
      operands: of the leaf, whose arrays have dtypes.
      sizes: of the blocks that operands have.
      count: how many scalars the body gets.
    """

    def register(dtype=jnp.uint32):
        return jax.ShapeDtypeStruct(REGISTER, dtype)

    scalars = [jax.ShapeDtypeStruct((), jnp.uint32)] * count
    arguments = (
        [
            register(jnp.uint32 if o.bits is not None else o.array.dtype)
            for o in operands
            if o.block_size is None
        ],
        scalars,
        register(),
    )
    if not sizes:
        simple = typing.cast(Body, body)
        return Functions(
            Function(lambda v, s, i: simple(v, s, i, xla.multiply_add), *arguments)
        )
    body = typing.cast(BlockBody, body)
    of_blocks = [register(o.array.dtype) for o in operands if o.block_size is not None]
    before = Function(body.before, of_blocks)
    rounds, maxima, after = [], [], ()
    for number, of_round in enumerate(body.rounds):
        statistics = Function(
            lambda v, s, i, b, a, number=number: body.statistics(
                number, v, s, i, xla.multiply_add, b, a
            ),
            *arguments,
            before.shapes,
            after,
        )
        maxima = maxima + [register(jnp.int32) for _ in of_round]
        rounds.append((statistics, Function(body.after, maxima, of_blocks, scalars)))
        after = rounds[-1][1].shapes[1]
    return Functions(
        Function(
            lambda v, s, i, b, a: body(v, s, i, xla.multiply_add, b, a),
            *arguments,
            before.shapes,
            after,
        ),
        before,
        tuple(rounds),
    )
