"""The transformation that is around an optax one, and two that go beside it."""

from lowbit_optax.transformations.direct import DirectUpdate
from lowbit_optax.transformations.regularization import regularize

__all__ = ["DirectUpdate", "regularize"]
