"""Shorter machine code for operations for which launchers take several instructions.

**Roots, and quotients by them.** Triton's root of a float32 takes four instructions and
its quotient eight, because both also work near the ends of float32's range. Three kinds
of divisors are known to be far from these ends, and need no scaling: the root of a
normal number, which is between 2^-63 and 2^64; its sum with a number; and a quarter or
less of a maximum with a constant that is not small. Results are as precise as Triton's
(2 units in the last place), but the root of a subnormal number is 0, and one over it
infinite.

**Bytes.** Four fields of 8 bits, each shifted and masked and then shifted to its place,
are a word after three permutations of bytes. One extends the sign of such a field, or
moves it to another place. One mask serves all four.

**Operations by name**, of :mod:`.operations`, and the widening of bfloat16.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives as p

from pallas_kernels import operations
from pallas_kernels.bitfields import get_field
from pallas_kernels.gpu.instructions import Instructions
from pallas_kernels.jaxprs import ClosedJaxpr

_ADDITIONS = (p.add_p, p.add_jaxvals_p)
_SMALLEST = 2.0**-126  # float32's smallest normal number
_OPERATIONS = (
    "round_to_bfloat16",
    "unless_rounded",
    "keep_nan",
    "pattern_with_one_nan",
    "ordered_pattern",
    "reverse_bytes",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Byte:
    """A field that is a byte of a uint32 word, counted from its lowest."""

    word: jax.Array
    number: int = dataclasses.field(metadata={"static": True})

    def value(self) -> jax.Array:
        """The field as uint32."""
        return get_field([self.word], self.number, 8)


def with_short_forms(
    function: Callable, instructions: Instructions, bytes_: Sequence[int] = ()
) -> Callable:
    """An elementwise function with shorter operations.

    Args:
      function: from trees of arrays to one.
      instructions: of the kernel's launcher.
      bytes_: numbers of the results that are fields of 8 bits. They are returned as
        :class:`Byte`.
    """
    traced = {}

    def run(*args):
        flat, structure = jax.tree.flatten(args, is_leaf=_is_byte)
        words = [x.word if _is_byte(x) else x for x in flat]
        key = structure, tuple(map(jax.typeof, words))
        if key not in traced:
            traced[key] = jax.make_jaxpr(
                lambda *flat: function(*structure.unflatten(flat)), return_shape=True
            )(*words)
        closed, shapes = traced[key]
        divisors = [False] * len(flat)
        evaluation = _Evaluation(closed, flat, divisors, instructions)
        results = [
            evaluation.byte(atom) if i in bytes_ else evaluation.value(atom)
            for i, atom in enumerate(evaluation.outputs)
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def put_bytes(fields: Sequence[Byte], instructions: Instructions) -> list[jax.Array]:
    """Fields of 8 bits as words, the lowest first."""
    fours = (fields[i : i + 4] for i in range(0, len(fields), 4))
    return [
        instructions.put_bytes([x.word for x in four], [x.number for x in four])
        for four in fours
    ]


class _Evaluation:
    """The evaluation of a jaxpr.

    Args:
      closed: the jaxpr.
      args: its arguments.
      are_divisors: which of them may be divided by without scaling.
      instructions: of the kernel's launcher.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        args: list,
        are_divisors: list[bool],
        instructions: Instructions,
    ):
        jaxpr, self._instructions = closed.jaxpr, instructions
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
        inputs, instructions = [self.value(x) for x in eqn.invars], self._instructions
        divisors = [self.is_divisor(atom) for atom in eqn.invars]
        single = eqn.outvars[0].aval.shape and all(
            atom.aval.dtype == jnp.float32 for atom in eqn.invars
        )
        if eqn.primitive is p.jit_p:
            name = eqn.params["name"].removeprefix(operations.PREFIX)
            if name in _OPERATIONS and _shape(eqn.outvars[0]):
                return [getattr(instructions, name)(*inputs)]
            jaxpr = eqn.params["jaxpr"]
            inner = _Evaluation(jaxpr, inputs, divisors, instructions)
            pairs = zip(eqn.outvars, inner.outputs, strict=True)
            self._divisors |= {var for var, atom in pairs if inner.is_divisor(atom)}
            return [inner.value(atom) for atom in inner.outputs]
        if eqn.primitive is p.sqrt_p and single:
            self._divisors.add(eqn.outvars[0])
            root = "sqrt.approx.ftz.f32 $0, $1;"
            return [instructions.assemble(root, inputs, jnp.float32)]
        if eqn.primitive is p.rsqrt_p and single:
            inverse = "rsqrt.approx.ftz.f32 $0, $1;"
            return [instructions.assemble(inverse, inputs, jnp.float32)]
        if eqn.primitive is p.div_p and single and divisors[1]:
            inverse = instructions.assemble(
                "rcp.approx.ftz.f32 $0, $1;", inputs[1:], jnp.float32
            )
            return [inputs[0] * inverse]
        if eqn.primitive is p.convert_element_type_p and _widens_bfloat16(eqn):
            return [instructions.to_float32(inputs[0])]
        if eqn.primitive is p.shift_right_arithmetic_p:
            byte = self._with_sign_on_top(eqn.invars[0])
            place = self._constant(eqn.invars[1])
            if byte is not None and place in (0, 8, 16, 24):
                place = 3 - int(place) // 8
                return [instructions.signed_byte(byte.word, byte.number, place)]
        if eqn.primitive in (p.and_p, p.shift_left_p):
            moved = self._of_byte(eqn)
            if moved is not None:
                return [moved]
        if eqn.primitive is p.shift_right_logical_p:
            word = self._before_reversal(eqn.invars[0])
            shift = self._constant(eqn.invars[1])
            if word is not None and shift in (8, 16, 24):
                return [instructions.reversed_and_shifted(word, int(shift) // 8)]
        if single and self._is_moderate(eqn, divisors):
            self._divisors.add(eqn.outvars[0])
        if eqn.primitive in instructions.replaced:
            return [instructions.replaced[eqn.primitive](*inputs, **eqn.params)]
        params = eqn.primitive.get_bind_params(eqn.params)
        results = eqn.primitive.bind(*inputs, **params)
        return results if eqn.primitive.multiple_results else [results]

    def _of_byte(self, eqn) -> Byte | jax.Array | None:
        """A field of 8 bits masked or shifted by a constant, or None."""
        byte, number = self._given(eqn.invars[0]), self._constant(eqn.invars[1])
        if not isinstance(byte, Byte) or not isinstance(number, int):
            return None
        if eqn.primitive is p.and_p and number < 256:
            # One mask for the four bytes of a word.
            return Byte(byte.word & jnp.uint32(number * 0x01010101), byte.number)
        if eqn.primitive is p.shift_left_p and 0 < number < 24:
            place, rest = divmod(number, 8)
            placed = self._instructions.placed_byte(byte.word, byte.number, place)
            return placed << jnp.uint32(rest) if rest else placed
        return None

    def _with_sign_on_top(self, atom) -> Byte | None:
        """The byte of which this int32 is the highest and all else 0, or None."""
        converted = self._call(atom)
        if converted is None or converted.primitive is not p.convert_element_type_p:
            return None
        field = self._other_operand(converted.invars[0], p.shift_left_p, 24)
        given = None if field is None else self._given(field)
        return given if _is_byte(given) else None

    def _before_reversal(self, atom):
        """The words of which this has the bytes in opposite order, or None."""
        eqn = self._call(atom)
        if eqn is None or eqn.primitive is not p.jit_p:
            return None
        if eqn.params["name"] != operations.PREFIX + "reverse_bytes":
            return None
        return self.value(eqn.invars[0])

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


def _widens_bfloat16(eqn) -> bool:
    dtypes = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return dtypes == (jnp.bfloat16, jnp.float32) and bool(_shape(eqn.invars[0]))
