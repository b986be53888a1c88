"""Look up a code by name; see :mod:`lowbit_optax._numerics.codes`."""

from lowbit_optax._numerics.codes import Code
from lowbit_optax._numerics.float_code import Float
from lowbit_optax._numerics.in_units import Dynamic, Linear, Log, Segments, Sqrt

# Segments.segments for each field width and signedness. With these values, an 8-bit
# first moment resolves values almost as small as the square root of the second moment.
# With 3 instead of 4, the noise in an update would be many times the update for values
# far below the largest value of their block.
_COMPANDED = {(8, True): 4, (8, False): 4, (4, True): 1, (4, False): 2}
_LOG = {8: 5, 4: 3}  # Log.segments

_CLASSES = {"linear": Linear, "dynamic": Dynamic, "sqrt": Sqrt, "float": Float}

UNSIGNED = ("sqrt", "log", "float")
"""The codes without negative values."""


def code_of(name: str, bits: int, signed: bool) -> Code:
    """Return the code called ``name``, for signed or for non-negative values."""
    signed = signed and name not in UNSIGNED
    if name in _CLASSES:
        return _CLASSES[name](bits, signed)
    if name == "log":
        return Log(bits, signed, _LOG[bits])
    return Segments(bits, signed, _COMPANDED[bits, signed])
