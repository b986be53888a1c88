"""Increasing positions as bytes: the distances between them, or a bit for each place.

A distance is divided into groups of 7 bits, the lowest group first. The eighth bit of a
byte is set if another group follows. If the positions are random and few, a
distance below 128 needs one byte, where the shortest possible code needs about the
logarithm of the mean distance and 1.4 bits more.
"""

import numpy as np

_GROUP = 7


def encode(positions: np.ndarray, size: int) -> tuple[bool, bytes]:
    r"""Return ``(whether the bytes are a bitmap, the shorter of the two forms)``.

    >>> encode(np.array([0, 300, 301]), 2**20)
    (False, b'\x00\xab\x02\x00')
    >>> encode(np.array([0, 1, 2, 3, 9]), 10)
    (True, b'\xf0@')
    """
    gaps = np.diff(positions, prepend=-1).astype(np.uint64) - np.uint64(1)
    longest = int(gaps.max(initial=0)).bit_length()
    shifts = np.arange(0, max(longest, 1), _GROUP, dtype=np.uint64)
    lengths = np.ones(gaps.size, np.int64)
    for shift in shifts[1:]:
        lengths += gaps >> shift > 0
    ends = np.cumsum(lengths)
    if positions.size and ends[-1] > -(-size // 8):
        marks = np.zeros(size, bool)
        marks[positions] = True
        return True, np.packbits(marks).tobytes()
    groups = np.empty(ends[-1] if positions.size else 0, np.uint8)
    for n, shift in enumerate(shifts):
        has = lengths > n
        more = (lengths[has] > n + 1).astype(np.uint8) << _GROUP
        groups[(ends - lengths)[has] + n] = (gaps[has] >> shift).astype(np.uint8) & 127
        groups[(ends - lengths)[has] + n] |= more
    return False, groups.tobytes()


def decode(is_bitmap: bool, encoded: bytes) -> np.ndarray:
    r"""Return the positions; inverts :func:`encode`.

    >>> decode(False, b"\x00\xab\x02\x00"), decode(True, b"\xf0@")
    (array([  0, 300, 301]), array([0, 1, 2, 3, 9]))
    """
    given = np.frombuffer(encoded, np.uint8)
    if is_bitmap:
        return np.flatnonzero(np.unpackbits(given))
    firsts = np.flatnonzero(np.concatenate([[True], given < 128])[:-1])
    lengths = np.diff(firsts, append=given.size)
    number = np.arange(given.size) - np.repeat(firsts, lengths)
    groups = (given & 127).astype(np.int64) << _GROUP * number
    return np.cumsum(np.add.reduceat(groups, firsts) + 1) - 1
