"""Branches of a kernel on which of several arrays a program works."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax


def by_branches(
    number: jax.Array | np.int32,
    choices: range,
    function: Callable,
    *args,
    starts: Sequence[int] | None = None,
):
    """``function(choice, *args)`` with a static choice, by a tree of branches.

    A ``lax.switch`` becomes a chain of branches on Triton's backend, which takes
    several times as long to compile.

    Args:
      number: int32 scalar, the choice.
      choices: what it can be.
      function: of a choice, an int, and of arrays.
      *args: arrays.
      starts: by choice, the least number for which it is taken; if None, its own.
    """
    if len(choices) == 1:
        return function(choices[0], *args)
    half = len(choices) // 2
    branch = lambda part: functools.partial(
        by_branches, number, part, function, starts=starts
    )
    first = starts[choices[half]] if starts else choices[half]
    left, right = branch(choices[:half]), branch(choices[half:])
    return lax.cond(lax.lt(number, np.int32(first)), left, right, *args)
