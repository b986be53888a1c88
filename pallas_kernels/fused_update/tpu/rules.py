"""Bodies of updates in the operations that TPU kernels have: those of 32 bits.

A TPU's vector registers hold 32-bit elements, and arithmetic on others is missing or
slow. So a body's jaxpr is evaluated with its values of 8 and 16 bits in the upper bits
of 32-bit words, where bfloat16s are the patterns of float32 already. Widening one is
then free, and so are the shifts by 16 around it.

What depends on scalars only, such as random keys, is computed once per program of the
kernel. What two functions of the same values both compute is computed once for both.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as p

from pallas_kernels import operations
from pallas_kernels.fused_update.tpu.quotients import rules_of
from pallas_kernels.fused_update.tpu.values import (
    Field,
    Lazy,
    Narrow,
    ReversedBytes,
    SignedField,
    Sum,
    whole,
)
from pallas_kernels.jaxprs import ClosedJaxpr

_UNSIGNED = (jnp.dtype(jnp.uint8), jnp.dtype(jnp.uint16))
_FLOATS = tuple(
    jnp.dtype(t)
    for t in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
)
_NARROW = (*_FLOATS, *_UNSIGNED)
_PLAIN = (jnp.dtype(t) for t in (jnp.float32, jnp.int32, jnp.uint32, jnp.bool_))
DTYPES = frozenset((*_PLAIN, *_NARROW))
"""The dtypes of values that kernels take."""

_ADDITIONS = (p.add_p, p.add_jaxvals_p)
_PRIMITIVES = frozenset(
    (
        *_ADDITIONS, p.sub_p, p.mul_p, p.div_p, p.neg_p, p.abs_p, p.sign_p, p.square_p,
        p.max_p, p.min_p, p.clamp_p, p.sqrt_p, p.rsqrt_p, p.exp_p, p.log_p, p.tanh_p,
        p.logistic_p, p.integer_pow_p, p.and_p, p.or_p, p.xor_p, p.not_p,
        p.shift_left_p, p.shift_right_logical_p, p.shift_right_arithmetic_p,
        p.eq_p, p.ne_p, p.lt_p, p.le_p, p.gt_p, p.ge_p, p.select_n_p, p.is_finite_p,
        p.bitcast_convert_type_p, p.convert_element_type_p, p.broadcast_in_dim_p,
        p.jit_p, p.stop_gradient_p, p.copy_p,
    )
)  # fmt: skip


Hoisted = dict[tuple[int, ...], list]
"""Results of equations of scalars, by the equations' numbers."""


class Function:
    """A function of arrays, to be evaluated in operations of 32 bits.

    Args:
      function: from trees of arrays to one.
      *like: its arguments' ShapeDtypeStructs.
    """

    def __init__(self, function: Callable, *like):
        flat, structure = jax.tree.flatten(like)
        self._closed, shapes = jax.make_jaxpr(
            lambda *flat: function(*structure.unflatten(flat)), return_shape=True
        )(*flat)
        self._structure = jax.tree.structure(shapes)
        self.shapes = shapes

    @property
    def is_supported(self) -> bool:
        """Whether kernels have every operation of it, for its dtypes."""
        return all(map(_is_supported, _equations(self._closed.jaxpr)))

    def of_scalars(self, scalars: Sequence[jax.Array]) -> "Hoisted":
        """What depends on scalars only.

        Args:
          scalars: all arguments that are scalars, in their order.
        """
        left = list(scalars)
        avals: list[typing.Any] = [x.aval for x in self._closed.jaxpr.invars]
        args = [None if aval.shape else left.pop(0) for aval in avals]
        found: Hoisted = {}
        _Evaluation(found, True, {}).run(self._closed, args, ())
        return found

    def __call__(
        self,
        *args,
        known: dict,
        hoisted: "Hoisted | None" = None,
        generation: int | None = None,
    ):
        """The function's results: arrays, each :class:`Narrow`, or see :func:`whole`.

        Args:
          *args: its arguments.
          known: what other calls on the same values have computed; it is added to.
          hoisted: from :meth:`of_scalars`.
          generation: of the TPU, for its roots and quotients; None for JAX's.
        """
        flat = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, Narrow | Lazy))
        evaluation = _Evaluation(hoisted or {}, False, known, rules_of(generation))
        results = evaluation.run(self._closed, flat, ())
        return jax.tree.unflatten(self._structure, results)


class _Evaluation:
    """The evaluation of a jaxpr and those that it calls.

    Args:
      hoisted: results of equations of scalars, by their numbers.
      of_scalars: whether to find these; unknown arguments are then None.
      known: results of equations, by what they compute.
      rules: of a generation of TPUs, from :func:`rules_of`.
    """

    def __init__(
        self, hoisted: dict, of_scalars: bool, known: dict, rules: Mapping | None = None
    ):
        self._hoisted, self._of_scalars, self._known = hoisted, of_scalars, known
        self._rules = {**_RULES, **(rules or {})}

    def run(self, closed: ClosedJaxpr, args: Sequence, place: tuple) -> list:
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= zip(jaxpr.invars, args, strict=True)

        def read(atom):
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            inputs = [read(atom) for atom in eqn.invars]
            results = self._results(eqn, inputs, (*place, number))
            values |= zip(eqn.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, eqn, inputs: list, place: tuple[int, ...]) -> list:
        if place in self._hoisted:
            return self._hoisted[place]
        if eqn.primitive is p.jit_p:
            shorter = _OPERATIONS.get(eqn.params["name"])
            if shorter is not None and not self._of_scalars:
                return [shorter(*inputs)]
            return self.run(eqn.params["jaxpr"], inputs, place)
        if self._of_scalars:
            if any(x is None for x in inputs) or eqn.outvars[0].aval.shape:
                return [None] * len(eqn.outvars)
            self._hoisted[place] = [self._evaluated(eqn, inputs)]
            return self._hoisted[place]
        key = (
            eqn.primitive,
            tuple(sorted((name, str(value)) for name, value in eqn.params.items())),
            tuple(_identity(x) for x in inputs),
        )
        if key not in self._known:
            # The inputs are kept, so that no other array gets their identities.
            self._known[key] = self._evaluated(eqn, inputs), inputs
        return [self._known[key][0]]

    def _evaluated(self, eqn, inputs: list):
        """The result of an equation."""
        rule = self._rules.get(eqn.primitive)
        if rule is not None:
            result = rule(eqn, *inputs)
            if result is not NotImplemented:
                return result
        inputs = [whole(x) for x in inputs]
        params = eqn.primitive.get_bind_params(eqn.params)
        return eqn.primitive.bind(*inputs, **params)


def _identity(x):
    if isinstance(x, Narrow | Lazy):
        parts = dataclasses.fields(x)
        return type(x), *(_identity(getattr(x, part.name)) for part in parts)
    if isinstance(x, np.generic | np.ndarray | int | float | bool):
        array = np.asarray(x)
        return str(array.dtype), array.shape, array.tobytes()
    return id(x)


def _convert(eqn, x):
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if old == new:
        return x
    if isinstance(x, Narrow):
        if old in _FLOATS:
            return x.as_float32()
        return x.lowest() if new == jnp.uint32 else SignedField(x.lowest())
    if new in _UNSIGNED:
        width = 8 * new.itemsize
        if isinstance(x, Field) and x.is_upper(width):
            return Narrow(x.word, jnp.dtype(new))
        array = whole(x)
        if old == jnp.int32:
            array = lax.bitcast_convert_type(array, jnp.uint32)
        return Narrow(array << jnp.uint32(32 - width), jnp.dtype(new))
    return _reinterpreted(eqn, x, new)


def _reinterpreted(eqn, x, new):
    """An integer array as one of the other integers of 32 bits."""
    old = eqn.invars[0].aval.dtype
    if {old, new} != {jnp.dtype(jnp.int32), jnp.dtype(jnp.uint32)}:
        return NotImplemented
    if isinstance(x, Field):
        return SignedField(x)
    if isinstance(x, SignedField):
        return x.field
    if not eqn.outvars[0].aval.shape:
        return NotImplemented
    return lax.bitcast_convert_type(whole(x), new)


def _bitcast(eqn, x):
    if isinstance(x, Narrow):
        return Narrow(x.word, jnp.dtype(eqn.params["new_dtype"]))
    return _reinterpreted(eqn, x, eqn.params["new_dtype"])


def _shift_left(eqn, x, places):
    places = _number(places)
    if isinstance(x, Field) and places is not None and x.place + places < 32:
        return dataclasses.replace(x, place=x.place + places)
    aval = eqn.outvars[0].aval
    if isinstance(x, Lazy) or not aval.shape or aval.dtype != jnp.uint32:
        return NotImplemented
    if places is None or not 0 < places < 32:
        return NotImplemented
    return Field(x, 0, 32 - places, places)


def _shift_right(eqn, x, places):
    places, aval = _number(places), eqn.outvars[0].aval
    if not aval.shape or aval.dtype != jnp.uint32 or places is None:
        return NotImplemented
    if isinstance(x, ReversedBytes) and places == 8:
        return x.leading()
    if not isinstance(x, Field):
        return Field(whole(x), places, 32 - places) if 0 < places < 32 else x
    if x.place == 0 and places < x.width:
        return Field(x.word, x.shift + places, x.width - places)
    if 0 < places <= x.place and x.place + x.width == 32:
        return dataclasses.replace(x, place=x.place - places)
    return NotImplemented


def _shift_right_signed(eqn, x, places):
    places = _number(places)
    if isinstance(x, SignedField) and places is not None:
        extended = x.field.sign_extended(places)
        if extended is not None:
            return extended
    return NotImplemented


def _and(eqn, x, mask):
    mask, aval = _number(mask), eqn.outvars[0].aval
    if not aval.shape or aval.dtype != jnp.uint32 or not mask or mask & (mask + 1):
        return NotImplemented
    width = mask.bit_length()
    if not isinstance(x, Field):
        return Field(whole(x), 0, width)
    if x.place == 0:
        return Field(x.word, x.shift, min(x.width, width))
    return NotImplemented


def _add(eqn, x, y):
    if not isinstance(x, Sum) or isinstance(y, Lazy) or jnp.shape(y):
        return NotImplemented
    return dataclasses.replace(x, scalar=x.scalar + y)


def _sub(eqn, x, y):
    """The difference of two constants, by which a shift may be one."""
    x, y = _number(x), _number(y)
    if x is None or y is None or eqn.outvars[0].aval.dtype != jnp.uint32:
        return NotImplemented
    return np.uint32((x - y) % 2**32)


def _select(eqn, which, *cases):
    if not any(isinstance(x, Narrow) for x in cases):
        return NotImplemented
    words = [x.word for x in cases]
    return Narrow(lax.select_n(which, *words), cases[0].dtype)


def _broadcast(eqn, x):
    if isinstance(x, Narrow | Lazy) or eqn.invars[0].aval.shape:
        return x
    return NotImplemented


_RULES = {
    p.convert_element_type_p: _convert,
    p.bitcast_convert_type_p: _bitcast,
    p.shift_left_p: _shift_left,
    p.shift_right_logical_p: _shift_right,
    p.shift_right_arithmetic_p: _shift_right_signed,
    p.and_p: _and,
    p.add_p: _add,
    p.sub_p: _sub,
    p.add_jaxvals_p: _add,
    p.select_n_p: _select,
    p.broadcast_in_dim_p: _broadcast,
    p.copy_p: lambda eqn, x: x,
    p.stop_gradient_p: lambda eqn, x: x,
}


def _pattern_above(x, base, most) -> jax.Array:
    """See :func:`.operations.pattern_above`.

    Only floats have a maximum in one instruction. The comparison is false of NaN, and a
    negative zero that the maximum may leave has no bit but the sign, as ``base`` is 0.
    """
    base = whole(base)
    as_float = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
    last = as_float(base + most)
    x = jnp.maximum(jnp.where(x < last, x, last), as_float(base))
    return lax.bitcast_convert_type(x, jnp.int32) - base


_OPERATIONS = {
    operations.PREFIX + "reverse_bytes": lambda x: ReversedBytes(whole(x)),
    operations.PREFIX + "pattern_above": _pattern_above,
}

# What takes and gives values of 8 and 16 bits without arithmetic on them.
_OF_NARROW = (p.convert_element_type_p, p.bitcast_convert_type_p, p.select_n_p)


def _equations(jaxpr: core.Jaxpr) -> Iterable:
    for eqn in jaxpr.eqns:
        if eqn.primitive is p.jit_p:
            yield from _equations(eqn.params["jaxpr"].jaxpr)
        else:
            yield eqn


def _is_supported(eqn) -> bool:
    atoms = (*eqn.invars, *eqn.outvars)
    dtypes = {atom.aval.dtype for atom in atoms}
    if eqn.primitive not in _PRIMITIVES or not dtypes <= DTYPES:
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
    names = np.dtype(old).name, np.dtype(new).name
    return old == new or names in _CONVERSIONS


_INTEGERS = ("uint32", "int32")
_CONVERSIONS = {
    *((x.name, "float32") for x in _FLOATS),
    *((x.name, y) for x in _UNSIGNED for y in _INTEGERS),
    *((x, y.name) for x in _INTEGERS for y in _UNSIGNED),
}


def _number(x) -> int | None:
    """A constant's number; None for an array."""
    if isinstance(x, np.generic | int) and not isinstance(x, bool):
        return int(x)
    if isinstance(x, np.ndarray) and not x.shape:
        return int(x)
    return None
