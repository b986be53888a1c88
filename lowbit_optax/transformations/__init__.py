"""``lowbit`` and other optax transformations."""

from lowbit_optax.transformations.direct import DirectUpdate
from lowbit_optax.transformations.regularization import regularize

__all__ = ["DirectUpdate", "regularize"]
