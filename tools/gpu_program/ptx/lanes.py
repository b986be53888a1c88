"""Exchanges between the threads of a warp."""

import numpy as np

from tools.gpu_program.ptx.faults import Divergence, UnknownInstruction

WARP = 32


def sources(mode: str, lanes: np.ndarray, warp: int) -> tuple[np.ndarray, np.ndarray]:
    """Whose register each thread gets by ``shfl``.

    Args:
      mode: ``bfly``, ``down`` or ``idx``.
      lanes: the operand that says how far away, or which.
      warp: how many threads of each warp exist, fewer than 32 in a small block.

    Returns:
      ``(numbers of threads, whether each exists)``. A thread whose source lies outside
      of the warp, or does not exist, is given its own number.

    >>> sources("down", np.full(32, 30), 32)[0][[0, 1, 2]]
    array([30, 31,  2])
    """
    threads = np.arange(lanes.size)
    lane, given = threads % warp, lanes.astype(np.int64) & 31
    modes = {"down": lane + given, "bfly": lane ^ given, "idx": given}
    if mode not in modes:
        raise UnknownInstruction("the interpreter does not know this exchange")
    source = modes[mode]
    inside = source < WARP
    exists = ~inside | (source < warp)
    return threads - lane + np.where(inside & exists, source, lane), exists


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


def require(present: np.ndarray) -> None:
    """Refuse an exchange with threads that are elsewhere."""
    if not present.all():
        raise Divergence("a thread of the warp that it needs is elsewhere")
