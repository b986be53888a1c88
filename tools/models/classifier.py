"""The loss of a classifier of 32x32 images with batch norms, such as `ResNet`."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


def make_loss_fn(model: nn.Module) -> Callable:
    """Return `(params, batch_stats, images, labels) -> (loss, batch_stats)`."""

    def loss_fn(params, batch_stats, images, labels):
        logits, updates = model.apply(
            {"params": params, "batch_stats": batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updates["batch_stats"]

    return loss_fn


def arguments_of(model: nn.Module, batch_size: int) -> tuple:
    """Return the shapes of the arguments of the loss, with float32 images."""
    images = jax.ShapeDtypeStruct((batch_size, 32, 32, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    init = lambda key, images: model.init(key, images, train=False)
    variables = jax.eval_shape(init, jax.random.key(0), images)
    return variables["params"], variables["batch_stats"], images, labels
