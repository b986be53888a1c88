"""Gradient release: the optimizer's step inside the backward pass.

    api ---------------> value_and_update: trace, plan, released_step
      traced_loss -----> the loss as a list of calls, and where each parameter is in it
      plan ------------> when each parameter is updated, and why
        scans ---------> those over parameters
        layer_analysis -> whether an update treats layers alike, from two step_graphs
        stretches -----> the other calls, divided where parameters can be updated
        parts ---------> leaves that the optimizer can update without the others
      released_step ---> forward, a pass that measures gradients if need be, updates
      reverse ---------> the loss, gone back through stretch by stretch
        residuals -----> what a stretch keeps from the forward pass (kept_values)
        backward ------> a scan whose backward loop hands on each layer's gradients
          layer_order -> a layer's last cotangent, and then its gradient
        ordering ------> the barrier that makes the compiler keep the order
      passes ----------> what is done with gradients: updates, or measures
        gates ---------> which updates happen under a loss scale
        measures ------> norms and overflows
      host_memory ---> copies of a layer's state to the device and back
    placement -------> host_shardings: the state in host memory before the first step
        consumers -----> the same for one layer in a loop

References:
  Lewandowski, Kosson 2023, section 3.2.
"""

from lowbit_optax.release.api import explain, value_and_update
from lowbit_optax.release.placement import host_shardings

__all__ = ["explain", "host_shardings", "value_and_update"]
