"""The arrangement of lanes in arrays for Mosaic GPU, with loads and stores."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp

from pallas_kernels.fused_update.gpu.arrangements import Arrangement
from pallas_kernels.fused_update.gpu.tiling import FlatTiling, Tiling
from pallas_kernels.gpu import mosaic_access
from pallas_kernels.gpu import mosaic_registers as registers
from pallas_kernels.gpu.mosaic import INSTRUCTIONS
from pallas_kernels.layout import TILE_COLUMNS


@dataclasses.dataclass(frozen=True)
class Threads(Arrangement):
    """The arrangement of a program's lanes: each thread has four neighboring lanes.

    All arrays are arrays of lanes. If an array contains one value per block, all lanes
    of the block have this value. See :class:`.arrangements.Arrangement`.

    Args:
      shape: ``[lanes]`` in a flat tiling, and ``[threads, 4]`` otherwise.
      tiling: the tiling of the leaf or shard.
      exchange: reference to shared memory with an int32 per warp, for blocks with more
        tiles than a warp has threads.
    """

    shape: tuple[int, ...]
    tiling: Tiling
    exchange: typing.Any
    instructions = INSTRUCTIONS

    @classmethod
    def of(cls, tiling: Tiling, exchange) -> "Threads":
        """Return the arrangement for a tiling."""
        if isinstance(tiling, FlatTiling):
            return cls((tiling.row_stride,), tiling, exchange)
        return cls((tiling.program.lanes, TILE_COLUMNS), tiling, exchange)

    def flat(self) -> jax.Array:
        return self._threads() * jnp.int32(TILE_COLUMNS) + self.columns()

    def blocks(self) -> jax.Array:
        return self._threads() >> jnp.int32(_bits(self.tiling.tiles))

    def parts(self, count: int) -> jax.Array:
        tile = self._threads() & jnp.int32(self.tiling.tiles - 1)
        return tile >> jnp.int32(_bits(self.tiling.tiles // count))

    def columns(self) -> jax.Array:
        return registers.per_thread(_columns, [], self.shape, jnp.int32)

    def carried(self, x: jax.Array) -> jax.Array:
        # The result of a loop must have the type of its input, but Pallas treats the
        # result of a select as unsigned.
        return registers.per_thread(lambda register: register, [x], self.shape, x.dtype)

    def expand(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, self.shape)

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        threads = self.tiling.tiles // parts
        if threads <= registers.WARP:
            make = functools.partial(_maximum, threads)
            return registers.per_thread(make, [x], self.shape, jnp.int32)
        make, refs = _maximum_of_two_warps, [self.exchange]
        return registers.per_thread(make, [x], self.shape, jnp.int32, refs)

    def load(self, ref, access, leaf: int) -> jax.Array:
        make = functools.partial(mosaic_access.load, _form(ref, access, leaf))
        place = access.offset, access.mask, access.layer
        return registers.per_thread(make, place, self.shape, ref.dtype, [ref])

    def store(self, ref, access, value, leaf: int) -> None:
        make = functools.partial(mosaic_access.store, _form(ref, access, leaf))
        arrays = value, access.offset, access.mask, access.layer
        registers.per_thread(make, arrays, self.shape, None, [ref])

    def _threads(self) -> jax.Array:
        """Return the index of each lane's thread."""
        return registers.per_thread(_thread, [], self.shape, jnp.int32)


def _thread():
    return registers.register([registers.thread_number()] * registers.COLUMNS)


def _columns():
    return registers.register(list(map(registers.constant, range(registers.COLUMNS))))


def _bits(count: int) -> int:
    """Return the base-2 logarithm of a power of two."""
    return count.bit_length() - 1


def _maximum(threads: int, register):
    """Return the maximum over the elements of ``threads`` neighboring threads."""
    value = functools.reduce(registers.largest, registers.elements(register))
    distance = 1
    while distance < threads:
        value = registers.largest(value, registers.other_thread(value, distance))
        distance *= 2
    return registers.register([value] * registers.COLUMNS)


def _maximum_of_two_warps(pointer, register):
    """Return the maximum over the threads of two neighboring warps."""
    (value, *_) = registers.elements(_maximum(registers.WARP, register))
    other = registers.other_warp(pointer, value)
    return registers.register([registers.largest(value, other)] * registers.COLUMNS)


def _form(ref, access, leaf: int) -> mosaic_access.Form:
    # The leaf's index makes the instructions of each leaf unique. Otherwise, LLVM would
    # merge the loads of different leaves into one load with a selected address.
    return mosaic_access.Form(
        ref.dtype, access.width, access.tiles, ref.shape[-1], f"// leaf {leaf}"
    )
