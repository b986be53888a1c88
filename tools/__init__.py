"""What tests and benchmarks of this repository share; not installed."""

import importlib.util


def is_installed(module: str) -> bool:
    """Whether a module can be found; a submodule, if the package above it can be, too.

    >>> is_installed("tools"), is_installed("not_there.inside")
    (True, False)
    """
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
