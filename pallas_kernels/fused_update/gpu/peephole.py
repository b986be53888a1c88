"""Peephole rules, which shorten the code for groups of operations in an update's body.

**Square roots and quotients.** Triton needs four instructions for a float32
square root and eight for a quotient, because both also work near the ends of float32's
range. Three kinds of divisors are known to be far from these ends, and need no scaling:

- The square root of a normal number, which is between 2^-63 and 2^64.
- The sum of such a root and a scalar or another root.
- The product of a factor of at most 1/4 and ``maximum(x, c)``, if the constant ``c``
  is not too small.

Results are as precise as Triton's (2 units in the last place), except that the root of
a subnormal number is 0, and its reciprocal is infinite.

**Bytes.** A result that is a byte of some word, such as ``word >> 24``, is returned as
a :class:`.instructions.Byte` if nothing else in the body reads it. A kernel then puts
four results into a word with byte permutations, without shifting and masking each.

If no peephole rule applies to an operation, the launcher's rule is used, if it has one
(:class:`pallas_kernels.fused_update.gpu.instructions.Instructions`).
"""

import functools
import typing
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives as p

from pallas_kernels.fused_update.gpu.instructions import Byte, Instructions
from pallas_kernels.fused_update.spec import BlockBody, Body
from pallas_kernels.operations import ClosedJaxpr, Values, operation_of

_SMALLEST = 2.0**-126  # float32's smallest normal number


def with_peephole_rules(
    function: Callable,
    instructions: Instructions | None,
    of_8_bits: Collection[int] = (),
) -> Callable:
    """Apply the rules of this module and of a launcher to an elementwise function.

    Args:
      function: maps trees of arrays to a tree of arrays.
      instructions: the launcher's instructions; None if XLA runs the operations.
      of_8_bits: indices of the results that are below 256, which may become bytes.
    """
    if instructions is None:
        return function
    traced = {}

    def run(*args):
        flat, structure = jax.tree.flatten(args)
        key = structure, tuple(map(jax.typeof, flat))
        if key not in traced:
            traced[key] = jax.make_jaxpr(
                lambda *flat: function(*structure.unflatten(flat)), return_shape=True
            )(*flat)
        closed, shapes = traced[key]
        evaluation, jaxpr = _Evaluation(instructions), closed.jaxpr
        results = evaluation.run(closed, flat)
        read = {x for eqn in jaxpr.eqns for x in eqn.invars if isinstance(x, core.Var)}
        for number in of_8_bits:
            if jaxpr.outvars[number] not in read:
                results[number] = evaluation.byte(results[number])
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


@functools.lru_cache(maxsize=256)
def with_instructions(
    body: Body | BlockBody,
    method: typing.Literal["__call__", "statistics"],
    instructions: Instructions | None,
    of_8_bits: Collection[int] = (),
) -> Callable:
    """Return a method of an update's body, transformed by :func:`with_peephole_rules`.

    The result is jitted, so JAX traces it once for all rows, and for all kernels with
    equal bodies.
    """
    # The ``__call__`` of a plain function cannot be jitted, but the function can.
    function = body if method == "__call__" else getattr(body, method)
    return jax.jit(with_peephole_rules(function, instructions, of_8_bits))


class _Evaluation:
    """Evaluates the equations of a jaxpr, and of the jaxprs that it calls."""

    def __init__(self, instructions: Instructions):
        self._instructions = instructions
        # The equation of each variable, and by id, the divisors that need no scaling.
        self._equations, self._divisors = {}, {}
        # The word and the number of the lowest byte of its shifted values, by id.
        self._bytes: dict[int, tuple[typing.Any, Byte]] = {}

    def run(self, closed: ClosedJaxpr, args: Sequence) -> list:
        values = Values(closed, args)
        for eqn in closed.jaxpr.eqns:
            values.set(eqn.outvars, self._results(eqn, values.of(eqn.invars)))
        return values.of(closed.jaxpr.outvars)

    def _results(self, eqn, inputs: list) -> list:
        self._equations |= dict.fromkeys(eqn.outvars, eqn)
        peephole = _RULES.get(eqn.primitive)
        found = None if peephole is None else peephole(self, eqn, *inputs)
        return self._by_launcher(eqn, inputs) if found is None else [found]

    def _by_launcher(self, eqn, inputs: list) -> list:
        operation = operation_of(eqn)
        rule = self._instructions.rules.get(operation)
        if isinstance(operation, core.Primitive):
            if rule is not None:
                return [rule(*inputs, **eqn.params)]
        elif rule is not None and eqn.outvars[0].aval.shape:
            return [rule(*inputs)]
        if eqn.primitive is p.jit_p:
            return self.run(eqn.params["jaxpr"], inputs)
        params = eqn.primitive.get_bind_params(eqn.params)
        results = eqn.primitive.bind(*inputs, **params)
        return results if eqn.primitive.multiple_results else [results]

    def byte(self, x) -> Byte:
        """Return the lowest byte of ``x``, as a byte of the word that was shifted."""
        _, byte = self._bytes.get(id(x), (x, Byte(x, 0)))
        return byte

    def _with_byte(self, eqn, inputs: list, byte: Byte):
        """Return the equation's result, and record what its lowest byte is."""
        (x,) = self._by_launcher(eqn, inputs)
        self._bytes[id(x)] = x, byte  # with x, so that no other value gets this id
        return x

    def _shift(self, eqn, x, places):
        bits = self._constant(eqn.invars[1])
        if bits not in (8, 16, 24):
            return None
        return self._with_byte(eqn, [x, places], Byte(x, bits // 8))

    def _mask(self, eqn, x, mask):
        if self._constant(eqn.invars[1]) != 255:
            return None
        return self._with_byte(eqn, [x, mask], self.byte(x))

    def _as_divisor(self, x):
        """Record that divisions by ``x`` need no scaling."""
        self._divisors[id(x)] = x  # so that no other value gets this id
        return x

    def _is_divisor(self, x) -> bool:
        return id(x) in self._divisors

    def _approximate(self, function: str, x: jax.Array) -> jax.Array:
        instruction = f"{function}.approx.ftz.f32 $0, $1;"
        return self._instructions.assemble(instruction, [x], jnp.float32)

    def _root(self, eqn, x):
        if not _is_single(eqn):
            return None
        return self._as_divisor(self._approximate("sqrt", x))

    def _inverse_root(self, eqn, x):
        return self._approximate("rsqrt", x) if _is_single(eqn) else None

    def _quotient(self, eqn, x, y):
        if not _is_single(eqn) or not self._is_divisor(y):
            return None
        return x * self._approximate("rcp", y)

    def _sum(self, eqn, *inputs):
        """Record that a divisor plus a scalar or another divisor is a divisor."""
        divisors = [self._is_divisor(x) for x in inputs]
        numbers = [not self._before_broadcast(x).aval.shape for x in eqn.invars]
        is_moderate = all(map(any, zip(divisors, numbers, strict=True)))
        if not (_is_single(eqn) and any(divisors) and is_moderate):
            return None
        return self._as_divisor(*self._by_launcher(eqn, [*inputs]))

    def _product(self, eqn, *inputs):
        """Record that a factor times a maximum with a constant is a divisor."""
        maximum, factor = self._call(eqn.invars[0]), self._constant(eqn.invars[1])
        if maximum is None or maximum.primitive is not p.max_p or factor is None:
            return None
        least = self._constant(maximum.invars[1])
        if least is None or factor > 0.25 or least * factor < _SMALLEST:
            return None
        if not _is_single(eqn):
            return None
        return self._as_divisor(*self._by_launcher(eqn, [*inputs]))

    def _widened(self, eqn, x):
        dtypes = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
        if dtypes == (jnp.bfloat16, jnp.float32) and eqn.outvars[0].aval.shape:
            return self._instructions.to_float32(x)
        return None

    def _call(self, atom):
        return None if isinstance(atom, core.Literal) else self._equations.get(atom)

    def _before_broadcast(self, atom) -> typing.Any:
        """Return the operand if the atom is the result of a broadcast, or the atom."""
        eqn = self._call(atom)
        if eqn is not None and eqn.primitive is p.broadcast_in_dim_p:
            return eqn.invars[0]
        return atom

    def _constant(self, atom) -> int | float | None:
        atom = self._before_broadcast(atom)
        if not isinstance(atom, core.Literal) or np.shape(atom.val):
            return None
        return np.asarray(atom.val).item()


_RULES: Mapping[core.Primitive, Callable] = {
    p.sqrt_p: _Evaluation._root,
    p.rsqrt_p: _Evaluation._inverse_root,
    p.div_p: _Evaluation._quotient,
    p.add_p: _Evaluation._sum,
    p.add_jaxvals_p: _Evaluation._sum,
    p.mul_p: _Evaluation._product,
    p.convert_element_type_p: _Evaluation._widened,
    p.shift_right_logical_p: _Evaluation._shift,
    p.and_p: _Evaluation._mask,
}


def _is_single(eqn) -> bool:
    """Return whether all inputs are float32 and the output is not a scalar."""
    is_float32 = all(atom.aval.dtype == jnp.float32 for atom in eqn.invars)
    return bool(eqn.outvars[0].aval.shape) and is_float32
