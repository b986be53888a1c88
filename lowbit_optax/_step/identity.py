"""Arrays found by identity."""

import typing
from collections.abc import Iterable

Value = typing.TypeVar("Value")


class ByIdentity(typing.Generic[Value]):
    """Values by object, where an object is compared by ``is`` alone.

    For arrays and tracers: they have no hash, ``==`` compares their elements, and the
    ``id`` of one that is gone can be that of another. Objects that are added stay
    alive. A lookup goes through all of them, so they should be few.

    Args:
      pairs: objects and their values; of equal objects the last one counts.
    """

    def __init__(self, pairs: Iterable[tuple[typing.Any, Value]] = ()):
        self._pairs = list(pairs)

    def add(self, key, value: Value) -> None:
        """Add an object and its value."""
        self._pairs.append((key, value))

    def get(self, key) -> Value | None:
        """The value of an object; None if it was not added."""
        return next((v for k, v in reversed(self._pairs) if k is key), None)


def is_one_of(x, objects: Iterable) -> bool:
    """Whether ``x`` itself is among the objects."""
    return any(x is each for each in objects)
