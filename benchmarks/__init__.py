"""Every measurement of this repository; ``python -m benchmarks`` lists them."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
