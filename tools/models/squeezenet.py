"""SqueezeNet for 32x32 images (Iandola et al. 2016, https://arxiv.org/abs/1602.07360)."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

# For each fire module, the channels of its squeeze and of each half of its expansion.
FIRES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256))
LAST_FIRE = (64, 256)
POOLED_AFTER = (2, 6)  # indices into FIRES
STEM = 96


class Fire(nn.Module):
    """A 1x1 convolution to few channels, followed by parallel 1x1 and 3x3 ones."""

    squeezed: int
    expanded: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Compute features [batch, height, width, 2 * expanded]."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, not train, momentum=0.9, dtype=self.dtype
        )
        x = nn.relu(norm()(conv(self.squeezed, (1, 1))(x)))
        halves = [norm()(conv(self.expanded, (k, k))(x)) for k in (1, 3)]
        return nn.relu(jnp.concatenate(halves, -1))


class SqueezeNet(nn.Module):
    """SqueezeNet with BatchNorm, three max pools and no dropout, as usual on CIFAR-10.

    Attributes:
        width: a factor that multiplies the number of channels of every layer.
        stem_stride: the stride of the first convolution; 2 halves the image.
        dtype: the dtype of the computation; parameters are initialized in float32.
    """

    width: float = 1.0
    stem_stride: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Compute float32 logits [batch, 10] for images [batch, 32, 32, 3]."""

        def fire(squeezed, expanded):
            channels = (max(1, round(n * self.width)) for n in (squeezed, expanded))
            return Fire(*channels, dtype=self.dtype)

        strides = (self.stem_stride, self.stem_stride)
        stem = max(1, round(STEM * self.width))
        x = nn.Conv(stem, (3, 3), strides, use_bias=False, dtype=self.dtype)(images)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        for i, channels in enumerate(FIRES):
            x = fire(*channels)(x, train)
            if i in POOLED_AFTER:
                x = nn.max_pool(x, (2, 2), (2, 2))
        x = fire(*LAST_FIRE)(x, train)
        x = nn.Conv(10, (1, 1), dtype=self.dtype)(x)
        return x.mean(axis=(1, 2)).astype(jnp.float32)
