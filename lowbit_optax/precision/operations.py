"""Classify operations for precision assignments."""

import itertools
import typing
from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from lowbit_optax._jaxprs.graph import (
    Call,
    as_closed_jaxpr,
    called_jaxpr,
    holds,
    is_by_platform,
)
from lowbit_optax._jaxprs.program import LossProgram, ScanCall

_PRODUCTS = ("conv_general_dilated", "dot_general", "ragged_dot_general")
# fmt: off
_STORED = (
    "cholesky", "cond", "fft", "reduce_window_max", "reduce_window_min", "scan", "sort",
    "top_k", "triangular_solve", "while",
)
_MOVES = (
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "dynamic_slice",
    "expand_dims", "name", "pad", "reshape", "rev", "sharding_constraint", "slice",
    "split", "squeeze", "transpose",
)
# Each of these counts as one operator of a network, without tensors inside.
_OPERATORS = (
    "custom_jvp_call", "custom_linear_solve", "custom_vjp_call", "pallas_call",
)
# fmt: on


def is_product(call: Call) -> bool:
    """Return whether a call is a matrix product, or an operator that contains one."""
    return _is_product(call) or holds(call.params, _is_product)


def is_stored(call: Call) -> bool:
    """Return whether compilers store the results instead of fusing the operation."""
    return call.primitive.name in _STORED


def is_move(call: Call) -> bool:
    """Return whether results consist of elements of the first operand and zeros."""
    return call.primitive.name in _MOVES and is_float(call.outputs[0].aval)


class Bodies(typing.NamedTuple):
    """The functions that a call runs on its operands.

    Args:
      programs: the program of a scan, loop or checkpoint, or of each branch.
      first: the number of leading operands that are not passed to the programs.
      constants: the number of inputs that all runs of a program share.
      carry: the number of inputs after the constants that come from the previous run.
      runs: the number of runs, or 1 for a while loop, whose number of runs is unknown.
    """

    programs: tuple[LossProgram, ...]
    first: int
    constants: int
    carry: int
    runs: int

    def parts_of(self, operands: Sequence) -> tuple[Sequence, ...]:
        """Split operands into first operands, constants, carries and scanned arrays."""
        sizes = self.first, self.constants, self.carry
        ends = [0, *itertools.accumulate(sizes), len(operands)]
        return tuple(operands[a:b] for a, b in itertools.pairwise(ends))


def bodies_of(call: Call) -> Bodies | None:
    """Return the bodies of a checkpoint, scan, conditional or loop over arrays.

    The result is None for all other calls, for conditionals that depend on the
    platform, and for loops with a matrix product in the condition, because conditions
    are not rounded.
    """
    params, inputs = call.params, len(call.inputs)
    first, constants, carry, runs = 0, inputs, 0, 1
    if isinstance(call, ScanCall):
        jaxprs, runs = [call.body], params["length"]
        constants, carry = call.constants, call.carry
    elif call.primitive is primitives.remat_p:
        jaxprs = [called_jaxpr(params)]
    elif call.primitive is primitives.cond_p:
        if is_by_platform(call.primitive, params):
            return None
        jaxprs, first = params["branches"], 1
    elif call.primitive is primitives.while_p and hides_tensors(call):
        if holds({"jaxpr": params["cond_jaxpr"]}, _is_product):
            return None
        jaxprs, first = [params["body_jaxpr"]], params["cond_nconsts"]
        constants, carry = params["body_nconsts"], len(call.outputs)
    else:
        return None
    programs = (LossProgram(as_closed_jaxpr(x), inline_all=True) for x in jaxprs)
    return Bodies(tuple(programs), first, constants, carry, runs)


def hides_tensors(call: Call) -> bool:
    """Return whether a call computes arrays in a body, and is not an operator."""

    def makes_arrays(eqn) -> bool:
        avals = [var.aval for var in eqn.outvars if hasattr(var.aval, "dtype")]
        return any(is_float(aval) and aval.shape != () for aval in avals)

    return call.primitive.name not in _OPERATORS and holds(call.params, makes_arrays)


def function_name(call: Call) -> str:
    """Return the name of the operation, or of its function with a derivative rule."""
    name = call.primitive.name
    if name not in ("custom_jvp_call", "custom_vjp_call"):
        return name
    jaxpr = call.params.get("call_jaxpr")
    info = jaxpr and as_closed_jaxpr(jaxpr).jaxpr.debug_info
    return info.func_name.rpartition(".")[2] if info else name


def is_float(aval) -> bool:
    """Return whether a value has a floating-point dtype."""
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _is_product(operation: Call | core.JaxprEqn) -> bool:
    return operation.primitive.name in _PRODUCTS
