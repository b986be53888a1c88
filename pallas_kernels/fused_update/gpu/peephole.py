"""Peephole rules: shorter machine code for groups of operations in a kernel's body.

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

What no peephole rule takes is replaced by the rule that the launcher's
:class:`pallas_kernels.gpu.instructions.Instructions` have for it, if there is one.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives as p

from pallas_kernels import operations
from pallas_kernels.bitfields import get_field
from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.spec import BlockBody, Body
from pallas_kernels.gpu.instructions import PERMUTATIONS, Instructions
from pallas_kernels.operations import ClosedJaxpr, operation_of

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


def with_peephole_rules(
    function: Callable, instructions: Instructions | None, bytes_: Sequence[int] = ()
) -> Callable:
    """An elementwise function, by the rules of this module and of a launcher.

    Args:
      function: from trees of arrays to one.
      instructions: of the kernel's launcher; None if XLA runs the operations.
      bytes_: numbers of the results that are fields of 8 bits. They are returned as
        :class:`Byte`.
    """
    if instructions is None:
        return function
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


@functools.lru_cache(maxsize=256)
def with_instructions(
    body: Body | BlockBody,
    method: typing.Literal["__call__", "statistics"],
    instructions: Instructions | None,
    bytes_: tuple[int, ...] = (),
) -> Callable:
    """A method of an update's body, by :func:`with_peephole_rules`.

    It is jitted, so that JAX traces it once for all rows, and for all kernels whose
    bodies are equal.

    Args:
      body: the body.
      method: of the body.
      instructions, bytes_: as of :func:`with_peephole_rules`.
    """
    function = getattr(body, method)
    multiply_add = (instructions or xla).multiply_add

    def run(values, scalars, index, *of_blocks):
        return function(values, scalars, index, multiply_add, *of_blocks)

    return jax.jit(with_peephole_rules(run, instructions, bytes_))


def put_bytes(fields: Sequence[Byte], instructions: Instructions) -> list[jax.Array]:
    """Fields of 8 bits as words, the lowest first."""
    fours = (fields[i : i + 4] for i in range(0, len(fields), 4))
    return [
        instructions.put_bytes([x.word for x in four], [x.number for x in four])
        for four in fours
    ]


class _Evaluation:
    """The evaluation of a jaxpr, from the results of equations to their uses.

    Args:
      closed: the jaxpr.
      args: its arguments.
      are_divisors: which of them may be divided by without scaling.
      instructions: of the kernel's launcher.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        args: Sequence,
        are_divisors: Sequence[bool],
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
        value = self._given(atom)
        return value.value() if isinstance(value, Byte) else value

    def is_divisor(self, atom) -> bool:
        return not isinstance(atom, core.Literal) and atom in self._divisors

    def byte(self, atom) -> Byte:
        """A field of 8 bits, without the operations that move a byte to its place."""
        shift, word = 0, atom
        masked = self._other_operand(word, p.and_p, 255)
        word = word if masked is None else masked
        given = self._given(atom)
        if masked is None and isinstance(given, Byte):
            return given
        for number in (8, 16, 24):
            shifted = self._other_operand(word, p.shift_right_logical_p, number)
            if shifted is not None and (masked is not None or number == 24):
                shift, word = number, shifted
                break
        return Byte(self.value(word), shift // 8)

    def _results(self, eqn) -> list:
        inputs, operation = [self.value(x) for x in eqn.invars], operation_of(eqn)
        peephole = _RULES.get(operation)
        found = None if peephole is None else peephole(self, eqn, *inputs)
        if found is not None:
            return [found]
        rule = self._instructions.rules.get(operation)
        if isinstance(operation, operations.Operation):
            if rule is not None and eqn.outvars[0].aval.shape:
                return [rule(*inputs)]
        elif rule is not None:
            return [rule(*inputs, **eqn.params)]
        if eqn.primitive is p.jit_p:
            return self._called(eqn, inputs)
        params = eqn.primitive.get_bind_params(eqn.params)
        results = eqn.primitive.bind(*inputs, **params)
        return results if eqn.primitive.multiple_results else [results]

    def _called(self, eqn, inputs: list) -> list:
        divisors = [self.is_divisor(atom) for atom in eqn.invars]
        jaxpr, instructions = eqn.params["jaxpr"], self._instructions
        inner = _Evaluation(jaxpr, inputs, divisors, instructions)
        pairs = zip(eqn.outvars, inner.outputs, strict=True)
        self._divisors |= {var for var, atom in pairs if inner.is_divisor(atom)}
        return [inner.value(atom) for atom in inner.outputs]

    def _approximate(self, function: str, x: jax.Array) -> jax.Array:
        instruction = f"{function}.approx.ftz.f32 $0, $1;"
        return self._instructions.assemble(instruction, [x], jnp.float32)

    def _root(self, eqn, x):
        if not _is_single(eqn):
            return None
        self._divisors.add(eqn.outvars[0])
        return self._approximate("sqrt", x)

    def _inverse_root(self, eqn, x):
        return self._approximate("rsqrt", x) if _is_single(eqn) else None

    def _quotient(self, eqn, x, y):
        if not _is_single(eqn) or not self.is_divisor(eqn.invars[1]):
            return None
        return x * self._approximate("rcp", y)

    def _sum(self, eqn, *_):
        """Only notes that a root's sum with a number, or a root, is a divisor too."""
        divisors = [self.is_divisor(atom) for atom in eqn.invars]
        numbers = [not self._before_broadcast(x).aval.shape for x in eqn.invars]
        is_moderate = all(map(any, zip(divisors, numbers, strict=True)))
        if _is_single(eqn) and any(divisors) and is_moderate:
            self._divisors.add(eqn.outvars[0])

    def _product(self, eqn, *_):
        """Only notes that a part of a maximum with a constant is a divisor too."""
        maximum, factor = self._call(eqn.invars[0]), self._constant(eqn.invars[1])
        if maximum is None or maximum.primitive is not p.max_p or factor is None:
            return
        least = self._constant(maximum.invars[1])
        if least is None or factor > 0.25 or least * factor < _SMALLEST:
            return
        if _is_single(eqn):
            self._divisors.add(eqn.outvars[0])

    def _widened(self, eqn, x):
        dtypes = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
        if dtypes == (jnp.bfloat16, jnp.float32) and eqn.outvars[0].aval.shape:
            return self._instructions.to_float32(x)
        return None

    def _sign_extended(self, eqn, *_):
        """Of an int32 whose highest byte is one of a word, and all else 0."""
        converted, place = self._call(eqn.invars[0]), self._constant(eqn.invars[1])
        if converted is None or converted.primitive is not p.convert_element_type_p:
            return None
        field = self._other_operand(converted.invars[0], p.shift_left_p, 24)
        byte = None if field is None else self._given(field)
        if not isinstance(byte, Byte) or place not in (0, 8, 16, 24):
            return None
        return self._instructions.signed_byte(
            byte.word, byte.number, 3 - int(place) // 8
        )

    def _masked(self, eqn, *_):
        byte, mask = self._given(eqn.invars[0]), self._constant(eqn.invars[1])
        if not isinstance(byte, Byte) or not isinstance(mask, int) or mask > 255:
            return None
        # One mask for the four bytes of a word.
        return Byte(byte.word & jnp.uint32(mask * 0x01010101), byte.number)

    def _below(self, eqn, *_):
        """A byte below three bytes of a constant."""
        byte, above = self._given(eqn.invars[0]), self._constant(eqn.invars[1])
        if not isinstance(byte, Byte) or not isinstance(above, int) or above & 255:
            return None
        return self._instructions.byte_below(byte.word, byte.number, above)

    def _moved(self, eqn, *_):
        byte, shift = self._given(eqn.invars[0]), self._constant(eqn.invars[1])
        if not isinstance(byte, Byte) or not isinstance(shift, int):
            return None
        if not 0 < shift < 24:
            return None
        place, rest = divmod(shift, 8)
        placed = self._instructions.placed_byte(byte.word, byte.number, place)
        return placed << jnp.uint32(rest) if rest else placed

    def _after_permutation(self, eqn, *_):
        """Of words whose bytes were permuted and are shifted down."""
        call, shift = self._call(eqn.invars[0]), self._constant(eqn.invars[1])
        order = None if call is None else PERMUTATIONS.get(operation_of(call))
        if call is None or order is None or shift not in (8, 16, 24):
            return None
        word = self.value(call.invars[0])
        return self._instructions.permuted(order, word, int(shift) // 8)

    def _given(self, atom):
        return atom.val if isinstance(atom, core.Literal) else self._known[atom]

    def _call(self, atom):
        return None if isinstance(atom, core.Literal) else self._calls.get(atom)

    def _other_operand(self, atom, primitive, constant):
        """What the primitive combines with this constant, or None."""
        eqn = self._call(atom)
        if eqn is None or eqn.primitive is not primitive:
            return None
        return eqn.invars[0] if self._constant(eqn.invars[1]) == constant else None

    def _before_broadcast(self, atom) -> typing.Any:
        """What is broadcast to an array, or the atom itself."""
        eqn = self._call(atom)
        if eqn is not None and eqn.primitive is p.broadcast_in_dim_p:
            return eqn.invars[0]
        return atom

    def _constant(self, atom) -> int | float | None:
        atom = self._before_broadcast(atom)
        if not isinstance(atom, core.Literal) or np.shape(atom.val):
            return None
        return np.asarray(atom.val).item()


_RULES: Mapping[operations.Operation | core.Primitive, Callable] = {
    p.sqrt_p: _Evaluation._root,
    p.rsqrt_p: _Evaluation._inverse_root,
    p.div_p: _Evaluation._quotient,
    p.add_p: _Evaluation._sum,
    p.add_jaxvals_p: _Evaluation._sum,
    p.mul_p: _Evaluation._product,
    p.convert_element_type_p: _Evaluation._widened,
    p.shift_right_arithmetic_p: _Evaluation._sign_extended,
    p.and_p: _Evaluation._masked,
    p.or_p: _Evaluation._below,
    p.shift_left_p: _Evaluation._moved,
    p.shift_right_logical_p: _Evaluation._after_permutation,
}


def _is_single(eqn) -> bool:
    """Whether an equation is of arrays of float32."""
    is_float32 = all(atom.aval.dtype == jnp.float32 for atom in eqn.invars)
    return bool(eqn.outvars[0].aval.shape) and is_float32


def _is_byte(x) -> bool:
    return isinstance(x, Byte)
