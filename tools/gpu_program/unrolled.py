"""Models that call their layers one by one, without a scan."""

import jax
import jax.numpy as jnp
import optax

from tools.gpu_program.release_steps import BF16, Model
from tools.gpu_program.steps import bytes_of, leaf
from tools.models.llama import rms_norm


def unrolled_matrices(layers=12, width=2048, batch=256) -> Model:
    """Return layers ``tanh(h @ w)``."""
    layer = lambda h, w: jnp.tanh(h @ w)

    def loss_fn(params, h):
        for w in params["layers"]:
            h = layer(h, w)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    rows = leaf(batch, width)
    params = {"layers": [leaf(width, width)] * layers}
    return Model(loss_fn, params, rows, bytes_of(rows), layers)


def tied_transformer(
    layers=4, width=512, heads=8, context=256, batch=4, words=8192
) -> Model:
    """Return a GPT-like transformer whose last matrix is its embedding."""

    def block(x, p):
        split = jnp.split(rms_norm(x, p["norm_1"]) @ p["qkv"], 3, axis=-1)
        heads_of = (y.reshape(*y.shape[:2], heads, -1) for y in split)
        mixed = jax.nn.dot_product_attention(*heads_of, is_causal=True)
        x += mixed.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(rms_norm(x, p["norm_2"]) @ p["up"]) @ p["down"]

    def loss_fn(params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        for p in params["layers"]:
            x = block(x, p)
        logits = rms_norm(x, params["norm"]) @ params["embedding"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        )
        return losses.mean()

    layer = {
        "norm_1": leaf(width, dtype=jnp.float32),
        "qkv": leaf(width, 3 * width),
        "out": leaf(width, width),
        "norm_2": leaf(width, dtype=jnp.float32),
        "up": leaf(width, 4 * width),
        "down": leaf(4 * width, width),
    }
    params = {
        "embedding": leaf(words, width),
        "layers": [layer] * layers,
        "norm": leaf(width, dtype=jnp.float32),
    }
    tokens = jax.ShapeDtypeStruct((batch, context + 1), jnp.int32)
    return Model(loss_fn, params, tokens, 2 * batch * context * width, layers)


def resnet18(batch=256) -> Model:
    """Return a ResNet-18 for 32x32 images, with batch statistics."""
    from tools.models.classifier import make_loss_fn
    from tools.models.resnet import ResNet, cast_weights

    net = ResNet(dtype=BF16)
    image = jax.ShapeDtypeStruct((1, 32, 32, 3), BF16)
    variables = jax.eval_shape(lambda x: net.init(jax.random.key(0), x, False), image)
    params = jax.eval_shape(lambda x: cast_weights(x, BF16), variables["params"])

    loss_and_stats = make_loss_fn(net)

    def loss_fn(params, batch):
        parts = batch["stats"], batch["images"], batch["labels"]
        return loss_and_stats(params, *parts)[0]

    inputs = {
        "stats": variables["batch_stats"],
        "images": jax.ShapeDtypeStruct((batch, 32, 32, 3), BF16),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return Model(loss_fn, params, inputs, 0, 1)
