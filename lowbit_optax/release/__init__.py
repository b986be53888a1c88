"""Gradient release: the optimizer's step inside the backward pass.

wrappers        the two custom_vjp wrappers that update in the backward pass
float_state     integers as floats, which JAX can differentiate
api             value_and_update: trace, plan, step
traced_loss     the loss as a list of calls, and where each parameter is in it
plan            when each parameter is updated, and why
parts           what the optimizer can update by itself, leaves or layers
step_values     the values of its step, which tell what is updated alike
evaluation      the loss with the wrappers in it
released_step   forward, a pass that measures gradients if need be, updates
host_memory     copies of a layer's state to the device and back
"""

from lowbit_optax.release.api import explain, host_shardings, value_and_update
from lowbit_optax.release.float_state import as_floats, as_state
from lowbit_optax.release.wrappers import released, scan

__all__ = [
    "as_floats",
    "as_state",
    "explain",
    "host_shardings",
    "released",
    "scan",
    "value_and_update",
]
