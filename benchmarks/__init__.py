"""Every measurement of this repository; ``python -m benchmarks`` lists them."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Models and data are those of the examples, which are scripts and no package.
sys.path.append(str(ROOT / "examples"))
