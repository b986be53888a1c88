"""The numerical functions of ``python -m benchmarks digit_gan``."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("sklearn")

from benchmarks.papers import digit_gan


def test_the_frechet_distance_is_that_of_means_and_covariances():
    random = np.random.default_rng(0)
    x = random.standard_normal((500, 3)) @ random.standard_normal((3, 3))
    assert abs(digit_gan.frechet_distance(x, x)) < 1e-9
    shift = np.array([1.0, -2.0, 0.5])
    assert digit_gan.frechet_distance(x, x + shift) == pytest.approx(5.25)
    # (2 - 1)^2 of the variance in each direction.
    variance = np.trace(np.cov(x, rowvar=False)) + x.mean(0) @ x.mean(0)
    assert digit_gan.frechet_distance(x, 2 * x) == pytest.approx(variance)


def test_squares_become_channels_and_squares_again():
    x = jnp.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    deep = digit_gan.to_depth(x)
    assert deep.shape == (2, 2, 3, 12)
    np.testing.assert_array_equal(deep[1, 0, 2].reshape(2, 2, 3), x[1, 0:2, 4:6])
    np.testing.assert_array_equal(digit_gan.to_space(deep), x)
