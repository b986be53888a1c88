"""The optimizers people name: optax's aliases in a weight format.

Each takes its optax alias's arguments in their order, then keyword-only options.
``lowbit_adamw(rate)`` is ``lowbit(optax.adamw(rate))``, and so on: weights with 8 extra
bits and moments of 8 bits. The aliases check their arguments, and are known to
``optax.inject_hyperparams``.
"""

from lowbit_optax.aliases.adamw import (
    extra_bits_adamw,
    kahan_adamw,
    lowbit_adamw,
    lowbit_lion,
    sr_adamw,
)
from lowbit_optax.aliases.muon import lowbit_muon
from lowbit_optax.aliases.sgd import extra_bits_sgd, kahan_sgd, lowbit_sgd, sr_sgd

__all__ = [
    "extra_bits_adamw",
    "extra_bits_sgd",
    "kahan_adamw",
    "kahan_sgd",
    "lowbit_adamw",
    "lowbit_lion",
    "lowbit_muon",
    "lowbit_sgd",
    "sr_adamw",
    "sr_sgd",
]
