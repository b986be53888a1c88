"""Comparisons of floats by their bits, because numpy warns at signalling NaNs."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from lowbit_optax._numerics import float_layouts

HALVES = (jnp.bfloat16, jnp.float16)
FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
DTYPES = (*HALVES, *FLOAT8)


def each_of(dtypes):
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda d: d.__name__)


each_dtype = each_of(DTYPES)


def patterns_of(x):
    """Bit patterns of an array of any float dtype."""
    x = np.asarray(x)
    return x.view(f"uint{8 * x.itemsize}")


def every(dtype):
    """All values of a narrow dtype, including infinities and NaNs."""
    width = 8 * np.dtype(dtype).itemsize
    return np.arange(2**width, dtype=f"uint{width}").view(dtype)


@functools.cache
def layout_of(dtype):
    if np.dtype(dtype) == np.float32:
        return float_layouts.FloatLayout(8, 23, 127)
    return float_layouts.layout_of(dtype)


def is_nan(x):
    x = np.asarray(x)
    layout = layout_of(x.dtype)
    number = layout.special + (1 if layout.has_infinity else 0)
    return (patterns_of(x) & np.uint32(layout.largest)) >= number


def assert_same(got, expected):
    """Assert that all bits are equal, including signs of zeros; NaNs count as equal."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    same = patterns_of(got) == patterns_of(expected)
    np.testing.assert_array_equal(same | (is_nan(got) & is_nan(expected)), True)


def cast(x, dtype):
    """Numpy's cast, without warnings about signalling NaNs and overflows."""
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


def float_casts(closed):
    """(from, to) for every cast between floats in a jaxpr, at any depth."""
    found = []
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name in ("convert_element_type", "reduce_precision"):
            before = equation.invars[0].aval.dtype
            after = equation.outvars[0].aval.dtype
            if jnp.issubdtype(before, jnp.floating) and before != after:
                found.append((str(before), str(after)))
        for value in equation.params.values():
            if isinstance(value, core.ClosedJaxpr):
                found += float_casts(value)
    return found
