"""Gradient release: the optimizer's step inside the backward pass.

api --------------> value_and_update: trace, plan, released_step; host_shardings
traced_loss ----> the loss as a list of calls, and where each parameter is in it
plan -----------> when each parameter is updated, and why
layer_analysis  whether an update treats layers alike, from two step_graphs
stretches ----> the loss, divided into scans and other calls
parts --------> leaves that the optimizer can update without the others
released_step --> forward, a pass that measures gradients if need be, updates
reverse --------> the loss, gone back through stretch by stretch
residuals ----> what a stretch keeps from the forward pass (kept_values)
backward -----> a scan whose backward loop hands on each layer's gradients
ordering -----> barriers that make the compiler keep the order
passes ---------> what is done with gradients: updates, or measures
gates --------> which updates happen under a loss scale
host_memory ----> copies of a layer's state to the device and back
"""

from lowbit_optax.release.api import explain, host_shardings, value_and_update

__all__ = ["explain", "host_shardings", "value_and_update"]
