"""How the lanes of a Mosaic GPU program lie in arrays, and are loaded and stored.

Each thread has a tile's four columns.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.fused_update.gpu.arrays import Access
from pallas_kernels.fused_update.gpu.tiling import Tiling
from pallas_kernels.gpu import mosaic_registers as registers
from pallas_kernels.gpu.mosaic_access import Form, load, store
from pallas_kernels.layout import TILE_COLUMNS


@dataclasses.dataclass(frozen=True)
class ByThreads:
    """The lanes of a program: each thread has a tile's four columns.

    All arrays are of lanes: values per block are the same in all threads of the block.
    See :class:`.arrays.Arrangement`.

    Args:
      tiling: what the lanes walk over.
      exchange: reference to shared memory of an int32 per warp, where blocks have more
        tiles than a warp has threads.
    """

    tiling: Tiling
    exchange: typing.Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        tiling = self.tiling
        if tiling.is_flat:
            return (tiling.flat_width,)
        return (tiling.lanes, TILE_COLUMNS)

    def flat(self) -> jax.Array:
        return self._threads() * jnp.int32(TILE_COLUMNS) + self.columns()

    def blocks(self) -> jax.Array:
        return self._threads() >> jnp.int32(self._bits(self.tiling.tiles))

    def parts(self, count: int) -> jax.Array:
        return self.tiles() >> jnp.int32(self._bits(self.tiling.tiles // count))

    def tiles(self) -> jax.Array:
        return self._threads() & jnp.int32(self.tiling.tiles - 1)

    def columns(self) -> jax.Array:
        return registers.per_thread(_columns, [], self.shape, jnp.int32)

    def zeros(self, dtype) -> jax.Array:
        return self.carried(jnp.zeros(self.shape, dtype))

    def carried(self, x: jax.Array) -> jax.Array:
        # Mosaic wants the same layout and sign of what comes in and goes out.
        return registers.per_thread(lambda register: register, [x], self.shape, x.dtype)

    def spread(self, x: jax.Array) -> jax.Array:
        return x

    def over_parts(self, x: jax.Array) -> jax.Array:
        return x

    def expand(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, self.shape)

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        threads = self.tiling.tiles // parts
        if threads <= registers.WARP:
            make = functools.partial(_maximum, threads)
            return registers.per_thread(make, [x], self.shape, jnp.int32)
        make, refs = _maximum_of_two_warps, [self.exchange]
        return registers.per_thread(make, [x], self.shape, jnp.int32, refs)

    def _threads(self) -> jax.Array:
        return registers.per_thread(_thread, [], self.shape, jnp.int32)

    @staticmethod
    def _bits(count: int) -> int:
        return count.bit_length() - 1


def _thread():
    return registers.register([registers.thread_number()] * registers.COLUMNS)


def _columns():
    kind = registers.bits_type(32)
    return registers.register(
        [registers.constant(i, kind) for i in range(registers.COLUMNS)]
    )


def _maximum(threads: int, held):
    """The maximum of the elements of so many threads that are neighbours."""
    value = functools.reduce(registers.largest, registers.elements(held))
    distance = 1
    while distance < threads:
        value = registers.largest(value, registers.other_thread(value, distance))
        distance *= 2
    return registers.register([value] * registers.COLUMNS)


def _maximum_of_two_warps(pointer, held):
    """The same of the threads of two warps that are neighbours."""
    (value, *_) = registers.elements(_maximum(registers.WARP, held))
    other = registers.other_warp(pointer, value)
    return registers.register([registers.largest(value, other)] * registers.COLUMNS)


@dataclasses.dataclass(frozen=True)
class OneLeaf:
    """The arrays of the only leaf.

    Args:
      shape: of arrays of lanes.
      operands, results: the kernel's references to its arrays, which are flat.
      number: of the leaf. LLVM would take loads of different leaves for one with
        another address; their instructions are different texts.
    """

    shape: tuple[int, ...]
    operands: Sequence
    results: Sequence
    number: int

    has_branches: typing.ClassVar[bool] = False

    def load(self, accesses: Sequence[Access]) -> list[jax.Array]:
        """See :class:`.arrays.Memory`."""
        return [self._load(access) for access in accesses]

    def store(self, new: Sequence[tuple[Access, jax.Array]]) -> None:
        """See :class:`.arrays.Memory`."""
        for access, value in new:
            ref = self.results[access.number]
            make = functools.partial(store, self._form(access, ref))
            arrays = [value, *_place(access)]
            registers.do_per_thread(make, arrays, self.shape, [ref])

    def _load(self, access: Access) -> jax.Array:
        ref = self.operands[access.number]
        make = functools.partial(load, self._form(access, ref))
        return registers.per_thread(make, _place(access), self.shape, ref.dtype, [ref])

    def _form(self, access: Access, ref) -> Form:
        layer_size = None if access.layer is None else ref.shape[-1]
        has_mask = access.mask is not None
        itself = access.width, access.tiles, has_mask
        return Form(ref.dtype, *itself, layer_size, f"// leaf {self.number}")


def _place(access: Access) -> list[jax.Array]:
    place = (access.offset, access.mask, access.layer)
    return [x for x in place if x is not None]
