"""Trace the functions of a body, and evaluate them with 32-bit TPU operations.

A TPU's vector registers contain 32-bit elements, and arithmetic on other types is
missing or slow. Therefore, values of 8 and 16 bits are kept in the upper bits of 32-bit
words (:class:`Narrow`). A word with a bfloat16 in its upper bits is already the bit
pattern of the equal float32, so widening it is free, and shifts by 16 before or after
widening are free too. Values of other kinds are *lazy*: they are computed when they are
used.

Expressions that depend only on scalars, such as random keys, are computed once in each
program of the kernel. If two functions compute the same expression of the same values,
it is computed once for both.

Mosaic treats zeros, infinities and NaNs as separate cases of quotients and square
roots. On some generations of TPUs, :func:`quotient` or :func:`root` replaces them. They
return the same results with two exceptions: a quotient by 2^126 or more is zero, and
the root of a subnormal number is zero or subnormal.
"""

import dataclasses
import functools
import itertools
import operator
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core
from jax.extend.core import primitives as p

from pallas_kernels import operations
from pallas_kernels.fused_update.spec import BlockBody, Body
from pallas_kernels.fused_update.tpu.tiling import REGISTER
from pallas_kernels.operations import ClosedJaxpr, Values, operation_of


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A value in the upper 8 or 16 bits of a word, with arbitrary lower bits."""

    word: jax.Array
    dtype: np.dtype

    @property
    def width(self) -> int:
        """Number of bits of the value."""
        return 8 * self.dtype.itemsize

    def alone(self) -> jax.Array:
        """Return the word with zeros in its lower bits."""
        return self.word & jnp.uint32(0xFFFFFFFF << (32 - self.width) & 0xFFFFFFFF)

    def lowest(self) -> "Field":
        """Return the value in the lower bits of a word."""
        return Field(self.word, 32 - self.width, self.width)

    def as_float32(self) -> jax.Array:
        """Convert a narrow float to float32."""
        info = jnp.finfo(self.dtype)
        bits = self.alone()
        if info.nexp == 8:
            return lax.bitcast_convert_type(bits, jnp.float32)
        magnitude = (bits & jnp.uint32(0x7FFFFFFF)) >> jnp.uint32(8 - info.nexp)
        # Numbers with exponent 0 are multiples of the smallest positive number. A TPU
        # would replace a subnormal intermediate result with zero, so none may occur.
        least = (info.minexp + 127) << 23
        base = lax.bitcast_convert_type(jnp.uint32(least), jnp.float32)
        small = lax.bitcast_convert_type(magnitude + jnp.uint32(least), jnp.float32)
        small = lax.bitcast_convert_type(small - base, jnp.uint32)
        wide = magnitude + jnp.uint32(info.minexp + 126 << 23)
        # Patterns above the largest number are infinities or NaNs.
        largest = np.asarray(info.max).view(f"uint{self.width}").item()
        special = (largest + 1) << (23 - info.nmant)
        wide = jnp.where(magnitude < jnp.uint32(1 << 23), small, wide)
        wide = jnp.where(
            magnitude >= jnp.uint32(special), magnitude | jnp.uint32(0x7F800000), wide
        )
        sign = bits & jnp.uint32(0x80000000)
        return lax.bitcast_convert_type(wide | sign, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Field:
    """Bits of a word as uint32: ``(word >> shift & (1 << width) - 1) << place``.

    Consecutive shifts become one shift, and bits that a later shift drops need no mask.
    If ``is_signed``, the value is the int32 with the same bits.
    """

    word: jax.Array
    shift: int
    width: int
    place: int = 0
    is_signed: bool = False

    def value(self) -> jax.Array:
        """Return the value as an array."""
        bits = self._bits()
        return lax.bitcast_convert_type(bits, jnp.int32) if self.is_signed else bits

    def _bits(self) -> jax.Array:
        bits, top = self._moved(self.place - self.shift), self.place + self.width
        cuts_below = self.shift > 0 and self.place > 0
        cuts_above = self.shift + self.width < 32 and top < 32
        if not cuts_below and not cuts_above:
            return bits
        mask = ((1 << self.width) - 1) << self.place & 0xFFFFFFFF
        return bits & jnp.uint32(mask)

    def is_upper(self, width: int) -> bool:
        """Return whether the field is the upper ``width`` bits of the word."""
        return (self.shift, self.width, self.place) == (32 - width, width, 0)

    def sign_extended(self, places: int) -> jax.Array | None:
        """Return the int32 shifted right with its sign, or None if it needs a mask."""
        if self.place + self.width < 32 or places < self.place:
            return None
        moved = self._moved(self.place - self.shift)
        return lax.bitcast_convert_type(moved, jnp.int32) >> jnp.int32(places)

    def _moved(self, left: int) -> jax.Array:
        if left == 0:
            return self.word
        if left > 0:
            return self.word << jnp.uint32(left)
        return self.word >> jnp.uint32(-left)


@dataclasses.dataclass(frozen=True)
class XorShifted:
    """The exclusive or of a word and the same word shifted right.

    The upper ``shift`` bits of ``array`` equal the upper ``shift`` bits of ``word``.
    """

    array: jax.Array
    word: jax.Array
    shift: int

    def value(self) -> jax.Array:
        """Return the value as an array."""
        return self.array


@dataclasses.dataclass(frozen=True)
class Sum:
    """A uint32 sum of an array that is constant in a loop, a scalar and a constant.

    Sums with different constants share the first two terms, and a constant needs no
    register.
    """

    array: jax.Array
    scalar: jax.Array
    constant: int = 0

    def value(self) -> jax.Array:
        """Return the value as an array."""
        total = self.array + self.scalar
        return total + jnp.uint32(self.constant) if self.constant else total


Lazy = Field | XorShifted | Sum
"""Values that :func:`whole` converts to arrays."""


def whole(x):
    """Return a lazy value as an array, and any other value unchanged."""
    return x.value() if isinstance(x, Lazy) else x


def shifted_left(x, places: int) -> jax.Array:
    """Shift a uint32 array, or a lazy value, to the left."""
    if isinstance(x, Field) and not x.place:
        return dataclasses.replace(x, place=places).value()
    return whole(x) << jnp.uint32(places) if places else whole(x)


# In JAX 0.10, Pallas itself defines it.
reciprocal = getattr(pltpu, "reciprocal", None) or pl.reciprocal

# Bounds of rsqrt for normal float32 numbers, rounded outwards.
_MIN_INVERSE, _MAX_INVERSE = 2.0**-65, 2.0**64


def quotient(x: jax.Array, y: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return ``x / y`` with one Newton step for ``1 / y``, as Mosaic does on a v5e.

    Args:
      x, y: float32 arrays.
      inverse: approximation of ``1 / y``.

    >>> numbers = jnp.float32([3, 0, jnp.inf]), jnp.float32([0.333, jnp.inf, 0])
    >>> quotient(jnp.float32(3), *numbers).round(3).tolist()
    [1.0, inf, 0.0]
    """
    unity = y * inverse
    better = inverse + inverse * (jnp.float32(1) - unity)
    # If unity is NaN, y is zero or infinite, and the given inverse is exact.
    return x * jnp.where(unity == unity, better, inverse)


def root(x: jax.Array) -> jax.Array:
    """Return the square root as ``x * rsqrt(x)``, with bounds that prevent NaNs.

    >>> [float(root(jnp.float32(x))) for x in (0, 4, jnp.inf)]
    [0.0, 2.0, inf]
    """
    inverse = lax.rsqrt(x)
    inverse = jnp.minimum(inverse, jnp.float32(_MAX_INVERSE))
    return x * jnp.maximum(inverse, jnp.float32(_MIN_INVERSE))


_UNSIGNED = tuple(map(jnp.dtype, (jnp.uint8, jnp.uint16)))
_FLOATS = tuple(
    map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2))
)
_NARROW = (*_FLOATS, *_UNSIGNED)
_INTEGERS = tuple(map(jnp.dtype, (jnp.int32, jnp.uint32)))
DTYPES = frozenset((*_NARROW, *_INTEGERS, jnp.dtype(jnp.float32), jnp.dtype(jnp.bool_)))
"""The dtypes of values that kernels support."""

_CONVERSIONS = {
    *((x, jnp.dtype(jnp.float32)) for x in _FLOATS),
    *((x, y) for x in _UNSIGNED for y in _INTEGERS),
    *((x, y) for x in _INTEGERS for y in _UNSIGNED),
}
_PRIMITIVES = frozenset(
    (
        p.add_p, p.add_jaxvals_p, p.sub_p, p.mul_p, p.div_p, p.neg_p, p.abs_p, p.sign_p,
        p.square_p, p.max_p, p.min_p, p.clamp_p, p.sqrt_p, p.rsqrt_p, p.exp_p, p.log_p,
        p.tanh_p, p.logistic_p, p.integer_pow_p, p.and_p, p.or_p, p.xor_p, p.not_p,
        p.shift_left_p, p.shift_right_logical_p, p.shift_right_arithmetic_p,
        p.eq_p, p.ne_p, p.lt_p, p.le_p, p.gt_p, p.ge_p, p.select_n_p, p.is_finite_p,
        p.bitcast_convert_type_p, p.convert_element_type_p, p.broadcast_in_dim_p,
        p.stop_gradient_p, p.copy_p,
    )
)  # fmt: skip
# Operations that move values of 8 and 16 bits without arithmetic.
_OF_NARROW = (p.convert_element_type_p, p.bitcast_convert_type_p, p.select_n_p)


def unsupported(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Yield the operations of a jaxpr that TPU kernels do not support."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is p.jit_p:
            yield from unsupported(eqn.params["jaxpr"].jaxpr)
        elif not _is_supported(eqn):
            operands = ", ".join(x.aval.str_short() for x in eqn.invars)
            yield f"{eqn.primitive} of {operands}"


def _is_supported(eqn) -> bool:
    atoms = (*eqn.invars, *eqn.outvars)
    if eqn.primitive not in _PRIMITIVES or not {x.aval.dtype for x in atoms} <= DTYPES:
        return False
    narrow = [x for x in atoms if x.aval.dtype in _NARROW]
    if not narrow:
        return True
    constants = (isinstance(x, core.Literal) or not x.aval.shape for x in narrow)
    if eqn.primitive not in _OF_NARROW or any(constants):
        return False
    if eqn.primitive is not p.convert_element_type_p:
        return True
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return old == new or (old, jnp.dtype(new)) in _CONVERSIONS


def _convert(eqn, x):
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if old == new:
        return x
    if isinstance(x, Narrow):
        if old in _FLOATS:
            return x.as_float32()
        return dataclasses.replace(x.lowest(), is_signed=new == jnp.int32)
    if new in _UNSIGNED:
        width = 8 * new.itemsize
        if isinstance(x, Field) and x.is_upper(width):
            return Narrow(x.word, jnp.dtype(new))
        array = whole(x)
        if old == jnp.int32:
            array = lax.bitcast_convert_type(array, jnp.uint32)
        return Narrow(array << jnp.uint32(32 - width), jnp.dtype(new))
    return _reinterpreted(eqn, x)


def _bitcast(eqn, x):
    if isinstance(x, Narrow):
        return Narrow(x.word, jnp.dtype(eqn.params["new_dtype"]))
    return _reinterpreted(eqn, x)


def _reinterpreted(eqn, x):
    """Converts an integer array between int32 and uint32."""
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if {old, new} != set(_INTEGERS):
        return NotImplemented
    if isinstance(x, Field):
        return dataclasses.replace(x, is_signed=new == jnp.int32)
    if not eqn.outvars[0].aval.shape:
        return NotImplemented
    return lax.bitcast_convert_type(whole(x), new)


def _by_number(rule: Callable) -> Callable:
    """Makes a rule from a function of a uint32 array and an integer constant."""

    @functools.wraps(rule)
    def of_equation(eqn, x, y):
        number = _number_of(y)
        if number is None or not _is_array(eqn, jnp.uint32):
            return NotImplemented
        return rule(x, number)

    return of_equation


@_by_number
def _shift_left(x, places):
    if isinstance(x, XorShifted):
        x = x.array
    if isinstance(x, Field) and x.place + places < 32:
        return dataclasses.replace(x, place=x.place + places)
    if isinstance(x, Lazy) or not 0 < places < 32:
        return NotImplemented
    return Field(x, 0, 32 - places, places)


@_by_number
def _shift_right(x, places):
    if isinstance(x, XorShifted) and places + x.shift >= 32:
        return Field(x.word, places, 32 - places)
    if not isinstance(x, Field):
        return Field(whole(x), places, 32 - places) if 0 < places < 32 else x
    if x.place == 0 and places < x.width:
        return Field(x.word, x.shift + places, x.width - places)
    if 0 < places <= x.place and x.place + x.width == 32:
        return dataclasses.replace(x, place=x.place - places)
    return NotImplemented


@_by_number
def _and(x, mask):
    if not mask or mask & (mask + 1):
        return NotImplemented
    width = mask.bit_length()
    if not isinstance(x, Field):
        return Field(whole(x), 0, width)
    if x.place == 0:
        return Field(x.word, x.shift, min(x.width, width))
    return NotImplemented


def _xor(eqn, x, y):
    """Combines a word and its right shift; see :class:`XorShifted`."""
    if not isinstance(y, Field) or y.word is not x or y.place or y.shift + y.width < 32:
        return NotImplemented
    return XorShifted(x ^ y.value(), x, y.shift)


def _shift_right_signed(eqn, x, places):
    places = _number_of(places)
    extended = None
    if isinstance(x, Field) and x.is_signed and places is not None:
        extended = x.sign_extended(places)
    return NotImplemented if extended is None else extended


def _add(eqn, x, y):
    if not isinstance(x, Sum) or isinstance(y, Lazy) or jnp.shape(y):
        return NotImplemented
    return dataclasses.replace(x, scalar=x.scalar + y)


def _sub(eqn, x, y):
    """Subtracts constants, so that a shift by the result is a shift by a constant."""
    x, y = _number_of(x), _number_of(y)
    if x is None or y is None or eqn.outvars[0].aval.dtype != jnp.uint32:
        return NotImplemented
    return np.uint32((x - y) % 2**32)


def _select(eqn, which, *cases):
    if any(isinstance(x, Narrow) for x in cases):
        words = [x.word for x in cases]
        return Narrow(lax.select_n(which, *words), cases[0].dtype)
    if _is_array(eqn, jnp.bool_):  # Mosaic cannot select booleans
        without, with_ = cases
        return (which & with_) | (~which & without)
    if not _is_array(eqn, jnp.uint32):
        return NotImplemented
    return _selected(which, *map(whole, cases))


def _selected(which, *words) -> jax.Array:
    """Selects words after reinterpreting them as floats.

    Versions of libtpu before 0.0.52 cannot compile the minimum or maximum of unsigned
    integers, and some create one from a comparison and a selection of the same words.
    """
    floats = [lax.bitcast_convert_type(word, jnp.float32) for word in words]
    return lax.bitcast_convert_type(lax.select_n(which, *floats), jnp.uint32)


def _unless(is_outside: Callable) -> Callable:
    """Makes a rule for the minimum or maximum of words from a comparison function."""

    def of_equation(eqn, x, y):
        if not _is_array(eqn, jnp.uint32):
            return NotImplemented
        x, y = jnp.broadcast_arrays(whole(x), whole(y))
        return _selected(is_outside(x, y), x, y)

    return of_equation


_max, _min = _unless(operator.lt), _unless(operator.gt)


def _clamp(eqn, least, x, most):
    x = _max(eqn, x, least)
    return x if x is NotImplemented else _min(eqn, x, most)


def _broadcast(eqn, x):
    if isinstance(x, Narrow | Lazy) or eqn.invars[0].aval.shape:
        return x
    return NotImplemented


def _div(eqn, x, y):
    if not _is_array(eqn, jnp.float32):
        return NotImplemented
    y = jnp.broadcast_to(y, eqn.outvars[0].aval.shape)
    return quotient(x, y, reciprocal(y, approx=True))


def _sqrt(eqn, x):
    return root(x) if _is_array(eqn, jnp.float32) else NotImplemented


def _pattern_above(x, base, most) -> jax.Array:
    """Computes :func:`.operations.pattern_above` with operations on floats.

    Only floats have a maximum in one instruction. Comparisons with NaN are false. If
    the maximum returns a negative zero, ``base`` is 0, and the result has only its sign
    bit set.
    """
    base = whole(base)
    as_float = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
    last = as_float(base + most)
    x = jnp.maximum(jnp.where(x < last, x, last), as_float(base))
    return lax.bitcast_convert_type(x, jnp.int32) - base


def _number_of(x) -> int | None:
    """Returns an input as an int if it is a constant scalar, and None otherwise."""
    if isinstance(x, np.generic | int) and not isinstance(x, bool):
        return int(x)
    if isinstance(x, np.ndarray) and not x.shape:
        return int(x)
    return None


def _is_array(eqn, dtype) -> bool:
    aval = eqn.outvars[0].aval
    return bool(aval.shape) and aval.dtype == dtype


RULES: Mapping = {
    p.convert_element_type_p: _convert,
    p.bitcast_convert_type_p: _bitcast,
    p.shift_left_p: _shift_left,
    p.shift_right_logical_p: _shift_right,
    p.shift_right_arithmetic_p: _shift_right_signed,
    p.and_p: _and,
    p.xor_p: _xor,
    p.add_p: _add,
    p.sub_p: _sub,
    p.add_jaxvals_p: _add,
    p.max_p: _max,
    p.min_p: _min,
    p.clamp_p: _clamp,
    p.select_n_p: _select,
    p.broadcast_in_dim_p: _broadcast,
    p.copy_p: lambda eqn, x: x,
    p.stop_gradient_p: lambda eqn, x: x,
    operations.pattern_above: _pattern_above,
}
"""Rules for primitives and for :data:`.operations.OPERATIONS`. A rule for a primitive
is a function of an equation and its inputs, and may return NotImplemented. A rule for
an operation is a function of the inputs."""


def by_itself(eqn, *inputs) -> jax.Array:
    """Return the result of an equation that has no rule."""
    params = eqn.primitive.get_bind_params(eqn.params)
    return eqn.primitive.bind(*map(whole, inputs), **params)


def rules_for(generation: int | None) -> Mapping:
    """Return the rules for a TPU generation; None means that it is unknown."""
    if generation is None:
        return RULES
    # On v6e and newer, reciprocal and reciprocal root are one instruction each.
    return {**RULES, **({p.div_p: _div} if generation <= 5 else {p.sqrt_p: _sqrt})}


def generation_of_target() -> int | None:
    """Return the TPU generation that the program is for, or None if it is unknown."""
    try:
        return pltpu.get_tpu_info().generation
    except ValueError:
        return None


Known = dict
"""Results of equations, keyed by primitive, parameters and inputs."""


class Function:
    """A traced function, which is evaluated with 32-bit operations.

    Args:
      function: a function from trees of arrays to a tree of arrays.
      *like: ShapeDtypeStructs of the arguments.
    """

    def __init__(self, function: Callable, *like):
        traced = jax.make_jaxpr(function, return_shape=True)
        # The jaxpr must not name the active mesh: it may be evaluated in a shard_map.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            self._closed, self.shapes = traced(*like)

    @property
    def unsupported(self) -> list[str]:
        """The operations that TPU kernels do not support."""
        return list(unsupported(self._closed.jaxpr))

    def add_known(self, scalars: Sequence[jax.Array], known: Known) -> None:
        """Compute expressions that depend only on scalars.

        Args:
          scalars: all arguments that are scalars, in order.
          known: a dict to which the results are added.
        """
        left = list(scalars)
        avals: list[typing.Any] = [x.aval for x in self._closed.jaxpr.invars]
        args = [None if aval.shape else left.pop(0) for aval in avals]
        Evaluation(known, RULES, of_scalars=True).run(self._closed, args)

    def __call__(self, evaluation: "Evaluation", *args):
        """Return the results: arrays, :class:`.Narrow` or :data:`.Lazy` values.

        Args:
          evaluation: evaluates all functions of the same values.
          *args: arguments of the function.
        """
        results = evaluation.run(self._closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluates jaxprs.

    Args:
      known: results of earlier equations. New results are added.
      rules: see :data:`RULES`.
      of_scalars: whether to compute only scalars. All other values are then None.
    """

    known: Known
    rules: Mapping
    of_scalars: bool = False

    def run(self, closed: ClosedJaxpr, args: Sequence) -> list:
        """Return the outputs of a jaxpr."""
        values = Values(closed, args)
        for eqn in closed.jaxpr.eqns:
            values.set(eqn.outvars, self._results(eqn, values.of(eqn.invars)))
        return values.of(closed.jaxpr.outvars)

    def _results(self, eqn, inputs: list) -> list:
        if eqn.primitive is p.jit_p:
            rule = None if self.of_scalars else self.rules.get(operation_of(eqn))
            if rule is None:
                return self.run(eqn.params["jaxpr"], inputs)
            return [rule(*inputs)]
        if self.of_scalars and (
            any(x is None for x in inputs) or eqn.outvars[0].aval.shape
        ):
            return [None] * len(eqn.outvars)
        key = (
            eqn.primitive,
            tuple(sorted((name, str(value)) for name, value in eqn.params.items())),
            tuple(_identity(x) for x in inputs),
        )
        if key not in self.known:
            # Keeping the inputs prevents new arrays from getting the same ids.
            rule = self.rules.get(eqn.primitive)
            result = NotImplemented if rule is None else rule(eqn, *inputs)
            if result is NotImplemented:
                result = by_itself(eqn, *inputs)
            self.known[key] = result, inputs
        return [self.known[key][0]]


def _identity(x):
    if isinstance(x, Narrow | Lazy):
        parts = dataclasses.fields(x)
        return type(x), *(_identity(getattr(x, part.name)) for part in parts)
    if isinstance(x, np.generic | np.ndarray | int | float | bool):
        array = np.asarray(x)
        return str(array.dtype), array.shape, array.tobytes()
    return id(x)


@dataclasses.dataclass(frozen=True)
class Functions:
    """The traced functions of a body.

    Args:
      run: the body itself.
      before: the method of a :class:`.BlockBody`; None for other bodies.
      rounds: ``statistics`` and ``after`` for each round of maxima.
      block_sizes: the size of the blocks for each maximum.
    """

    run: Function
    before: Function | None = None
    rounds: Sequence[tuple[Function, Function]] = ()
    block_sizes: Sequence[int] = ()

    @property
    def unsupported(self) -> list[str]:
        """The operations that TPU kernels do not support."""
        parts = [self.run, self.before, *itertools.chain(*self.rounds)]
        return [name for x in parts if x is not None for name in x.unsupported]


def traced(
    body: Body | BlockBody,
    kinds: Sequence[tuple[np.dtype, int | None]],
    scalars: int,
) -> Functions:
    """Trace a body's functions. Equal leaves share the result.

    Args:
      body: see :data:`pallas_kernels.fused_update.Body`.
      kinds: dtypes and block sizes of the leaf's operands.
      scalars: number of the body's scalars.
    """
    # This dtype depends on whether 64-bit types are enabled.
    integers = jax.dtypes.canonicalize_dtype(np.int64)
    return _traced(body, tuple(kinds), scalars, integers)


@functools.lru_cache(maxsize=1024)
def _traced(body, kinds: Sequence, scalars: int, integers: np.dtype) -> Functions:
    del integers

    def registers(dtypes):
        return [jax.ShapeDtypeStruct(REGISTER, dtype) for dtype in dtypes]

    values = registers(dtype for dtype, size in kinds if size is None)
    block_values = registers(dtype for dtype, size in kinds if size is not None)
    words = [jax.ShapeDtypeStruct((), jnp.uint32)] * scalars
    arguments = values, words, *registers([jnp.uint32])
    if not block_values:
        return Functions(Function(body, *arguments))
    before, block_sizes = Function(body.before, block_values), body.block_sizes
    given, rounds, maxima = [before.shapes], [], []
    while len(maxima) < len(block_sizes):
        keys = Function(body.statistics, *arguments, *given)
        maxima += registers([jnp.int32] * len(keys.shapes))
        after = Function(body.after, maxima, block_values)
        given[1:] = [after.shapes[1]]
        rounds.append((keys, after))
    run_with_blocks = Function(body, *arguments, *given)
    return Functions(run_with_blocks, before, rounds, block_sizes)
