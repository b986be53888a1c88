"""All measurements of this repository; ``python -m benchmarks`` lists them."""

import pathlib
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("error: Python 3.11 or newer is needed, not " + sys.version.split()[0])

ROOT = pathlib.Path(__file__).resolve().parent.parent
