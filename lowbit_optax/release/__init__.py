"""Gradient release: the optimizer's step inside the backward pass.

    value_and_update ---> traces the loss once, finds the scans over parameters
      traced ---------> the loss as a list of steps; which parameter goes where
      layerwise ------> which updates can run layer by layer; refuses what cannot
      backward -------> a scan whose backward loop updates each layer in place

References:
  Lewandowski, Kosson 2023, section 3.2.
"""

from lowbit_optax.release.api import explain, value_and_update
from lowbit_optax.release.scan import scan

__all__ = ["explain", "scan", "value_and_update"]
