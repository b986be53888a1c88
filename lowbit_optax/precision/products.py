"""Matrix products of rounded tensors, in the dtypes of their formats where possible.

A rounded tensor stores numbers of its format in the dtype of the loss, such as float32,
and the product of two such tensors is a float32 product. A *native* product casts the
operands to narrow dtypes that represent the same numbers. It runs on the units of a GPU
that multiply these dtypes, and keeps the narrow arrays for the backward pass.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._jaxprs.graph import Call, Node, bind
from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax._numerics import rounding
from lowbit_optax._numerics.float_format import FloatFormat
from lowbit_optax._types import Function, PyTree
from lowbit_optax.precision.assignment import Assignment
from lowbit_optax.precision.tensor_search import TensorSearch

_E4M3, _E5M2, _BFLOAT16 = map(jnp.dtype, ("float8_e4m3fn", "float8_e5m2", "bfloat16"))
_FLOAT8: dict[tuple, np.dtype] = {(4, 3, "nan"): _E4M3, (5, 2, "ieee"): _E5M2}
# With biases of up to 63, float8 numbers and scales of products fit in float32.
_MAX_BIAS = 63
Gives = typing.Literal["result", "lhs", "rhs"]


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product of a loss or of its backward pass.

    Args:
      name: the name of the forward product's result.
      gives: ``"result"`` for a forward product, ``"lhs"`` or ``"rhs"`` for a backward
        product that computes the cotangent of this operand.
      dtypes: the names of the operands' dtypes. In a backward product, the cotangent of
        the result comes first.
      is_native: whether these dtypes are the ones that ``apply`` uses with
        ``products="native"``.
      flop: the number of multiplications and additions, summed over all runs.
      sizes: the number of elements of each operand, summed over all runs.
    """

    name: str
    gives: Gives
    dtypes: tuple[str, str]
    is_native: bool
    flop: int
    sizes: tuple[int, int]

    @property
    def operand_bytes(self) -> int:
        """The number of bytes of both operands."""
        sizes = zip(self.dtypes, self.sizes, strict=True)
        return sum(jnp.dtype(dtype).itemsize * size for dtype, size in sizes)


def products(
    loss_fn: Function,
    assignment: Assignment,
    params: PyTree,
    *batch: PyTree,
    has_aux: bool = False,
) -> list[Product]:
    """List the matrix products of a loss and its gradient, without computing them.

    Args:
      loss_fn, params, *batch, has_aux: the arguments of :func:`trace`.
      assignment: an assignment for this loss, which must not be traced.

    Returns:
      A :class:`Product` for each forward ``dot_general``, and one for each of its
      operands that has a cotangent. The list does not contain convolutions, which are
      never native, or products in while loops or functions with a derivative rule.

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
    found = TensorSearch(loss_fn, has_aux, params, batch)
    listed = []
    for call, formats in _product_formats(found, assignment).items():
        nodes = _pairs(*call.inputs, *call.outputs)
        number = found.numbers.get(call.outputs[0])
        tensor = None if number is None else found.tensors[number]
        name, repeats = ("", 1) if tensor is None else (tensor.name, tensor.repeats)
        lhs, rhs = found.operands[call]
        for gives, pair in _pairs(*formats).items():
            sources = [found.tensors[n] for n in (lhs if gives == "lhs" else rhs)]
            if gives != "result" and not any(x.backward_size for x in sources):
                continue
            x, y = nodes[gives]
            native = product_dtypes(*pair)
            dtypes = native or (x.aval.dtype, y.aval.dtype)
            names = np.dtype(dtypes[0]).name, np.dtype(dtypes[1]).name
            sizes = x.aval.size * repeats, y.aval.size * repeats
            flop = _flop(call) * repeats
            listed.append(Product(name, gives, names, native is not None, flop, sizes))
    return listed


def _pairs(lhs, rhs, result) -> dict[Gives, tuple]:
    """Return the operands of a product and of its two backward products."""
    return {"result": (lhs, rhs), "lhs": (result, rhs), "rhs": (result, lhs)}


def _product_formats(
    found: TensorSearch, assignment: Assignment
) -> dict[Call, tuple[FloatFormat | None, ...]]:
    """Return the formats of each ``dot_general``'s operands and result cotangent.

    A format is None if the array is not rounded, or not always to the same format.
    """
    formats = assignment.formats
    low, low_backward = np.asarray(assignment.low), np.asarray(assignment.low_backward)

    def of_operand(numbers: Collection[int]) -> FloatFormat | None:
        chosen = {formats.forward(low[n]) for n in numbers}
        return chosen.pop() if len(chosen) == 1 else None

    def of_cotangent(result: Node) -> FloatFormat | None:
        number = found.numbers.get(result)
        return None if number is None else formats.backward(low_backward[number])

    return {
        call: (*map(of_operand, operands), of_cotangent(call.outputs[0]))
        for call, operands in found.operands.items()
    }


def product_dtypes(
    x: FloatFormat | None, y: FloatFormat | None
) -> tuple[np.dtype, np.dtype] | None:
    """Return the dtypes in which numbers of two formats are multiplied, or None.

    Args:
      x, y: the formats of the operands; None if an operand has no format.

    Returns:
      The dtypes of the operands, or None if bfloat16 does not represent all numbers of
      both formats. If each format has the layout of float8_e4m3fn or float8_e5m2 and a
      bias b from -63 to 63, the dtypes are these float8 dtypes, and operands are
      multiplied by 2^b. Otherwise, and for two float8_e5m2 operands, which GPUs cannot
      multiply, both dtypes are bfloat16.

    >>> from lowbit_optax.precision import HFP8
    >>> e4m3, e5m2 = map(FloatFormat.of, ("float8_e4m3fn", "float8_e5m2"))
    >>> [[str(dtype) for dtype in product_dtypes(e4m3, y)] for y in (e5m2, HFP8.low)]
    [['float8_e4m3fn', 'float8_e5m2'], ['bfloat16', 'bfloat16']]
    >>> print(product_dtypes(e4m3, HFP8.high))
    None
    """
    of_x, of_y = _narrow(x).dtype, _narrow(y).dtype
    if of_x is None or of_y is None:
        return None
    if _BFLOAT16 in (of_x, of_y) or of_x == of_y == _E5M2:
        return _BFLOAT16, _BFLOAT16
    return of_x, of_y


def native_products(
    found: TensorSearch, assignment: Assignment
) -> dict[Call, Callable[[Sequence], list]]:
    """Return a function for each ``dot_general`` with at least one native product."""
    return {
        call: _native_product(call, *formats)
        for call, formats in _product_formats(found, assignment).items()
        if any(product_dtypes(*pair) is not None for pair in _pairs(*formats).values())
    }


def _native_product(
    call: Call,
    lhs: FloatFormat | None,
    rhs: FloatFormat | None,
    cotangent: FloatFormat | None,
) -> Callable[[Sequence], list]:
    """Return a function that computes a ``dot_general`` and its cotangents natively.

    With operands x and y, which are scaled by 2^bx and 2^by and have the dtypes that
    :func:`product_dtypes` returns, the result is

        z = 2^-(bx + by) sum_k x_k y_k

    with sums and scale in float32. Each backward product uses its own formats. A
    product without native dtypes runs as it was traced. Infinities become NaN in
    float8_e4m3fn.
    """

    def forward(x, y):
        x, y = _Operand.of(x, lhs), _Operand.of(y, rhs)
        return _multiply(call, x, y), (x, y)

    def backward(operands, ct):
        (x, y), ct = operands, _Operand.of(ct, cotangent)
        return _transposed(call, 0, ct, y), _transposed(call, 1, ct, x)

    product = jax.custom_vjp(lambda x, y: forward(x, y)[0])
    product.defvjp(forward, backward)
    return lambda operands: [product(*operands)]


def _flop(call: Call) -> int:
    """Return the number of operations: two for each term of each sum."""
    (contracted, _), _ = call.params["dimension_numbers"]
    shape = call.inputs[0].aval.shape
    terms = math.prod(shape[axis] for axis in contracted)
    return 2 * call.outputs[0].aval.size * terms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Operand:
    """An operand of a product, in the narrow dtype of its format if there is one.

    Args:
      values: the numbers times a power of two; see :class:`_Narrow`.
      fmt: the format, or None if the operand was not rounded to a format.
      dtype: the dtype before narrowing.
    """

    values: jax.Array
    fmt: FloatFormat | None = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, x: jax.Array, fmt: FloatFormat | None) -> "_Operand":
        """Cast an array of the format's numbers to the narrow dtype."""
        narrow, values = _narrow(fmt), x
        if narrow.dtype is not None and (x.dtype != narrow.dtype or narrow.shift):
            wide = _shifted(rounding.to_float32(x), narrow.shift)
            values = rounding.round_nearest(wide, narrow.dtype)
        return cls(values, fmt, x.dtype)

    def widened(self) -> jax.Array:
        """Return the numbers in the original dtype."""
        narrow = _narrow(self.fmt)
        if narrow.dtype is None:
            return self.values
        wide = rounding.to_float32(self.values)
        return _shifted(wide, -narrow.shift).astype(self.dtype)


def _multiply(call: Call, x: _Operand, y: _Operand) -> jax.Array:
    """Run a ``dot_general`` with narrowed operands."""
    dtypes = product_dtypes(x.fmt, y.fmt)
    if dtypes is None:
        return bind(call, [x.widened(), y.widened()])[0]
    # At the default precision, XLA allows GPUs to add float8 products in fewer bits
    # than float32 has.
    params = call.params | {
        "precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST),
        "preferred_element_type": jnp.dtype("float32"),
    }
    total = lax.dot_general(
        x.values.astype(dtypes[0]), y.values.astype(dtypes[1]), **params
    )
    shift = _narrow(x.fmt).shift + _narrow(y.fmt).shift
    return _shifted(total, -shift).astype(call.outputs[0].aval.dtype)


def _transposed(
    call: Call, position: int, cotangent: _Operand, other: _Operand
) -> jax.Array:
    """Return the cotangent of the operand at ``position``."""
    node = call.inputs[position]

    def transpose(ct, other):
        def product(x):
            return bind(call, [x, other] if position == 0 else [other, x])[0]

        return jax.linear_transpose(product, node.aval)(ct)

    read = cotangent, other
    shapes = [jax.ShapeDtypeStruct(x.values.shape, x.dtype) for x in read]
    program = LossProgram(jax.make_jaxpr(transpose)(*shapes))
    (inner,) = (c for c in program.calls if c.primitive is call.primitive)
    of_input = dict(zip(program.inputs, read, strict=True))
    operands = [of_input[node] for node in inner.inputs]
    instead = {inner: lambda _: [_multiply(inner, *operands)]}
    return program.evaluate([x.values for x in read], instead)[0]


class _Narrow(typing.NamedTuple):
    """A narrow dtype that represents a format's numbers times 2^shift, or None."""

    dtype: np.dtype | None = None
    shift: int = 0


def _narrow(fmt: FloatFormat | None) -> _Narrow:
    """Return the narrowest dtype for a format, with the shift for a float8 bias."""
    if fmt is None:
        return _Narrow()
    dtype = _FLOAT8.get((fmt.exponent_bits, fmt.mantissa_bits, fmt.specials))
    if dtype is not None and abs(fmt.bias) <= _MAX_BIAS:
        return _Narrow(dtype, fmt.bias)
    is_within = FloatFormat.of(_BFLOAT16).contains(fmt)
    return _Narrow(_BFLOAT16) if is_within else _Narrow()


def _shifted(x: jax.Array, digits: int) -> jax.Array:
    """Return ``x`` times 2^digits in float32."""
    return x * np.ldexp(np.float32(1), digits) if digits else x
