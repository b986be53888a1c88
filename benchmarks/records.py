"""Records: JSON files of figures with where they come from."""

import shlex
import sys


def command() -> str:
    """The command that runs now, as a user types it."""
    return " ".join(filter(None, [sys.argv[0], shlex.join(sys.argv[1:])]))
