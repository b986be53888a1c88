"""Updates with low-bit moments follow float32's updates at every b2.

When gradients stop, second moments decay to values many octaves below their neighbours.
The block must not use a grid so coarse that its other weights lose their second
moments.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from moment_updates import compared, updates

pytestmark = pytest.mark.standard_promotion

B2S = (0.9, 0.95, 0.99, 0.999, 0.9999)
SHAPE = (32, 32)
STEPS = 2000
ROW, COLUMN = np.indices(SHAPE)
ONE_OF_EACH_BLOCK = (ROW % 8 == 5) & (COLUMN % 4 == 2)
SOME_ROWS = ROW % 8 < 3
STEP = np.arange(STEPS)[:, None, None]
LATER = STEP >= 200


@functools.cache
def normal():
    return np.random.default_rng(0).standard_normal((STEPS, *SHAPE), np.float32)


def dying_rows():
    halved_in = np.random.default_rng(1).uniform(7, 700, (SHAPE[0], 1))
    after = np.maximum(STEP - 200, 0)
    return normal() * np.where(SOME_ROWS, 2.0 ** (-after / halved_in), 1)


def rarely_touched(among):
    """Returns gradients that are zero outside ``among`` in 999 of 1,000 steps."""
    first = np.random.default_rng(2).integers(0, 1000, (SHAPE[0], 1))
    touched = (STEP - first) % 1000 == 0
    return normal() * (touched | among)


CASES = {
    "normal": normal,
    "a dead weight in each block": lambda: normal() * ~(LATER & ONE_OF_EACH_BLOCK),
    "dead rows": lambda: normal() * ~(LATER & SOME_ROWS),
    "dying rows": dying_rows,
    "rare rows": lambda: rarely_touched(ROW < 0),
    "rare rows beside others": lambda: rarely_touched(ROW % 2 == 0),
    "1e6 times as large": lambda: normal() * np.where(LATER, 1e6, 1),
    "1e-6 times as large": lambda: normal() * np.where(LATER, 1e-6, 1),
    "rows 1e6 times as large": lambda: normal() * np.where(LATER & SOME_ROWS, 1e6, 1),
    "rows 1e-6 times as large": lambda: normal() * np.where(LATER & SOME_ROWS, 1e-6, 1),
    "constant": lambda: np.ones((STEPS, *SHAPE)),
    "alternating": lambda: np.ones((STEPS, *SHAPE)) * np.where(STEP % 2, -1, 1),
}


@pytest.mark.parametrize("b2", B2S)
@pytest.mark.parametrize("case", CASES)
def test_low_moments_follow_float32(case, b2):
    grads = jnp.asarray(CASES[case](), jnp.float32)
    largest, _, cosine = compared(*(updates(x, grads, b2) for x in ("low", "float32")))
    assert largest <= 1.25
    # Rows in which all gradients are 20 octaves larger need the coarsest grid.
    assert cosine >= (0.93 if case == "rows 1e6 times as large" else 0.94)


def test_a_weight_without_gradients_stops_moving():
    grads = jnp.asarray(CASES["a dead weight in each block"](), jnp.float32)
    got, want = (
        np.abs(np.asarray(updates(x, grads, 0.95)))[200:, ONE_OF_EACH_BLOCK]
        for x in ("low", "float32")
    )
    assert got.max() <= 1.25 * want.max()
    # At the end, the second moment should be 2^-140 of its neighbours, but it is 2^-61.
    assert got[500:].max() <= 1e-6
