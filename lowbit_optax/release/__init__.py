"""Gradient release: the optimizer's step inside the backward pass.

    api ---------------> value_and_update: trace, plan, differentiate, update
      traced_loss -----> the loss as a list of steps, and where each parameter is in it
      plan ------------> which parameters are updated inside the loop of which scan
        layer_analysis -> whether an update treats layers alike, from two step_graphs
      backward --------> a scan whose backward loop hands on each layer's gradients
        consumers -----> who update that layer in place (or add up its squares)

References:
  Lewandowski, Kosson 2023, section 3.2.
"""

from lowbit_optax.release.api import explain, value_and_update
from lowbit_optax.release.scan import scan

__all__ = ["explain", "scan", "value_and_update"]
