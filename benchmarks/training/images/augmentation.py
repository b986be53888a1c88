"""Converts image batches from uint8 to floats, with random crops and flips."""

import jax
import jax.numpy as jnp

# Statistics of the channels of CIFAR-10's training images. The digits use them, too,
# because the first BatchNorm corrects the difference.
MEAN = (0.4914, 0.4822, 0.4465)
STANDARD_DEVIATION = (0.2470, 0.2435, 0.2616)
PADDING = 4


def normalise(images: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Scales uint8 [batch, 32, 32, 3] to mean 0 and variance 1 over the dataset."""
    images = images.astype(jnp.float32) / 255
    scaled = (images - jnp.asarray(MEAN)) / jnp.asarray(STANDARD_DEVIATION)
    return scaled.astype(dtype)


def crop_and_flip(key: jax.Array, images: jax.Array, flip: bool = True) -> jax.Array:
    """Moves each image by up to 4 pixels, and mirrors half of the images.

    Args:
        key: the random key; the same key gives the same crops.
        images: [batch, height, width, channels], any dtype.
        flip: whether to mirror images; False if mirroring changes the class.
    """
    crop_key, flip_key = jax.random.split(key)
    batch, *shape = images.shape
    border = (PADDING, PADDING)
    padded = jnp.pad(images, ((0, 0), border, border, (0, 0)))
    corners = jax.random.randint(crop_key, (batch, 2), 0, 2 * PADDING + 1)

    def crop(image, corner):
        return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), shape)

    cropped = jax.vmap(crop)(padded, corners)
    if not flip:
        return cropped
    mirror = jax.random.bernoulli(flip_key, shape=(batch, 1, 1, 1))
    return jnp.where(mirror, cropped[:, :, ::-1], cropped)
