"""Static, hashable programs of elementwise operations on the rows of a leaf.

:mod:`lowbit_optax._jaxprs.elementwise` makes them, and kernels run them.
"""

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._jaxprs.graph import varying_alike
from pallas_kernels.operations import multiply_add


@dataclasses.dataclass(frozen=True)
class Ref:
    """Reference to a value of a program: a row, a scalar of the table, or a constant.

    Args:
      kind: ``"row"``, ``"scalar"`` or ``"constant"``.
      number: index of the row or scalar.
      dtype: dtype of the scalar or constant.
      value: bytes of the constant.
    """

    kind: typing.Literal["row", "scalar", "constant"]
    number: int = 0
    dtype: np.dtype | None = None
    value: bytes = b""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One elementwise operation, whose result is a row.

    ``primitive`` may be :func:`pallas_kernels.operations.multiply_add`.
    """

    primitive: typing.Any
    params: tuple[tuple[str, typing.Any], ...]
    inputs: tuple[Ref, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that updates a leaf. Each operation appends one row.

    Args:
      inputs: number of input rows.
      operations: the operations, in order.
      outputs: references to the results.
    """

    inputs: int
    operations: tuple[Operation, ...]
    outputs: tuple[Ref, ...]

    def run(
        self, rows: Sequence[jax.Array], scalars: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Return the outputs for input rows, which all have the same shape.

        ``scalars`` is the table of scalars, as :func:`encode_scalars` or
        :func:`plain_scalars` returns it.
        """
        rows = list(rows)
        shape = rows[0].shape

        def value(ref: Ref) -> jax.Array:
            if ref.kind == "row":
                return rows[ref.number]
            if ref.kind == "constant":
                return jnp.full(shape, np.frombuffer(ref.value, ref.dtype)[0])
            scalar = decode_scalar(scalars[ref.number], np.dtype(ref.dtype))
            return jnp.broadcast_to(scalar, shape)

        for operation in self.operations:
            inputs = varying_alike([value(ref) for ref in operation.inputs])
            if operation.primitive is multiply_add:
                rows.append(multiply_add(*inputs))
            else:
                params = dict(operation.params)
                rows.append(operation.primitive.bind(*inputs, **params))
        return [value(ref) for ref in self.outputs]

    def only(self, numbers: Iterable[int]) -> "Program":
        """Return the program that computes only the outputs with the given indices."""
        outputs = tuple(self.outputs[i] for i in numbers)
        return dataclasses.replace(self, outputs=outputs).without_dead_operations()

    @property
    def scalars(self) -> list[Ref]:
        """The scalars that the program reads from the table."""
        refs = [*(ref for x in self.operations for ref in x.inputs), *self.outputs]
        return list(dict.fromkeys(ref for ref in refs if ref.kind == "scalar"))

    def reading(self, instead: Mapping[Ref, Ref]) -> "Program":
        """Return the program with each reference replaced as in ``instead``."""

        def renamed(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
            return tuple(instead.get(ref, ref) for ref in refs)

        operations = tuple(
            dataclasses.replace(x, inputs=renamed(x.inputs)) for x in self.operations
        )
        return Program(self.inputs, operations, renamed(self.outputs))

    def without_dead_operations(self) -> "Program":
        """Return the program with unused operations removed and rows renumbered."""
        rows = [Ref("row", self.inputs + i) for i in range(len(self.operations))]
        read = set(self.outputs)
        for row, operation in zip(rows[::-1], self.operations[::-1], strict=True):
            if row in read:
                read.update(operation.inputs)
        alive = [i for i, row in enumerate(rows) if row in read]
        operations = tuple(self.operations[i] for i in alive)
        program = dataclasses.replace(self, operations=operations)
        return program.reading({rows[i]: rows[n] for n, i in enumerate(alive)})


def encode_scalars(values: Sequence[jax.Array]) -> jax.Array:
    """Return scalars of up to 32 bits as one uint32 vector."""
    return jnp.stack([_to_word(jnp.asarray(x)) for x in values])


def plain_scalars(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Convert bools to words; other scalars are unchanged and stay differentiable."""
    return [_to_word(x) if x.dtype == bool else x for x in map(jnp.asarray, values)]


def decode_scalar(word: jax.Array, dtype: np.dtype) -> jax.Array:
    """Convert a word back to a scalar; inverts :func:`encode_scalars`.

    A scalar that already has the given dtype is returned unchanged.
    """
    if word.dtype == dtype:
        return word
    if dtype == jnp.bool_:
        return word != jnp.uint32(0)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(word.astype(unsigned), dtype)


def _to_word(x: jax.Array) -> jax.Array:
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
