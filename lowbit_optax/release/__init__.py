"""Gradient release: optimizer updates inside the backward pass.

by_hand         steps for losses that open their layers themselves
wrappers        custom_vjp functions and scans that run updates in the backward pass
api             value_and_update, which traces a loss, plans updates, and runs steps
traced_loss     the traced loss, and the values in it that belong to each parameter
plan            when each parameter is updated, and why
parts           leaves and layers that the optimizer can update separately
released_step   runs the loss with the wrappers in it: measurements and updates
"""

from lowbit_optax.release.api import explain, host_shardings, value_and_update
from lowbit_optax.release.by_hand import released, scan, value_and_update_layers

__all__ = [
    "explain",
    "host_shardings",
    "released",
    "scan",
    "value_and_update",
    "value_and_update_layers",
]
