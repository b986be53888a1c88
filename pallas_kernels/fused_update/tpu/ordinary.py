"""Shorter rules for blocks of ordinary numbers, and checks that there are no others.

What a body does about NaNs, infinities and numbers past its codes' limits is an eighth
of its operations, and hardly any block has such numbers. By the rules here there are
none. :class:`Checks` finds out whether there are, for all elements of a register
together; a block that has any is computed once more by all the rules.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from pallas_kernels import operations
from pallas_kernels.fused_update.tpu.division import quotient, reciprocal
from pallas_kernels.fused_update.tpu.rules import applied, number_of
from pallas_kernels.fused_update.tpu.tiling import REGISTER
from pallas_kernels.fused_update.tpu.values import (
    Constant,
    Field,
    Key,
    Unlike,
    whole,
)

_MOST_EXPONENT = 100
"""Numbers of 2^100 are not ordinary: codes may treat those near infinity like it."""


class Checks:
    """Which elements of a unit's registers have numbers that are not ordinary.

    A sum is NaN or infinite if a term is, and a term is NaN if what it is computed from
    is. So few of the numbers that are checked cost an operation.
    """

    def __init__(self):
        self._terms: dict[int, tuple[jax.Array, jax.Array | None]] = {}
        # By the identity of an array, it and the terms of whose NaNs it has one too.
        self._covered: dict[int, tuple[jax.Array, frozenset[int]]] = {}
        self._words: dict[int, tuple[jax.Array, set[tuple[int, int]]]] = {}
        self._exists: jax.Array | None = None

    def at(self, exists: jax.Array | None) -> None:
        """Say which elements there are of what is checked from now on."""
        self._exists = exists

    def finite(self, x: jax.Array) -> None:
        """Check that float32s are finite."""
        for covered in self._covered_by(x):
            self._terms.pop(covered, None)
        self._terms[id(x)] = x, self._exists
        self._covered[id(x)] = x, self._covered_by(x) | {id(x)}

    def below(self, x: jax.Array, limit: float) -> None:
        """Check that float32s that are not negative are below a power of two."""
        self.finite(x * jnp.float32(2.0**127 / limit * 2))

    def is_nan_with(self, result: jax.Array, inputs: Sequence) -> None:
        """Note that a result is NaN where one of the inputs is."""
        terms = frozenset().union(*map(self._covered_by, inputs))
        if terms:
            self._covered[id(result)] = result, terms

    def no_last_field(self, field: Field) -> None:
        """Check that a field of a word has not all bits set."""
        _, places = self._words.setdefault(id(field.word), (field.word, set()))
        places.add((field.shift, field.width))

    def _covered_by(self, x) -> frozenset[int]:
        return self._covered.get(id(x), (x, frozenset()))[1]

    def found(self, exists: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """A float32 that is finite, and a uint32 that is 0, where all are ordinary.

        Args:
          exists: which groups of rows there are; None if all are.
        """
        terms = [
            x if here is None else jnp.where(here, x, jnp.float32(0))
            for x, here in self._terms.values()
        ]
        total = sum(terms[1:], terms[0]) if terms else jnp.zeros(REGISTER, jnp.float32)
        bits = jnp.zeros(REGISTER, jnp.uint32)
        for word, places in self._words.values():
            ones = sum(1 << shift for shift, _ in places)
            uppermost = sum(1 << shift + width - 1 for shift, width in places)
            # Adding one to each field clears the upper bit of those that overflow.
            cleared = jnp.uint32(2**32 - 1 - ones) - word
            bits |= word & cleared & jnp.uint32(uppermost)
        if exists is not None:
            bits = jnp.where(exists, bits, jnp.uint32(0))
        return total, bits


def rules_for_ordinary(rules: Mapping, checks: Checks) -> Mapping:
    """The rules for ordinary numbers.

    Args:
      rules: for all numbers.
      checks: it notes what makes the numbers ordinary.
    """

    def is_nan(eqn, x, y):
        if x is not y or eqn.invars[0].aval.dtype != jnp.float32 or not jnp.shape(x):
            return field_differs(eqn, x, y)
        checks.finite(x)
        return Constant(False, jnp.shape(x))

    def is_nowhere(field, number) -> bool:
        if number is None:
            return False
        if isinstance(field, Unlike):
            return field.number == number
        is_field = isinstance(field, Field) and not field.place
        if not is_field or number != (1 << field.width) - 1:
            return False
        checks.no_last_field(field)
        return True

    def field_equals(eqn, x, y, result=False):
        if not is_nowhere(x, number_of(y)):
            return NotImplemented
        return Constant(result, eqn.outvars[0].aval.shape)

    def field_differs(eqn, x, y):
        return field_equals(eqn, x, y, True)

    def is_last_field(field, last, pattern, of_last):
        if not is_nowhere(field, number_of(last)):
            return NotImplemented
        return Constant(False, pattern.shape)

    def unless_infinite(x, field, last):
        del x  # its key is checked
        number = number_of(last)
        return field if number is None else Unlike(whole(field), number)

    def select(eqn, which, *cases):
        if isinstance(which, Constant):
            return cases[which.number]
        return applied(rules, eqn, which, *cases)

    def arithmetic(eqn, *inputs):
        result = applied(rules, eqn, *inputs)
        checks.is_nan_with(result, inputs)
        return result

    def quotient_of(eqn, x, y):
        # The quotient of a constant may be of no use, and a check would need it.
        if p.div_p not in rules or number_of(x) is not None or not jnp.shape(x):
            return applied(rules, eqn, x, y)
        result = quotient(x, y, reciprocal(y, approx=True), is_ordinary=True)
        checks.finite(result)
        return result

    def magnitude_key(pattern, above):
        number = number_of(above)
        return NotImplemented if number is None else Key(_as_float(pattern), number)

    def magnitude_of_key(key, above):
        del above
        return key.number if isinstance(key, Key) else NotImplemented

    def pattern_above(x, base, most):
        del most
        base = whole(base)
        above = jnp.maximum(x, _as_float(base))
        return lax.bitcast_convert_type(above, jnp.int32) - base

    def capped_pattern(pattern, most):
        capped = jnp.minimum(_as_float(pattern), _as_float(most))
        return lax.bitcast_convert_type(capped, jnp.int32)

    named = (
        unless_infinite,
        magnitude_key,
        magnitude_of_key,
        pattern_above,
        capped_pattern,
        is_last_field,
    )
    return {
        **rules,
        **dict.fromkeys((p.add_p, p.sub_p, p.mul_p, p.neg_p), arithmetic),
        p.div_p: quotient_of,
        p.ne_p: is_nan,
        p.eq_p: field_equals,
        p.select_n_p: select,
        **{operations.PREFIX + rule.__name__: rule for rule in named},
    }


def limit_of(key: Key) -> float:
    """The power of two that the numbers of ordinary keys are below."""
    exponent = (2**31 - key.above >> 23) - 127
    return 2.0 ** min(exponent, _MOST_EXPONENT)


def _as_float(x) -> jax.Array:
    return lax.bitcast_convert_type(whole(x), jnp.float32)
