"""Memory that checks every access of a launch."""

import dataclasses

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
    """

    threads: np.ndarray
    barriers: np.ndarray
    block_size: int

    def __getitem__(self, chosen) -> "Accessors":
        return Accessors(
            self.threads[chosen], self.barriers[chosen], self.block_size
        )

    def name(self, number: int) -> str:
        """One of them, for messages."""
        block, thread = divmod(int(self.threads[number]), self.block_size)
        return f"thread {thread} of block {block}"


class Memory:
    """Bytes, and who has read and written each of them in a launch.

    Two accesses to one byte by different threads race if one of them writes, unless
    both threads are of one block and a barrier lies between.

    Args:
      size: bytes, none of them initialised.

    >>> memory = Memory(8)
    >>> memory.fill(0, np.array([1, 2], np.uint32))
    >>> memory.begin(readable=[(0, 8)], writable=[])
    >>> one = Accessors(np.array([0]), np.array([0]), 32)
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
        """Copy bytes, whether they are initialised included."""
        for array in (self._data, self._initialised):
            array[target : target + size] = array[source : source + size].copy()

    def array(self, start: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Read an array from outside of any launch.

        Raises:
          Uninitialised: if nothing has written a part of it.
        """
        stop = start + int(np.prod(shape)) * np.dtype(dtype).itemsize
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
        size = self._data.size
        self._readable, self._writable = np.zeros((2, size), bool)
        for allowed, ranges in (
            (self._readable, readable),
            (self._writable, writable),
        ):
            for start, count in ranges:
                allowed[start : start + count] = True
        self._writer = np.full(size, _NOBODY, np.int64)
        self._written_after = np.zeros(size, np.int64)
        # Of the readers the least and the greatest: they are one thread, or of one
        # block, if these two are.
        self._least_reader = np.full(size, np.iinfo(np.int64).max)
        self._greatest_reader = np.full(size, _NOBODY, np.int64)
        self._read_after = np.zeros(size, np.int64)

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
        cells = self._cells(starts, size, self._readable, by)
        _forbid(~self._initialised[cells], Uninitialised, "reads what is not set", by)
        threads, barriers = by.threads[:, None], by.barriers[:, None]
        _forbid(self._is_unordered_write(cells, by), Race, "reads what races", by)
        # A barrier orders all that the block has read before it.
        block = self._greatest_reader[cells] // by.block_size
        older = (self._read_after[cells] < barriers) & self._read_by_block(cells, by)
        older &= block == threads // by.block_size
        stale = cells[older]
        self._least_reader[stale] = np.iinfo(np.int64).max
        self._greatest_reader[stale] = _NOBODY
        flat = cells.reshape(-1)
        for ufunc, array, values in (
            (np.minimum, self._least_reader, threads),
            (np.maximum, self._greatest_reader, threads),
            (np.maximum, self._read_after, barriers),
        ):
            ufunc.at(array, flat, np.broadcast_to(values, cells.shape).reshape(-1))
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
        cells = self._cells(starts, values.shape[1], self._writable, by)
        threads = np.broadcast_to(by.threads[:, None], cells.shape)
        _forbid(self._is_unordered_write(cells, by), Race, "writes what races", by)
        _forbid(self._is_unordered_read(cells, by), Race, "writes what races", by)
        self._writer[cells] = threads
        _forbid(self._writer[cells] != threads, Race, "writes at once", by)
        self._written_after[cells] = by.barriers[:, None]
        self._data[cells] = values
        self._initialised[cells] = True

    def _cells(self, starts, size, allowed, by: Accessors) -> np.ndarray:
        cells = starts[:, None] + np.arange(size)
        inside = (cells >= 0) & (cells < allowed.size)
        inside &= allowed[np.where(inside, cells, 0)]
        _forbid(~inside, OutOfBounds, "accesses what it was not given", by)
        return cells

    def _is_unordered_write(self, cells, by: Accessors) -> np.ndarray:
        writer = self._writer[cells]
        threads = by.threads[:, None]
        ordered = writer // by.block_size == threads // by.block_size
        ordered &= self._written_after[cells] < by.barriers[:, None]
        return (writer != _NOBODY) & (writer != threads) & ~ordered

    def _is_unordered_read(self, cells, by: Accessors) -> np.ndarray:
        least, greatest = self._least_reader[cells], self._greatest_reader[cells]
        threads = by.threads[:, None]
        by_others = (greatest != _NOBODY) & ((least != threads) | (greatest != threads))
        ordered = self._read_by_block(cells, by)
        ordered &= self._read_after[cells] < by.barriers[:, None]
        return by_others & ~ordered

    def _read_by_block(self, cells, by: Accessors) -> np.ndarray:
        """Whether only threads of the accessor's own block have read a byte."""
        blocks = by.threads[:, None] // by.block_size
        least, greatest = self._least_reader[cells], self._greatest_reader[cells]
        return (least // by.block_size == blocks) & (greatest // by.block_size == blocks)


def _forbid(wrong: np.ndarray, fault: type, what: str, by: Accessors) -> None:
    if wrong.any():
        (numbers,) = np.nonzero(wrong.any(axis=1))
        others = f", and {numbers.size - 1} others" if numbers.size > 1 else ""
        raise fault(f"{by.name(numbers[0])}{others} {what}")
