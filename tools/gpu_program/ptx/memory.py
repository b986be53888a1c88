"""Memory that checks every access of a launch."""

import dataclasses
import math

import numpy as np

from tools.gpu_program.ptx.faults import OutOfBounds, Race, Uninitialised

_NOBODY = -1


@dataclasses.dataclass(frozen=True)
class Accessors:
    """The threads of one access, one element for each.

    Args:
      threads: their numbers in the launch; those of a block follow each other.
      barriers: how many barriers each has passed.
      block_size: threads of a block.
      team_size: neighbouring threads of a block for which its barriers are.
    """

    threads: np.ndarray
    barriers: np.ndarray
    block_size: int
    team_size: int

    def teams(self, threads: np.ndarray) -> np.ndarray:
        """The numbers of the teams that threads are of."""
        return threads // self.team_size

    def name(self, number: int) -> str:
        """One of them, for messages."""
        block, thread = divmod(int(self.threads[number]), self.block_size)
        return f"thread {thread} of block {block}"


class Memory:
    """Bytes, and who has read and written each of them in a launch.

    Two accesses to one byte by different threads race if one of them writes, unless
    both threads are of one team and a barrier lies between. Threads of one block may
    write one value at once: compilers let all threads do so that hold the value.

    Args:
      size: bytes, none of them initialised.

    >>> memory = Memory(8)
    >>> memory.fill(0, np.array([1, 2], np.uint32))
    >>> memory.begin(readable=[(0, 8)], writable=[])
    >>> one = Accessors(np.array([0]), np.array([0]), 32, 32)
    >>> memory.load(np.array([4]), 4, one).view(np.uint32)
    array([[2]], dtype=uint32)
    """

    def __init__(self, size: int):
        self._data = np.zeros(size, np.uint8)
        self._initialised = np.zeros(size, bool)
        self.begin([(0, size)], [(0, size)])

    def fill(self, start: int, values: np.ndarray) -> None:
        """Write an array from outside of any launch."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._data[start : start + raw.size] = raw
        self._initialised[start : start + raw.size] = True

    def copy(self, source: int, target: int, size: int) -> None:
        """Copy bytes, and whether they are initialised."""
        for array in (self._data, self._initialised):
            array[target : target + size] = array[source : source + size].copy()

    def array(self, start: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Read an array from outside of any launch.

        Raises:
          Uninitialised: if nothing has written a part of it.
        """
        stop = start + math.prod(shape) * np.dtype(dtype).itemsize
        missing = np.count_nonzero(~self._initialised[start:stop])
        if missing:
            raise Uninitialised(f"{missing} of {stop - start} bytes are not written")
        return self._data[start:stop].copy().view(dtype).reshape(shape)

    def begin(
        self, readable: list[tuple[int, int]], writable: list[tuple[int, int]]
    ) -> None:
        """Begin a launch: forget who accessed what.

        Args:
          readable, writable: ``(start, size)`` of what it may read and write.
        """
        self._readable = _covered(self._data.size, readable)
        self._writable = _covered(self._data.size, writable)
        self._reads, self._writes = _Log(self._data.size), _Log(self._data.size)

    def load(self, starts: np.ndarray, size: int, by: Accessors) -> np.ndarray:
        """Read bytes.

        Args:
          starts: of what each thread reads; negative numbers are out of bounds.
          size: bytes that each reads.
          by: the threads.

        Returns:
          An array of one row of bytes for each thread.

        Raises:
          OutOfBounds, Uninitialised, Race: for the first thread that must not.
        """
        cells = _cells(starts, size, self._readable, by)
        unset = ~self._initialised[cells]
        _forbid(unset, Uninitialised, "reads what nothing has written", by)
        unordered = self._writes.unordered(cells, by)
        _forbid(unordered, Race, "reads what another thread writes", by)
        self._reads.record(cells, by)
        return self._data[cells]

    def store(self, starts: np.ndarray, values: np.ndarray, by: Accessors) -> None:
        """Write bytes.

        Args:
          starts: of what each thread writes.
          values: an array of one row of bytes for each thread.
          by: the threads.

        Raises:
          OutOfBounds, Race: for the first thread that must not.
        """
        cells = _cells(starts, values.shape[1], self._writable, by)
        unordered = self._reads.unordered(cells, by)
        _forbid(unordered, Race, "writes what another thread reads", by)
        unordered = self._writes.unordered(cells, by)
        _forbid(unordered, Race, "writes what another thread writes", by)
        self._writes.record(cells, by)
        self._data[cells] = values
        self._initialised[cells] = True
        differs = self._writes.unordered(cells, by) & (self._data[cells] != values)
        differs |= self._writes.of_many_blocks(cells, by)
        _forbid(differs, Race, "writes what another thread writes at once", by)


class _Log:
    """Who has accessed each byte, as far as no barrier has made it harmless."""

    def __init__(self, size: int):
        # All accessors are one thread, or of one block, if the first and last are.
        self._first = np.full(size, np.iinfo(np.int64).max)
        self._last = np.full(size, _NOBODY)
        self._barriers = np.zeros(size, np.int64)

    def unordered(self, cells: np.ndarray, by: Accessors) -> np.ndarray:
        """Where another thread has accessed a byte with no barrier since."""
        first, last = self._first[cells], self._last[cells]
        threads = by.threads[:, None]
        by_others = (last != _NOBODY) & ((first != threads) | (last != threads))
        return by_others & ~self._ordered(cells, by)

    def of_many_blocks(self, cells: np.ndarray, by: Accessors) -> np.ndarray:
        """Where threads of several blocks have accessed a byte."""
        first, last = self._first[cells], self._last[cells]
        return first // by.block_size != last // by.block_size

    def record(self, cells: np.ndarray, by: Accessors) -> None:
        """Add accesses."""
        stale = cells[self._ordered(cells, by)]
        self._first[stale] = np.iinfo(np.int64).max
        self._last[stale] = _NOBODY
        threads, barriers = (
            np.broadcast_to(x[:, None], cells.shape) for x in (by.threads, by.barriers)
        )
        np.minimum.at(self._first, cells, threads)
        np.maximum.at(self._last, cells, threads)
        np.maximum.at(self._barriers, cells, barriers)

    def _ordered(self, cells: np.ndarray, by: Accessors) -> np.ndarray:
        """Where all accesses are the team's own, and a barrier has followed them."""
        teams = by.teams(by.threads)[:, None]
        ordered = self._barriers[cells] < by.barriers[:, None]
        ordered &= by.teams(self._first[cells]) == teams
        return ordered & (by.teams(self._last[cells]) == teams)


def _covered(size: int, ranges: list[tuple[int, int]]) -> np.ndarray:
    covered = np.zeros(size, bool)
    for start, count in ranges:
        covered[start : start + count] = True
    return covered


def _cells(starts, size: int, allowed: np.ndarray, by: Accessors) -> np.ndarray:
    """Numbers of the bytes, a row for each thread."""
    cells = starts[:, None] + np.arange(size)
    inside = (cells >= 0) & (cells < allowed.size)
    inside[inside] = allowed[cells[inside]]
    _forbid(~inside, OutOfBounds, "accesses what the kernel was not given", by)
    return cells


def _forbid(wrong: np.ndarray, fault: type, what: str, by: Accessors) -> None:
    if wrong.any():
        (numbers,) = np.nonzero(wrong.any(axis=1))
        others = f" (and {numbers.size - 1} others)" if numbers.size > 1 else ""
        raise fault(f"{by.name(numbers[0])} {what}{others}")
