"""Where the repository is, and programs that run in a process of their own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_python(*arguments, cwd=ROOT, timeout=None, **environment):
    """Run Python with these arguments, and return its status and what it printed."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | environment,
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
