"""Shorter machine code for operations for which Triton takes several instructions.

**Roots, and quotients by them.** Triton's root of a float32 takes four instructions and
its quotient eight, because both also work near the ends of float32's range. Three kinds
of divisors are known to be far from these ends, and need no scaling: the root of a
normal number, which is between 2^-63 and 2^64; its sum with a number; and a quarter or
less of a maximum with a constant that is not small. Results are as precise as Triton's
(2 units in the last place), but the root of a subnormal number is 0.

**Bytes.** Four fields of 8 bits, each shifted and masked and then shifted to its place,
are a word after three permutations of bytes.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton
from jax.extend import core
from jax.extend.core import primitives as p

from pallas_kernels.bitfields.fields import get_field
from pallas_kernels.fused_update import operations

_ADDITIONS = (p.add_p, p.add_jaxvals_p)
_SMALLEST = 2.0**-126  # float32's smallest normal number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Byte:
    """A field that is a byte of a uint32 word, counted from its lowest."""

    word: jax.Array
    number: int = dataclasses.field(metadata={"static": True})

    def value(self) -> jax.Array:
        """The field as uint32."""
        return get_field([self.word], self.number, 8)


def with_short_forms(function: Callable, bytes_: Sequence[int] = ()) -> Callable:
    """An elementwise function with shorter operations, for a kernel of Triton's.

    Args:
      function: from trees of arrays to one.
      bytes_: numbers of the results that are fields of 8 bits. They are returned as
        :class:`Byte`.
    """
    traced = None

    def run(*args):
        nonlocal traced
        flat, structure = jax.tree.flatten(args, is_leaf=_is_byte)
        if traced is None:  # all rows of a kernel are alike
            traced = jax.make_jaxpr(
                lambda *flat: function(*structure.unflatten(flat)), return_shape=True
            )(*(x.word if _is_byte(x) else x for x in flat))
        closed, shapes = traced
        evaluation = _Evaluation(closed, flat, [False] * len(flat))
        results = [
            evaluation.byte(atom) if i in bytes_ else evaluation.value(atom)
            for i, atom in enumerate(evaluation.outputs)
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def put_bytes(fields: Sequence[Byte]) -> list[jax.Array]:
    """Fields of 8 bits as words, the lowest first."""
    words = []
    for i in range(0, len(fields), 4):
        a, b, c, d = fields[i : i + 4]
        (word,) = _assemble(
            "{ .reg .b32 low, high;"
            f" prmt.b32 low, $1, $2, {a.number + 16 * (4 + b.number)};"
            f" prmt.b32 high, $3, $4, {c.number + 16 * (4 + d.number)};"
            " prmt.b32 $0, low, high, 0x5410; }",
            [a.word, b.word, c.word, d.word],
            jnp.int32,
        )
        words.append(jax.lax.bitcast_convert_type(word, jnp.uint32))
    return words


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c`` in one instruction, which rounds once."""
    return _assemble("fma.rn.f32 $0, $1, $2, $3;", [a, b, c], jnp.float32)[0]


class _Evaluation:
    """The evaluation of a jaxpr.

    Args:
      closed: the jaxpr.
      args: its arguments.
      are_divisors: which of them may be divided by without scaling.
    """

    def __init__(self, closed: core.ClosedJaxpr, args: list, are_divisors: list[bool]):
        jaxpr = closed.jaxpr
        self.outputs = jaxpr.outvars
        self._known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._known |= zip(jaxpr.invars, args, strict=True)
        self._calls = {}
        pairs = zip(jaxpr.invars, are_divisors, strict=True)
        self._divisors = {var for var, is_divisor in pairs if is_divisor}
        for eqn in jaxpr.eqns:
            self._calls |= dict.fromkeys(eqn.outvars, eqn)
            self._known |= zip(eqn.outvars, self._results(eqn), strict=True)

    def value(self, atom):
        value = atom.val if isinstance(atom, core.Literal) else self._known[atom]
        return value.value() if _is_byte(value) else value

    def is_divisor(self, atom) -> bool:
        return not isinstance(atom, core.Literal) and atom in self._divisors

    def byte(self, atom) -> Byte:
        """A field of 8 bits, without the operations that move a byte to its place."""
        shift, word = 0, atom
        masked = self._other_operand(word, p.and_p, 255)
        word = word if masked is None else masked
        if masked is None and _is_byte(self._given(atom)):
            return self._known[atom]
        for number in (8, 16, 24):
            shifted = self._other_operand(word, p.shift_right_logical_p, number)
            if shifted is not None and (masked is not None or number == 24):
                shift, word = number, shifted
                break
        return Byte(self.value(word), shift // 8)

    def _results(self, eqn) -> list:
        inputs = [self.value(atom) for atom in eqn.invars]
        divisors = [self.is_divisor(atom) for atom in eqn.invars]
        single = eqn.outvars[0].aval.shape and all(
            atom.aval.dtype == jnp.float32 for atom in eqn.invars
        )
        if eqn.primitive is p.jit_p and eqn.params["name"] in _OPERATIONS:
            if _shape(eqn.outvars[0]):
                return [_OPERATIONS[eqn.params["name"]](*inputs)]
        if eqn.primitive is p.jit_p:
            inner = _Evaluation(eqn.params["jaxpr"], inputs, divisors)
            pairs = zip(eqn.outvars, inner.outputs, strict=True)
            self._divisors |= {var for var, atom in pairs if inner.is_divisor(atom)}
            return [inner.value(atom) for atom in inner.outputs]
        if eqn.primitive is p.sqrt_p and single:
            self._divisors.add(eqn.outvars[0])
            return _assemble("sqrt.approx.ftz.f32 $0, $1;", inputs, jnp.float32)
        if eqn.primitive is p.div_p and single and divisors[1]:
            inverse = _assemble("rcp.approx.ftz.f32 $0, $1;", inputs[1:], jnp.float32)
            return [inputs[0] * inverse[0]]
        if eqn.primitive is p.convert_element_type_p and _widens_bfloat16(eqn):
            return [_widened(inputs[0])]
        if eqn.primitive is p.shift_right_arithmetic_p:
            byte = self._with_sign_on_top(eqn.invars[0])
            place = self._constant(eqn.invars[1])
            if byte is not None and place in (0, 8, 16, 24):
                return [_extended(byte, 3 - place // 8)]
        if single and self._is_moderate(eqn, divisors):
            self._divisors.add(eqn.outvars[0])
        params = eqn.primitive.get_bind_params(eqn.params)
        results = eqn.primitive.bind(*inputs, **params)
        return results if eqn.primitive.multiple_results else [results]

    def _with_sign_on_top(self, atom) -> Byte | None:
        """The byte of which this int32 is the highest and all else 0, or None."""
        converted = self._call(atom)
        if converted is None or converted.primitive is not p.convert_element_type_p:
            return None
        field = self._other_operand(converted.invars[0], p.shift_left_p, 24)
        given = None if field is None else self._given(field)
        return given if _is_byte(given) else None

    def _is_moderate(self, eqn, divisors: list[bool]) -> bool:
        """Whether a sum or product is such that it may be divided by."""
        if eqn.primitive in _ADDITIONS:
            numbers = [
                self._before_broadcast(atom).aval.shape == () for atom in eqn.invars
            ]
            return any(divisors) and all(map(any, zip(divisors, numbers, strict=True)))
        if eqn.primitive is p.mul_p:
            large, factor = eqn.invars
            of_maximum = self._call(large)
            if of_maximum is not None and of_maximum.primitive is p.max_p:
                least = self._constant(of_maximum.invars[1])
                factor = self._constant(factor)
                if least is not None and factor is not None:
                    return factor <= 0.25 and least * factor >= _SMALLEST
        return False

    def _given(self, atom):
        return None if isinstance(atom, core.Literal) else self._known[atom]

    def _call(self, atom):
        return None if isinstance(atom, core.Literal) else self._calls.get(atom)

    def _other_operand(self, atom, primitive, constant):
        """What the primitive combines with this constant, or None."""
        eqn = self._call(atom)
        if eqn is None or eqn.primitive is not primitive:
            return None
        return eqn.invars[0] if self._constant(eqn.invars[1]) == constant else None

    def _before_broadcast(self, atom):
        """What is broadcast to an array, or the atom itself."""
        eqn = self._call(atom)
        if eqn is not None and eqn.primitive is p.broadcast_in_dim_p:
            return eqn.invars[0]
        return atom

    def _constant(self, atom) -> int | float | None:
        atom = self._before_broadcast(atom)
        if not isinstance(atom, core.Literal) or _shape(atom):
            return None
        return np.asarray(atom.val).item()


def _shape(atom) -> tuple[int, ...]:
    return atom.aval.shape


def _is_byte(x) -> bool:
    return isinstance(x, Byte)


def _extended(byte: Byte, place: int) -> jax.Array:
    """int32 with a byte at this place, its sign above it and 0 below."""
    sign = 8 + byte.number
    chosen = [4] * place + [byte.number] + [sign] * (3 - place)
    selector = sum(number << 4 * i for i, number in enumerate(chosen))
    (extended,) = _assemble(f"prmt.b32 $0, $1, 0, {selector};", [byte.word], jnp.int32)
    return extended


def _widens_bfloat16(eqn) -> bool:
    dtypes = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return dtypes == (jnp.bfloat16, jnp.float32) and bool(_shape(eqn.invars[0]))


def _widened(x: jax.Array) -> jax.Array:
    """bfloat16 as float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)


def _round_to_bfloat16(x: jax.Array) -> jax.Array:
    # The conversion's NaN is 0x7FFF. Only of that one does adding 1 set the sign, which
    # then is in all bits of its low byte, to clear those that NAN has not.
    (rounded,) = _assemble_pairs(
        "{ .reg .b32 pair, next, sign, mask;"
        " cvt.rn.bf16x2.f32 pair, $2, $1;"
        " add.u32 next, pair, 0x00010001;"
        " lop3.b32 sign, next, pair, pair, 0x30;"  # next & ~pair
        " prmt.b32 mask, sign, 0, 0x4b49;"
        " lop3.b32 $0, pair, mask, 0x003f003f, 0x70; }",  # pair & ~(mask & 0x3f..)
        "=r,f,f",
        [x],
        jnp.bfloat16,
    )
    return rounded


def _unless_rounded(x: jax.Array, rounded: jax.Array) -> jax.Array:
    # Of a NaN that rounds to the NaN, the latter: arithmetic makes one of both.
    (chosen,) = _assemble_pairs(
        "{ .reg .b32 pair, low, high; .reg .pred first, second;"
        " cvt.rn.bf16x2.f32 pair, $3, $2;"
        " xor.b32 pair, pair, $4;"
        " and.b32 low, pair, 0xffff;"
        " setp.eq.u32 first, low, 0;"
        " and.b32 high, pair, 0xffff0000;"
        " setp.eq.u32 second, high, 0;"
        " shl.b32 low, $4, 16;"
        " and.b32 high, $4, 0xffff0000;"
        " selp.b32 low, $2, low, first;"
        " selp.b32 high, $3, high, second;"
        " mov.b32 $0, low;"
        " mov.b32 $1, high; }",
        "=r,=r,r,r,r",
        [x, rounded],
        jnp.float32,
    )
    return chosen


def _keep_nan(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(jnp.isnan(x), jnp.uint32(operations.LAST_NAN), bits)


_OPERATIONS = {
    operations.PREFIX + "round_to_bfloat16": _round_to_bfloat16,
    operations.PREFIX + "unless_rounded": _unless_rounded,
    operations.PREFIX + "keep_nan": _keep_nan,
}


def _assemble_pairs(
    instructions: str, constraints: str, args: Sequence[jax.Array], dtype
) -> list[jax.Array]:
    """For two elements at a time: two registers of 32 bits, or one of 16."""
    results = triton.elementwise_inline_asm(
        instructions,
        args=args,
        constraints=constraints,
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return list(results)


def _assemble(instructions: str, args: Sequence[jax.Array], dtype) -> list[jax.Array]:
    letter = "f" if dtype == jnp.float32 else "r"
    results = triton.elementwise_inline_asm(
        instructions,
        args=args,
        constraints=",".join(["=" + letter, *[letter] * len(args)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return list(results)
