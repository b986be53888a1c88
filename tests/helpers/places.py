"""The repository's folder, and functions that run Python in a separate process."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def printed_by(*arguments, timeout=300, **environment):
    """The output of Python with these arguments, and with the paths of this process."""
    path = os.pathsep.join(filter(None, sys.path))
    done = run_python(*arguments, timeout=timeout, PYTHONPATH=path, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_python(*arguments, cwd=ROOT, timeout=None, **environment):
    """Run Python with these arguments, and return its status and its output."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | environment,
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
