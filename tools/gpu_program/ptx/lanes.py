"""Exchanges between the threads of a warp."""

import numpy as np

from tools.gpu_program.ptx.faults import Divergence, UnknownInstruction

WARP = 32

_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}
_REDUCTIONS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def sources(mode: str, lanes: np.ndarray, clamps: np.ndarray, warp: int = WARP):
    """Whose register each thread gets by ``shfl``.

    Args:
      mode: ``bfly``, ``down``, ``up`` or ``idx``.
      lanes: the operand that says how far away, or which.
      clamps: the operand with the segment's mask in its upper half.
      warp: how many threads of each warp exist, fewer than 32 in a small block.

    Returns:
      ``(numbers of threads, whether each lies in the segment, whether each exists)``. A
      thread whose source lies outside of the segment, or does not exist, is given its
      own number.
    """
    threads = np.arange(lanes.size)
    lane, given = threads % warp, lanes.astype(np.int64) & 31
    clamp, segment = clamps.astype(np.int64) & 31, clamps.astype(np.int64) >> 8 & 31
    last = lane & segment | clamp & ~segment
    first = lane & segment
    if mode == "up":
        source = lane - given
        inside = source >= last
    elif mode in ("down", "bfly"):
        source = lane + given if mode == "down" else lane ^ given
        inside = source <= last
    elif mode == "idx":
        source = first | given & ~segment
        inside = source <= last
    else:
        raise UnknownInstruction("the interpreter does not know this exchange")
    exists = ~inside | (source < warp)
    return threads - lane + np.where(inside & exists, source, lane), inside, exists


def reduced(mode: str, numbers: np.ndarray) -> np.ndarray:
    """What ``redux`` gives to each thread: one number for its whole warp.

    Args:
      mode: ``add``, ``min``, ``max``, ``and``, ``or`` or ``xor``.
      numbers: one for each thread.

    >>> reduced("max", np.arange(64))[[0, 31, 32]]
    array([31, 31, 63])
    """
    if mode not in _REDUCTIONS:
        raise UnknownInstruction("the interpreter does not know this reduction")
    of_warps = _REDUCTIONS[mode].reduce(numbers.reshape(-1, WARP), axis=1)
    return np.repeat(of_warps, WARP).astype(numbers.dtype)


def matrix_starts(rows: np.ndarray, number: int) -> np.ndarray:
    """Where each thread's two elements of a matrix of a warp are.

    Args:
      rows: what each thread gives as address of a row: thread ``8 * number + row`` that
        of a row of matrix ``number``.
      number: of the matrix.
    """
    threads = np.arange(rows.size)
    lane = threads % WARP
    return rows[threads - lane + 8 * number + lane // 4] + 4 * (lane % 4)


def require_whole_warps(active: np.ndarray) -> None:
    """Refuse an exchange that only a part of a warp takes part in."""
    counts = active.reshape(-1, WARP).sum(axis=1)
    require((counts == 0) | (counts == WARP))


def require(present: np.ndarray) -> None:
    """Refuse an exchange with threads that are elsewhere."""
    if not present.all():
        raise Divergence("a thread of the warp that it needs is elsewhere")
