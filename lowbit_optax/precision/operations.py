"""What operations are to precision assignments: products, moves, operators."""

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from lowbit_optax._jaxprs.graph import Call, as_closed_jaxpr, holds, is_by_platform

_PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})
_STORED = frozenset(
    {
        "cholesky",
        "cond",
        "fft",
        "reduce_window_max",
        "reduce_window_min",
        "scan",
        "sort",
        "top_k",
        "triangular_solve",
        "while",
    }
)
_MOVES = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "dynamic_slice",
        "expand_dims",
        "name",
        "pad",
        "reshape",
        "rev",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "transpose",
    }
)
# Each is one operator of a network, whatever it computes inside.
_OPERATORS = frozenset(
    {"custom_jvp_call", "custom_linear_solve", "custom_vjp_call", "pallas_call"}
)


def is_product(call: Call) -> bool:
    """Whether it is a matrix product, or one operator that holds some."""
    return _is_product(call) or holds(call.params, _is_product)


def is_stored(call: Call) -> bool:
    """Whether it is fused neither with what it reads nor with what reads it."""
    return call.primitive.name in _STORED


def is_move(call: Call) -> bool:
    """Whether its results hold elements of its (first) operand and zeros."""
    return call.primitive.name in _MOVES and is_float(call.outputs[0].aval)


def is_conditional(call: Call) -> bool:
    """Whether it is a conditional whose branches can be looked into."""
    is_cond = call.primitive is primitives.cond_p
    return is_cond and not is_by_platform(call.primitive, call.params)


def is_loop(call: Call) -> bool:
    """Whether it is a while loop over arrays whose body can be looked into.

    What decides whether it goes on is not rounded, so it must be no matrix product.
    """
    if call.primitive is not primitives.while_p or not hides_tensors(call):
        return False
    condition = {"jaxpr": call.params["cond_jaxpr"]}
    return not holds(condition, _is_product)


def hides_tensors(call: Call) -> bool:
    """Whether arrays inside of it escape assignments, unlike those of an operator."""

    def makes_arrays(eqn) -> bool:
        avals = [var.aval for var in eqn.outvars if hasattr(var.aval, "dtype")]
        return any(is_float(aval) and aval.shape != () for aval in avals)

    return call.primitive.name not in _OPERATORS and holds(call.params, makes_arrays)


def function_name(call: Call) -> str:
    """The name of the operation, or of the function with a derivative rule."""
    name = call.primitive.name
    if name not in ("custom_jvp_call", "custom_vjp_call"):
        return name
    jaxpr = call.params.get("call_jaxpr")
    info = jaxpr and as_closed_jaxpr(jaxpr).jaxpr.debug_info
    return info.func_name.rpartition(".")[2] if info else name


def is_float(aval) -> bool:
    """Whether a value has a floating-point dtype."""
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _is_product(operation: Call | core.JaxprEqn) -> bool:
    return operation.primitive.name in _PRODUCTS
