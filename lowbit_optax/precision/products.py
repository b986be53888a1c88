"""``products``: in which dtypes the matrix products of a training step multiply."""

import dataclasses
import math
import typing
from collections.abc import Callable, Collection

import jax.numpy as jnp
import numpy as np

from lowbit_optax._jaxprs.graph import Call
from lowbit_optax.precision.assignment import Assignment
from lowbit_optax.precision.float_format import FloatFormat
from lowbit_optax.precision.native_products import ProductFormats, product_dtypes
from lowbit_optax.precision.tensors import TracedTensors, find_tensors

Gives = typing.Literal["result", "lhs", "rhs"]


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product of a loss or of its backward pass.

    Args:
      name: of its result; of a backward product, of the forward one.
      gives: ``"result"``, or the cotangent that it gives: ``"lhs"`` or ``"rhs"``.
      dtypes: of its operands, by name. Of a backward product the result's cotangent is
        the first.
      is_native: whether these are the dtypes of the operands' formats, as
        ``apply(..., products="native")`` makes them.
      flop: multiplications and additions, of all its runs in scans.
      sizes: elements of the operands, likewise.
    """

    name: str
    gives: Gives
    dtypes: tuple[str, str]
    is_native: bool
    flop: int
    sizes: tuple[int, int]

    @property
    def operand_bytes(self) -> int:
        """Of both operands in their dtypes."""
        sizes = zip(self.dtypes, self.sizes, strict=True)
        return sum(jnp.dtype(dtype).itemsize * size for dtype, size in sizes)


def products(
    loss_fn: Callable,
    assignment: Assignment,
    params,
    *batch,
    has_aux: bool = False,
) -> list[Product]:
    """The products of a loss and its gradient, with native products where possible.

    Nothing is computed.

    Args:
      loss_fn, params, *batch, has_aux: as given to :func:`trace`.
      assignment: of this loss, with known levels.

    Returns:
      A :class:`Product` for each ``dot_general`` outside of while loops and of what has
      its own derivative rule, and for the backward products of those of its operands
      that have cotangents. Convolutions are not among them; they are never native.

    >>> import jax.numpy as jnp
    >>> from lowbit_optax import precision
    >>> loss_fn = lambda w, x: jnp.sum(jnp.square(x @ w))
    >>> w, x = jnp.ones((32, 8)), jnp.ones((16, 32))
    >>> plan = precision.trace(loss_fn, w, x)
    >>> assignment = precision.uniform(plan, formats=precision.FLOAT8)
    >>> for p in products(loss_fn, assignment, w, x):
    ...     print(p.name, p.gives, *p.dtypes, p.flop, p.operand_bytes)
    dot_general.0 result float8_e4m3fn float8_e4m3fn 8192 768
    dot_general.0 rhs float8_e5m2 float8_e4m3fn 8192 640
    """
    found, _ = find_tensors(loss_fn, has_aux, params, batch)
    listed = []
    for call, formats in product_formats(found, assignment).items():
        computed = True, *(_has_cotangent(found, of) for of in found.operands[call])
        for gives, is_computed in zip(typing.get_args(Gives), computed, strict=True):
            if is_computed:
                listed.append(_product(found, call, formats, gives))
    return listed


def product_formats(
    found: TracedTensors, assignment: Assignment
) -> dict[Call, ProductFormats]:
    """The formats of what each ``dot_general`` reads, by the tensors that it may be.

    Args:
      found: the loss's tensors.
      assignment: of them, with known levels.
    """
    formats = assignment.formats
    low, low_backward = np.asarray(assignment.low), np.asarray(assignment.low_backward)

    def of_operand(numbers: Collection[int]) -> FloatFormat | None:
        chosen = {formats.low if low[n] else formats.high for n in numbers}
        return chosen.pop() if len(chosen) == 1 else None

    def of_cotangent(call: Call) -> FloatFormat | None:
        number = found.numbers.get(call.outputs[0])
        if number is None:
            return None
        is_low = low_backward[number]
        return formats.low_backward if is_low else formats.high_backward

    return {
        call: ProductFormats(of_operand(lhs), of_operand(rhs), of_cotangent(call))
        for call, (lhs, rhs) in found.operands.items()
    }


def _product(
    found: TracedTensors, call: Call, formats: ProductFormats, gives: Gives
) -> Product:
    position = typing.get_args(Gives).index(gives)
    (lhs, rhs), (result,) = call.inputs, call.outputs
    read = [(lhs, rhs), (result, rhs), (result, lhs)][position]
    native = product_dtypes(*formats.pairs[position])
    dtypes = native or tuple(np.dtype(node.aval.dtype) for node in read)
    number = found.numbers.get(result)
    tensor = None if number is None else found.tensors[number]
    repeats = 1 if tensor is None else tensor.repeats
    return Product(
        "" if tensor is None else tensor.name,
        gives,
        (dtypes[0].name, dtypes[1].name),
        native is not None,
        _flop(call) * repeats,
        (
            math.prod(read[0].aval.shape) * repeats,
            math.prod(read[1].aval.shape) * repeats,
        ),
    )


def _has_cotangent(found: TracedTensors, numbers: Collection[int]) -> bool:
    return any(found.tensors[n].backward_size for n in numbers)


def _flop(call: Call) -> int:
    """2 for each element of the result and each position that is summed over."""
    (contracted, _), _ = call.params["dimension_numbers"]
    shape = call.inputs[0].aval.shape
    terms = math.prod(shape[axis] for axis in contracted)
    return 2 * math.prod(call.outputs[0].aval.shape) * terms
