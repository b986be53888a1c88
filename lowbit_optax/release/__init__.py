"""Gradient release: the optimizer's step inside the backward pass.

api             trace, plan, step
traced_loss     the loss as a list of calls, and where each parameter is in it
plan            when each parameter is updated, and why
stretches       the loss, divided into scans and other calls
parts           what the optimizer can update by itself, leaves or layers
step_graph      the graph of its step, which tells what is updated alike
released_step   forward, a pass that measures gradients if need be, updates
reverse         the loss, gone back through stretch by stretch
scans           a scan whose backward loop hands on each layer's gradients
updates         the steps that are taken in a backward pass
ordering        barriers that make the compiler keep the order
host_memory     copies of a layer's state to the device and back
"""

from lowbit_optax.release.api import explain, host_shardings, value_and_update

__all__ = ["explain", "host_shardings", "value_and_update"]
