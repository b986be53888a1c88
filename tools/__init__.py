"""Code that the tests and benchmarks of this repository share. It is not installed."""

import importlib.util


def is_installed(module: str) -> bool:
    """Return whether Python can find a module or a submodule.

    >>> is_installed("tools"), is_installed("not_there.inside")
    (True, False)
    """
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
