"""ShuffleNet v2 for 32x32 images (Ma et al. 2018, https://arxiv.org/abs/1807.11164)."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

STEM, STAGES, LAST = 24, (116, 232, 464), 1024


def shuffle_channels(x: jax.Array) -> jax.Array:
    """Channels 0, n/2, 1, n/2 + 1, ... of the n there are: the halves interleaved."""
    *shape, channels = x.shape
    halves = x.reshape(*shape, 2, channels // 2)
    return halves.swapaxes(-1, -2).reshape(x.shape)


class Unit(nn.Module):
    """Half of the channels pass, or are halved in size; the others are convolved."""

    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Features [batch, height / stride, width / stride, features]."""
        half = self.features // 2
        norm = functools.partial(
            nn.BatchNorm, not train, momentum=0.9, dtype=self.dtype
        )
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)

        def pointwise(x):
            return nn.relu(norm()(conv(half, (1, 1))(x)))

        def depthwise(x):
            channels, strides = x.shape[-1], (self.stride, self.stride)
            groups = {"feature_group_count": channels}
            return norm()(conv(channels, (3, 3), strides, padding=1, **groups)(x))

        if self.stride == 1:
            passed, x = jnp.split(x, 2, -1)
        else:
            passed = pointwise(depthwise(x))
        x = pointwise(depthwise(pointwise(x)))
        return shuffle_channels(jnp.concatenate([passed, x], -1))


class ShuffleNet(nn.Module):
    """ShuffleNet v2 with no max pool, as is usual for 32x32 images.

    Attributes:
        width: multiplies all numbers of channels, up to even ones.
        units: units per stage; the first of each stage halves the image.
        stem_stride: 2 halves the image before anything else.
        classes: number of classes.
        dtype: the dtype of the computation; parameters are initialised in float32.
    """

    width: float = 1.0
    units: Sequence[int] = (4, 8, 4)
    stem_stride: int = 1
    classes: int = 10
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Logits, float32 [batch, classes], of images [batch, 32, 32, 3]."""

        def convolved(x, channels, size, stride):
            channels = self._even(channels)
            strides = (stride, stride)
            kernel = (size, size)
            x = nn.Conv(channels, kernel, strides, use_bias=False, dtype=self.dtype)(x)
            return nn.relu(nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x))

        x = convolved(images, STEM, 3, self.stem_stride)
        for channels, units in zip(STAGES, self.units, strict=True):
            for i in range(units):
                stride = 2 if i == 0 else 1
                x = Unit(self._even(channels), stride, self.dtype)(x, train)
        x = convolved(x, LAST, 1, 1).mean(axis=(1, 2))
        return nn.Dense(self.classes, dtype=self.dtype)(x).astype(jnp.float32)

    def _even(self, channels: int) -> int:
        return 2 * max(1, round(channels * self.width / 2))
