"""Exchanges between the threads of a warp."""

import numpy as np

from tools.gpu_program.ptx.faults import Divergence, UnknownInstruction

WARP = 32


def sources(mode: str, lanes: np.ndarray, warp: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the thread from which each thread receives a register in ``shfl``.

    Args:
      mode: ``bfly``, ``down`` or ``idx``.
      lanes: the operand with the distance or the index of the lane.
      warp: the number of threads in a warp, which is less than 32 in a small block.

    Returns:
      ``(indices of threads, whether each exists)``. If the source of a thread is
      outside of the warp or does not exist, the index is the thread's own index.

    >>> sources("down", np.full(32, 30), 32)[0][[0, 1, 2]]
    array([30, 31,  2])
    """
    threads = np.arange(lanes.size)
    lane, given = threads % warp, lanes.astype(np.int64) & 31
    modes = {"down": lane + given, "bfly": lane ^ given, "idx": given}
    if mode not in modes:
        raise UnknownInstruction("the interpreter does not support this exchange")
    source = modes[mode]
    inside = source < WARP
    exists = ~inside | (source < warp)
    return threads - lane + np.where(inside & exists, source, lane), exists


def matrix_starts(rows: np.ndarray, number: int) -> np.ndarray:
    """Return the address from which each thread of a warp loads two matrix elements.

    Args:
      rows: the row address that each thread passes. Thread ``8 * number + row`` passes
        the address of a row of matrix ``number``.
      number: the index of the matrix.
    """
    threads = np.arange(rows.size)
    lane = threads % WARP
    return rows[threads - lane + 8 * number + lane // 4] + 4 * (lane % 4)


def require(present: np.ndarray) -> None:
    """Raise an error if some threads of an exchange are at another instruction."""
    if not present.all():
        raise Divergence("a thread of the warp is at another instruction")
