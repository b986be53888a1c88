"""Barriers that keep XLA from moving and fusing parts of a released step."""

from collections.abc import Callable

import jax
from jax import lax

from lowbit_optax._jaxprs.barriers import tied


def alone(index: jax.Array, update: Callable, *old):
    """Run ``update(*old)`` so that XLA does not fuse it with accesses to stacks.

    If a GPU kernel fuses the update with the reads and writes of a stack, some threads
    write a layer's packed words in place while others still read them, and the weights
    become wrong. On GPUs and TPUs, a barrier prevents this fusion. The compiler for
    CPUs drops barriers and would copy whole stacks in every iteration, so a conditional
    prevents the fusion there. ``index`` is the index of the layer, and not negative.
    """

    def branched(index, old):
        return lax.cond(index >= 0, lambda: update(*old), lambda: old)

    direct = lambda _, old: update(*tied(old))
    return lax.platform_dependent(index, old, cpu=branched, default=direct)
