"""Gradient release: optimizer updates inside the backward pass.

wrappers        two custom_vjp wrappers that update in the backward pass
float_state     stores integers as floats, which JAX can differentiate
api             value_and_update: trace, plan, step
traced_loss     the loss as a list of calls, and the place of each parameter in it
plan            when each parameter is updated, and why
parts           leaves and layers that the optimizer can update separately
step_values     the values of a step, to find out whether two steps are equal
evaluation      runs the loss with the wrappers in it
released_step   the forward pass, an optional pass that measures gradients, updates
host_memory     copies the state of a layer to the device and back
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
