"""Convert equations of JAX's new autodiff to the primitives of the current one."""

from jax.extend import core
from jax.extend.core import primitives as p

AS_BOUND = "as_bound"
"""Name of the parameter that stores the original primitive and its parameters."""

_COMING = {
    "CheckpointName": p.name_p,
    "CustomJVPTraced": p.custom_jvp_call_p,
    "CustomVJPTraced": p.custom_vjp_call_p,
    "RematTraced": p.remat_p,
}


def in_todays_terms(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Convert an equation of JAX's new autodiff to the primitive that it replaces.

    With ``jax_remat3``, ``jax_custom_vjp3`` and ``jax_custom_jvp3``, JAX represents
    checkpoints, names and functions with derivative rules as objects, and one primitive
    applies all of them. :func:`.graph.bind` still runs this original primitive.
    """
    applied = eqn.params.get("_prim")
    primitive = _COMING.get(type(applied).__name__)
    if applied is None or primitive is None:
        return eqn
    params = applied.params | {AS_BOUND: (eqn.primitive, eqn.params)}
    if "traced" in params:
        params["call_jaxpr"] = params["traced"].jaxpr
    return eqn.replace(primitive=primitive, params=params)
