"""Matrix products of rounded tensors, in the dtypes of their formats where possible.

A rounded tensor holds numbers of its format in the loss's own dtype, float32 say, and a
product of two of them is a float32 product. A native product turns the operands into
arrays of a narrow dtype that has the same numbers, so that it runs on the units of a
GPU that multiply these, and keeps narrow arrays for the backward pass.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._jaxprs.graph import Call, bind
from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax._numerics import rounding
from lowbit_optax._numerics.float_format import FloatFormat
from lowbit_optax.precision.assignment import Assignment
from lowbit_optax.precision.tensor_search import TensorSearch
from lowbit_optax.precision.tracing import find_tensors

_E4M3, _E5M2, _BFLOAT16 = map(jnp.dtype, ("float8_e4m3fn", "float8_e5m2", "bfloat16"))
# Times 2^63, no number of a float8 is past float32's range, nor is a product's scale.
_MAX_BIAS = 63
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
        has_cotangent = (
            any(found.tensors[n].backward_size for n in numbers)
            for numbers in found.operands[call]
        )
        computed = True, *has_cotangent
        for gives, is_computed in zip(typing.get_args(Gives), computed, strict=True):
            if is_computed:
                listed.append(_product(found, call, formats, gives))
    return listed


class ProductFormats(typing.NamedTuple):
    """The formats of what a product and its backward products read.

    Args:
      lhs, rhs: of its operands; None if they were not rounded to one.
      cotangent: of its result's cotangent, likewise.
    """

    lhs: FloatFormat | None
    rhs: FloatFormat | None
    cotangent: FloatFormat | None

    @property
    def pairs(self) -> list[tuple[FloatFormat | None, FloatFormat | None]]:
        """Of the product, and of those that give the cotangents of lhs and rhs."""
        lhs, rhs, cotangent = self
        return [(lhs, rhs), (cotangent, rhs), (cotangent, lhs)]


def product_formats(
    found: TensorSearch, assignment: Assignment
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


def product_dtypes(
    x: FloatFormat | None, y: FloatFormat | None
) -> tuple[np.dtype, np.dtype] | None:
    """The dtypes in which numbers of two formats are multiplied, or None.

    Args:
      x, y: the operands' formats; None for what has none.

    Returns:
      float8_e4m3fn and float8_e5m2 where both formats are these, with any bias b of
      magnitude up to 63: the operands are then 2^b times the numbers. Two float8_e5m2,
      for which GPUs have no product, and other formats whose numbers bfloat16 has are
      multiplied in bfloat16. None if it does not have them.

    >>> from lowbit_optax.precision import HFP8
    >>> e4m3, e5m2 = map(FloatFormat.of, ("float8_e4m3fn", "float8_e5m2"))
    >>> [[str(dtype) for dtype in product_dtypes(e4m3, y)] for y in (e5m2, HFP8.low)]
    [['float8_e4m3fn', 'float8_e5m2'], ['bfloat16', 'bfloat16']]
    >>> print(product_dtypes(e4m3, HFP8.high))
    None
    """
    narrow = _narrow(x), _narrow(y)
    if narrow[0] is None or narrow[1] is None:
        return None
    dtypes = narrow[0].dtype, narrow[1].dtype
    if _BFLOAT16 in dtypes or dtypes == (_E5M2, _E5M2):
        return _BFLOAT16, _BFLOAT16
    return dtypes


def has_native(formats: ProductFormats) -> bool:
    """Whether a product, or one of its backward products, is native."""
    return any(product_dtypes(*pair) is not None for pair in formats.pairs)


def native_product(call: Call, formats: ProductFormats) -> Callable[[Sequence], list]:
    """What computes a ``dot_general`` of rounded tensors, and its cotangents.

    Where x and y are the operands' numbers times 2^bx and 2^by, in the dtypes that
    :func:`product_dtypes` says,

        z = 2^-(bx + by) sum_k x_k y_k

    with sums and scale in float32. The backward products likewise, each by its formats.
    Products that have no such dtypes are as traced.

    Args:
      call: the traced one.
      formats: of operands that hold numbers of these formats, and infinities, which
        become NaN in float8_e4m3fn.

    Returns:
      A function from the operands to a list of the result.
    """
    own = formats.lhs, formats.rhs
    dtypes = [node.aval.dtype for node in call.inputs]

    def forward(*operands):
        x, y = map(_Operand.of, operands, own)
        return _multiply(call, x, y), (x.values, y.values)

    def backward(values, cotangent):
        x, y = map(_Operand, values, own, dtypes)
        ct = _Operand.of(cotangent, formats.cotangent)
        return _transposed(call, 0, ct, y), _transposed(call, 1, ct, x)

    product = jax.custom_vjp(lambda x, y: forward(x, y)[0])
    product.defvjp(forward, backward)
    return lambda operands: [product(*operands)]


def _product(
    found: TensorSearch, call: Call, formats: ProductFormats, gives: Gives
) -> Product:
    position = typing.get_args(Gives).index(gives)
    (lhs, rhs), (result,) = call.inputs, call.outputs
    read = [(lhs, rhs), (result, rhs), (result, lhs)][position]
    native = product_dtypes(*formats.pairs[position])
    dtypes = native or tuple(np.dtype(node.aval.dtype) for node in read)
    number = found.numbers.get(result)
    tensor = None if number is None else found.tensors[number]
    repeats = 1 if tensor is None else tensor.repeats
    name = "" if tensor is None else tensor.name
    first, second = (math.prod(node.aval.shape) * repeats for node in read)
    return Product(
        name,
        gives,
        (dtypes[0].name, dtypes[1].name),
        native is not None,
        _flop(call) * repeats,
        (first, second),
    )


def _flop(call: Call) -> int:
    """2 for each element of the result and each position that is summed over."""
    (contracted, _), _ = call.params["dimension_numbers"]
    shape = call.inputs[0].aval.shape
    terms = math.prod(shape[axis] for axis in contracted)
    return 2 * math.prod(call.outputs[0].aval.shape) * terms


class _Operand(typing.NamedTuple):
    """An operand of a product, in the narrow dtype of its format if it has one.

    Args:
      values: of that dtype, times 2^shift.
      fmt: its format, None if it was not rounded to one.
      dtype: that it had before.
    """

    values: jax.Array
    fmt: FloatFormat | None
    dtype: np.dtype

    @classmethod
    def of(cls, x: jax.Array, fmt: FloatFormat | None) -> "_Operand":
        """An array of numbers of a format, narrowed."""
        narrow, values = _narrow(fmt), x
        if narrow is not None and x.dtype != narrow.dtype:
            wide = _shifted(rounding.to_float32(x), narrow.shift)
            values = rounding.round_nearest(wide, narrow.dtype)
        return cls(values, fmt, x.dtype)

    @property
    def shift(self) -> int:
        """How many binary digits the values are above the numbers."""
        narrow = _narrow(self.fmt)
        return 0 if narrow is None else narrow.shift

    def widened(self) -> jax.Array:
        """The numbers in the dtype that they had before."""
        if _narrow(self.fmt) is None:
            return self.values
        wide = rounding.to_float32(self.values)
        return _shifted(wide, -self.shift).astype(self.dtype)


def _multiply(call: Call, x: _Operand, y: _Operand) -> jax.Array:
    """The result of a ``dot_general`` for narrowed operands."""
    dtypes = product_dtypes(x.fmt, y.fmt)
    if dtypes is None:
        return bind(call, [x.widened(), y.widened()])[0]
    # At the default precision XLA lets a GPU keep sums of float8 products in fewer bits
    # than float32 has.
    params = call.params | {
        "precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST),
        "preferred_element_type": jnp.dtype("float32"),
    }
    total = lax.dot_general(
        x.values.astype(dtypes[0]), y.values.astype(dtypes[1]), **params
    )
    return _shifted(total, -(x.shift + y.shift)).astype(call.outputs[0].aval.dtype)


def _transposed(
    call: Call, position: int, cotangent: _Operand, other: _Operand
) -> jax.Array:
    """The cotangent of one operand of a call, from its result's and the other one."""
    node = call.inputs[position]

    def transpose(ct, other):
        def product(x):
            return bind(call, [x, other] if position == 0 else [other, x])[0]

        return jax.linear_transpose(product, node.aval)(ct)

    given = cotangent, other
    shapes = [jax.ShapeDtypeStruct(x.values.shape, x.dtype) for x in given]
    program = LossProgram(jax.make_jaxpr(transpose)(*shapes))
    (inner,) = (c for c in program.calls if c.primitive is call.primitive)
    of_input = dict(zip(program.inputs, given, strict=True))
    operands = [of_input[node] for node in inner.inputs]
    instead = {inner: lambda _: [_multiply(inner, *operands)]}
    return program.evaluate([x.values for x in given], instead)[0]


class _Narrow(typing.NamedTuple):
    """Numbers as a dtype has them: times 2^shift."""

    dtype: np.dtype
    shift: int


def _narrow(fmt: FloatFormat | None) -> _Narrow | None:
    """The narrowest of the dtypes that has a format's numbers, scaled if a float8."""
    if fmt is None:
        return None
    for dtype in _E4M3, _E5M2:
        like = FloatFormat.of(dtype)
        own = fmt.exponent_bits, fmt.mantissa_bits, fmt.specials
        is_like = own == (like.exponent_bits, like.mantissa_bits, like.specials)
        if is_like and abs(fmt.bias) <= _MAX_BIAS:
            return _Narrow(dtype, fmt.bias)
    like = FloatFormat.of(_BFLOAT16)
    is_within = (
        fmt.mantissa_bits <= like.mantissa_bits
        and like.smallest <= fmt.smallest
        and fmt.largest <= like.largest
    )
    return _Narrow(_BFLOAT16, 0) if is_within else None


def _shifted(x: jax.Array, digits: int) -> jax.Array:
    """Times 2^digits, in float32."""
    return x * np.ldexp(np.float32(1), digits) if digits else x
