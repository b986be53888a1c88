"""ResNet-18 for 32x32 images (He et al. 2015, https://arxiv.org/abs/1512.03385)."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a skip connection, projected if shapes differ."""

    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Compute features [batch, height / stride, width / stride, features]."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype
        )
        strides = (self.stride, self.stride)
        y = conv(self.features, (3, 3), strides=strides, padding=1)(x)
        y = nn.relu(norm()(y))
        y = conv(self.features, (3, 3), padding=1)(y)
        # With a scale of zero, every block is the identity at the start of training.
        y = norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = norm()(conv(self.features, (1, 1), strides=strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet with a 3x3 stem and without a max pool, as is usual for 32x32 images.

    Attributes:
        width: the number of channels of the first stage; each later stage doubles it.
        blocks: the number of blocks per stage; the default is ResNet-18.
        stem_stride: the stride of the first convolution; 2 halves the image.
        dtype: the dtype of the computation. Parameters are initialized in float32;
            `cast_weights` casts them.
    """

    width: int = 64
    blocks: Sequence[int] = (2, 2, 2, 2)
    stem_stride: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Compute float32 logits [batch, 10] for images [batch, 32, 32, 3]."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        strides = (self.stem_stride, self.stem_stride)
        x = conv(self.width, (3, 3), strides=strides, padding=1)(images)
        x = nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x)
        x = nn.relu(x)
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = BasicBlock(self.width << stage, stride, self.dtype)(x, train)
        x = x.mean(axis=(1, 2))
        return nn.Dense(10, dtype=self.dtype)(x).astype(jnp.float32)


def cast_weights(params: Any, dtype: Any) -> Any:
    """Cast all parameters to `dtype`, except for the scales and biases of BatchNorm.

    BatchNorm has fewer than 1% of the parameters of a ResNet, and it scales whole
    channels. Its parameters stay float32, because casting them would save little.
    """

    def cast(path, leaf):
        in_norm = any(str(entry.key).startswith("BatchNorm") for entry in path)
        return leaf if in_norm else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
