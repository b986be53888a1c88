"""Look-up of arrays by identity."""

import typing
from collections.abc import Iterable

Value = typing.TypeVar("Value")


class ByIdentity(typing.Generic[Value]):
    """A mapping whose keys are compared by ``is`` alone.

    It is meant for arrays and tracers, which have no hash and whose ``==`` compares
    elements; and the ``id`` of an array that no longer exists can be given to another
    one. The mapping keeps its keys alive. A look-up goes through all of them, so there
    should be few.

    Args:
      pairs: keys and their values; if a key occurs twice, the last value counts.
    """

    def __init__(self, pairs: Iterable[tuple[typing.Any, Value]] = ()):
        self._pairs = list(pairs)

    def add(self, key, value: Value) -> None:
        """Add a key and its value."""
        self._pairs.append((key, value))

    def get(self, key) -> Value | None:
        """The value of a key; None if it was not added."""
        return next((v for k, v in reversed(self._pairs) if k is key), None)


def is_one_of(x, objects: Iterable) -> bool:
    """Whether ``x`` itself, and not only an equal object, is among the objects."""
    return any(x is each for each in objects)
