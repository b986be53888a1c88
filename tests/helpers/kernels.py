"""A numpy model of fused updates in unbounded integers, and cases to compare."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    Leaf,
    Operand,
    Result,
    Scalars,
    fused_update,
    fused_update_many,
    layout_of,
)
from tests.helpers.packing import reference_pack

EACH = pytest.mark.parametrize("implementation", ["xla", "pallas"])

# Quick compilation is more important than fast programs.
QUICK = {"xla_backend_optimization_level": "0"}

SHAPES = [
    (64, 512),
    (70, 33),
    (3, 3, 3, 64),
    (1000,),
    (5, 40, 24),
    (1, 1),
    (33,),
    (24, 3, 8),
    (9, 3, 5),
]


def fields_of(shape, bits, seed=0):
    random = np.random.default_rng(seed + bits)
    return random.integers(0, 2**bits, shape, np.uint64).astype(np.uint32)


def words_of(fields, bits):
    """Fields packed into words with Python's integers; fields of the padding are 0."""
    return reference_pack(fields, bits, layout_of(fields.shape).axis)


def index_of(shape, start=0):
    count = math.prod(shape)
    return np.arange(start, start + count).astype(np.uint32).reshape(shape)


def row_major(index, like):
    """The row-major index in a body, even if the implementation does not pass it."""
    if index is not None:
        return index
    return jnp.arange(like.size, dtype=jnp.uint32).reshape(like.shape)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A body of integers: every result depends on fields, plain values and scalars.

    The results are a new version of every operand, the index, and fields of the index.
    """

    widths: tuple[int, ...]

    def __call__(self, values, scalars, index):
        *fields, plain = values
        index = row_major(index, plain)
        new = [
            (field * jnp.uint32(3) + plain + scalars[0]) & jnp.uint32(2**bits - 1)
            for field, bits in zip(fields, self.widths, strict=True)
        ]
        mixed = plain ^ sum(fields, scalars[1])
        marks = [~index & jnp.uint32(2**bits - 1) for bits in self.widths[:1]]
        return [*new, mixed, index, *marks]

    def operands(self, arrays):
        return [
            Operand(x, b) for x, b in zip(arrays, (*self.widths, None), strict=True)
        ]

    @property
    def results(self):
        return [
            *(Result(jnp.uint32, bits, i) for i, bits in enumerate(self.widths)),
            Result(jnp.uint32, None, len(self.widths)),
            Result(jnp.uint32),
            *(Result(jnp.uint32, bits) for bits in self.widths[:1]),
        ]

    def arrays(self, shape, seed=0):
        """The operands, and the numbers that they contain."""
        numbers = [fields_of(shape, bits, seed) for bits in (*self.widths, 32)]
        words = [
            words_of(x, bits) for x, bits in zip(numbers, self.widths, strict=False)
        ]
        return [jnp.asarray(x) for x in (*words, numbers[-1])], numbers

    def model(self, numbers, scalars, index):
        """The numbers that the results must contain, computed with Python integers."""
        *fields, plain = (np.asarray(x, object) for x in numbers)
        new = [
            (field * 3 + plain + scalars[0]) % 2**bits
            for field, bits in zip(fields, self.widths, strict=True)
        ]
        mixed = plain ^ (sum(fields, scalars[1]) % 2**32)
        index = index.astype(object)
        marks = [(2**32 - 1 - index) % 2**bits for bits in self.widths[:1]]
        # For rank 0, numpy returns numbers instead of arrays.
        return [np.asarray(x, np.uint32) for x in (*new, mixed, index, *marks)]

    def want(self, numbers, scalars, index):
        """The stored results."""
        stored = [*self.widths, None, None, *self.widths[:1]]
        values = self.model(numbers, scalars, index)
        return [
            x if bits is None else words_of(x, bits)
            for x, bits in zip(values, stored, strict=True)
        ]

    def update(self, arrays, shape, implementation, **options):
        return fused_update(
            self,
            self.operands(arrays),
            self.results,
            shape=shape,
            implementation=implementation,
            **options,
        )

    def jitted(self, shape, implementation, **jit_options):
        """The update as a jitted function of arrays and scalars."""

        def run(arrays, options):
            return self.update(arrays, shape, implementation, **options)

        return jax.jit(run, compiler_options=QUICK, **jit_options)

    def leaves(self, arrays, shapes):
        """A leaf of each shape."""
        return [
            Leaf(tuple(self.operands(each)), tuple(self.results), shape)
            for each, shape in zip(arrays, shapes, strict=True)
        ]

    def jitted_many(self, shapes, implementation):
        """The update of several leaves as a jitted function of arrays and scalars."""

        def run(arrays, table, rows):
            options = dict(scalars=Scalars(table, rows), implementation=implementation)
            return fused_update_many(self, self.leaves(arrays, shapes), **options)

        return jax.jit(run, compiler_options=QUICK)


def stacks_of(body, shape, layers=3):
    """The operands of a body as stacks of layers, and the numbers of each layer."""
    arrays, held = zip(
        *(body.arrays(shape, seed) for seed in range(layers)), strict=True
    )
    return [jnp.stack(x) for x in zip(*arrays, strict=True)], held


def assert_layer_written(got, stacks, layer, want):
    """Assert that the results are stacks with one new layer, and then new arrays."""
    count = sum(a.shape == b.shape for a, b in zip(got, stacks, strict=False))
    new = [x.at[layer].set(y) for x, y in zip(stacks, want, strict=False)]
    assert_equal(got, [*new[:count], *want[count:]])


TABLE = np.array([[1, 2], [3, 4], [0xFFFFFFFF, 0x80000001]], np.uint32)


def assert_equal(got, want):
    assert [x.shape for x in got] == [x.shape for x in want]
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=f"result {number}")
