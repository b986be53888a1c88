"""The optimizers people name: optax's aliases in a weight format.

Each takes its optax alias's arguments in their order, then keyword-only options.
"""

from lowbit_optax.aliases.adamw import extra_bits_adamw, kahan_adamw, sr_adamw
from lowbit_optax.aliases.lowbit import lowbit_adamw, lowbit_lion, lowbit_sgd
from lowbit_optax.aliases.sgd import extra_bits_sgd, kahan_sgd, sr_sgd

__all__ = [
    "extra_bits_adamw",
    "extra_bits_sgd",
    "kahan_adamw",
    "kahan_sgd",
    "lowbit_adamw",
    "lowbit_lion",
    "lowbit_sgd",
    "sr_adamw",
    "sr_sgd",
]
