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


def reduced(operation: str, values: np.ndarray) -> np.ndarray:
    """Each thread's value, reduced over its warp by ``redux``.

    Args:
      operation: ``min``, ``max``, ``and``, ``or`` or ``xor``.
      values: integers.
    """
    known = {
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    if operation not in known:
        raise UnknownInstruction("the interpreter does not know this reduction")
    return np.repeat(known[operation].reduce(values.reshape(-1, WARP), axis=1), WARP)


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
