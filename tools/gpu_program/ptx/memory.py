"""Memory that checks every access of a kernel launch."""

import dataclasses
import math

import numpy as np

from tools.gpu_program.ptx.faults import OutOfBounds, Race, Uninitialised

_NOBODY = -1


@dataclasses.dataclass(frozen=True)
class Accessors:
    """The threads of one access. Arrays have one element for each thread.

    Args:
      threads: their indices in the launch. Threads of a block have consecutive indices.
      barriers: the number of barriers that each thread has passed.
      block_size: the number of threads in a block.
      team_size: the number of neighboring threads that share barriers.
    """

    threads: np.ndarray
    barriers: np.ndarray
    block_size: int
    team_size: int

    def teams(self, threads: np.ndarray) -> np.ndarray:
        """Return the index of each thread's team."""
        return threads // self.team_size

    def name(self, number: int) -> str:
        """Return the name of a thread for error messages."""
        block, thread = divmod(int(self.threads[number]), self.block_size)
        return f"thread {thread} of block {block}"


class Memory:
    """Bytes of memory, and the threads that read and wrote each byte in a launch.

    If two threads access the same byte and one of them writes, they race, unless both
    belong to one team and a barrier separates the accesses. Threads of one block may
    write the same value without a barrier, because in compiled code, all threads that
    have a value may write it.

    Args:
      size: the number of bytes. All of them are uninitialized.

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
        """Write an array while no kernel runs."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._data[start : start + raw.size] = raw
        self._initialised[start : start + raw.size] = True

    def copy(self, source: int, target: int, size: int) -> None:
        """Copy bytes, including whether they are initialized."""
        for array in (self._data, self._initialised):
            array[target : target + size] = array[source : source + size].copy()

    def array(self, start: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Read an array while no kernel runs.

        Raises:
          Uninitialised: if a part of the array was not written.
        """
        stop = start + math.prod(shape) * np.dtype(dtype).itemsize
        missing = np.count_nonzero(~self._initialised[start:stop])
        if missing:
            raise Uninitialised(f"{missing} of {stop - start} bytes are not written")
        return self._data[start:stop].copy().view(dtype).reshape(shape)

    def begin(
        self, readable: list[tuple[int, int]], writable: list[tuple[int, int]]
    ) -> None:
        """Begin a launch, and forget all earlier accesses.

        Args:
          readable: ``(start, size)`` of each array that the launch may read.
          writable: ``(start, size)`` of each array that it may write.
        """
        self._readable = _covered(self._data.size, readable)
        self._writable = _covered(self._data.size, writable)
        self._reads, self._writes = _Log(self._data.size), _Log(self._data.size)

    def load(self, starts: np.ndarray, size: int, by: Accessors) -> np.ndarray:
        """Read bytes.

        Args:
          starts: the position of each thread's bytes. Negative numbers are out of
            bounds.
          size: the number of bytes that each thread reads.
          by: the threads.

        Returns:
          An array with one row of bytes for each thread.

        Raises:
          OutOfBounds: if a thread reads outside of readable arrays.
          Uninitialised: if a thread reads bytes that were not written.
          Race: if a thread reads bytes that another thread writes.
        """
        cells = _cells(starts, size, self._readable, by)
        unset = ~self._initialised[cells]
        _forbid(unset, Uninitialised, "reads bytes that nothing has written", by)
        unordered = self._writes.unordered(cells, by)
        _forbid(unordered, Race, "reads bytes that another thread writes", by)
        self._reads.record(cells, by)
        return self._data[cells]

    def store(self, starts: np.ndarray, values: np.ndarray, by: Accessors) -> None:
        """Write bytes.

        Args:
          starts: the position of each thread's bytes.
          values: an array with one row of bytes for each thread.
          by: the threads.

        Raises:
          OutOfBounds: if a thread writes outside of writable arrays.
          Race: if a thread writes bytes that another thread reads or writes.
        """
        cells = _cells(starts, values.shape[1], self._writable, by)
        unordered = self._reads.unordered(cells, by)
        _forbid(unordered, Race, "writes bytes that another thread reads", by)
        unordered = self._writes.unordered(cells, by)
        _forbid(unordered, Race, "writes bytes that another thread writes", by)
        self._writes.record(cells, by)
        self._data[cells] = values
        self._initialised[cells] = True
        differs = self._writes.unordered(cells, by) & (self._data[cells] != values)
        differs |= self._writes.of_many_blocks(cells, by)
        _forbid(differs, Race, "writes bytes that another thread writes at once", by)


class _Log:
    """The threads that accessed each byte since the last barrier of their team."""

    def __init__(self, size: int):
        # If the first and the last accessor are one thread, or belong to one block, the
        # same is true for all accessors.
        self._first = np.full(size, np.iinfo(np.int64).max)
        self._last = np.full(size, _NOBODY)
        self._barriers = np.zeros(size, np.int64)

    def unordered(self, cells: np.ndarray, by: Accessors) -> np.ndarray:
        """Return whether another thread accessed each byte since the last barrier."""
        first, last = self._first[cells], self._last[cells]
        threads = by.threads[:, None]
        by_others = (last != _NOBODY) & ((first != threads) | (last != threads))
        return by_others & ~self._ordered(cells, by)

    def of_many_blocks(self, cells: np.ndarray, by: Accessors) -> np.ndarray:
        """Return whether threads of several blocks have accessed each byte."""
        first, last = self._first[cells], self._last[cells]
        return first // by.block_size != last // by.block_size

    def record(self, cells: np.ndarray, by: Accessors) -> None:
        """Record accesses."""
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
        """Return whether only the same team accessed a byte, before a barrier."""
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
    """Return the indices of the accessed bytes, in one row for each thread."""
    cells = starts[:, None] + np.arange(size)
    inside = (cells >= 0) & (cells < allowed.size)
    inside[inside] = allowed[cells[inside]]
    _forbid(~inside, OutOfBounds, "accesses bytes that the kernel was not given", by)
    return cells


def _forbid(wrong: np.ndarray, fault: type, what: str, by: Accessors) -> None:
    if wrong.any():
        (numbers,) = np.nonzero(wrong.any(axis=1))
        others = f" (and {numbers.size - 1} others)" if numbers.size > 1 else ""
        raise fault(f"{by.name(numbers[0])} {what}{others}")
