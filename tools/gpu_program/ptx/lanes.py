"""Exchanges between the threads of a warp."""

import numpy as np

from tools.gpu_program.ptx.faults import Divergence, UnknownInstruction

WARP = 32


def sources(mode: str, lanes: np.ndarray, clamps: np.ndarray):
    """Whose register each thread gets by ``shfl``.

    Args:
      mode: ``bfly``, ``down``, ``up`` or ``idx``.
      lanes: the operand that says how far away, or which.
      clamps: the operand with the segment's mask in its upper half.

    Returns:
      ``(numbers of threads, whether each lies in the segment)``; a thread whose source
      does not gets its own.
    """
    threads = np.arange(lanes.size)
    lane, given = threads % WARP, lanes.astype(np.int64) & 31
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
    return threads - lane + np.where(inside, source, lane), inside


_REDUCTIONS = {
    "max": (np.maximum, lambda kind: np.iinfo(kind).min),
    "min": (np.minimum, lambda kind: np.iinfo(kind).max),
    "add": (np.add, lambda kind: 0),
}


def members(masks: np.ndarray) -> np.ndarray:
    """Which threads of its warp each thread's mask names: [warps, threads, threads]."""
    bits = masks.astype(np.int64)[:, None] >> np.arange(WARP) & 1
    return (bits == 1).reshape(-1, WARP, WARP)


def reduced(mode: str, values: np.ndarray, together: np.ndarray) -> np.ndarray:
    """What each thread gets by ``redux``.

    Args:
      mode: ``max``, ``min`` or ``add``.
      values: integers, one per thread.
      together: from :func:`members`.
    """
    if mode not in _REDUCTIONS:
        raise UnknownInstruction("the interpreter does not know this reduction")
    reduction, neutral = _REDUCTIONS[mode]
    of_warp = np.broadcast_to(values.reshape(-1, 1, WARP), together.shape)
    chosen = np.where(together, of_warp, values.dtype.type(neutral(values.dtype)))
    return reduction.reduce(chosen, axis=2, dtype=values.dtype).reshape(-1)


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
