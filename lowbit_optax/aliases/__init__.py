"""Aliases: well-known optimizers in each weight format.

Each alias has the arguments of its optax alias in the same order, followed by
keyword-only options. ``lowbit_adamw(rate)``, for example, is
``lowbit(optax.adamw(rate))``. The aliases check their arguments, and work with
``optax.inject_hyperparams``.
"""

from lowbit_optax.aliases.adamw import (
    extra_bits_adamw,
    kahan_adamw,
    lowbit_adamw,
    lowbit_lion,
    sr_adamw,
)
from lowbit_optax.aliases.factored import factored_adamw, scale_by_factored_adam
from lowbit_optax.aliases.muon import lowbit_muon
from lowbit_optax.aliases.sgd import extra_bits_sgd, kahan_sgd, lowbit_sgd, sr_sgd

__all__ = [
    "extra_bits_adamw",
    "extra_bits_sgd",
    "factored_adamw",
    "kahan_adamw",
    "kahan_sgd",
    "lowbit_adamw",
    "lowbit_lion",
    "lowbit_muon",
    "lowbit_sgd",
    "scale_by_factored_adam",
    "sr_adamw",
    "sr_sgd",
]
