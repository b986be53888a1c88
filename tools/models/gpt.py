"""A decoder-only transformer over bytes, its layers stacked and scanned over.

Every leaf of `params["layers"]` has a leading axis of layers. `jax.lax.scan` runs over
it: inside `release.value_and_update` its backward loop updates one layer at a time, and
outside it is `jax.lax.scan`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import lowbit_optax

BYTES = 256

REMAT = {
    "none": lambda body: body,
    "full": jax.checkpoint,
}
"""What of a layer is computed again for its gradient."""


class GPT(NamedTuple):
    """The sizes of a model.

    Attributes:
        layers, width, heads: of the stack; the MLP is four times as wide.
        context: the most bytes that are seen at once.
        remat: a key of `REMAT`.
        dtype: of the computation. Weights are cast to it where they are used.
        vocabulary: rows of the embedding; larger models have more than bytes need.
    """

    layers: int
    width: int
    heads: int
    context: int
    remat: str = "none"
    dtype: Any = jnp.float32
    vocabulary: int = BYTES

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> dict:
        """Parameters: matrices in `dtype`, scales of norms in float32."""
        depth, width = self.layers, self.width
        keys = iter(jax.random.split(key, 6))

        def normal(*shape, scale=1.0):
            # 0.02 at GPT-2's width of 768.
            deviation = scale * 0.02 * math.sqrt(768 / width)
            values = deviation * jax.random.normal(next(keys), shape, jnp.float32)
            return values.astype(dtype)

        shrunk = 1 / math.sqrt(2 * depth)  # of what is added to the residual stream
        return {
            "embedding": normal(self.vocabulary, width),
            "positions": normal(self.context, width),
            "layers": {
                "norm_1": jnp.ones((depth, width)),
                "qkv": normal(depth, width, 3 * width),
                "out": normal(depth, width, width, scale=shrunk),
                "norm_2": jnp.ones((depth, width)),
                "up": normal(depth, width, 4 * width),
                "down": normal(depth, 4 * width, width, scale=shrunk),
            },
            "norm": jnp.ones(width),
        }

    def logits(self, params: dict, tokens: jax.Array) -> jax.Array:
        """float32 [batch, length, vocabulary] of int32 [batch, length]."""

        @REMAT[self.remat]
        def body(x, layer):
            # Cast in here, one layer at a time: a cast before the scan would make a
            # second stack of all weights, and of all gradients.
            return self._block(x, self._weights(layer)), None

        embedding = self._weights(params["embedding"])
        positions = self._weights(params["positions"])
        x = embedding[tokens] + positions[: tokens.shape[1]]
        x, _ = jax.lax.scan(body, x, params["layers"])
        x = _norm(x, self._weights(params["norm"]))
        # The head is the embedding: it is updated once, with the sum of both gradients.
        return (x @ embedding.T).astype(jnp.float32)

    def loss(self, params: dict, tokens: jax.Array) -> jax.Array:
        """The mean loss in nats per byte of predicting each byte from those before it.

        Args:
            params: from `init`, or those quantised.
            tokens: int32 [batch, length + 1].
        """
        logits = self.logits(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def _weights(self, tree):
        """What is multiplied with, of parameters as they are stored."""
        arrays = lowbit_optax.lpmm.dequantize(tree, self.dtype)
        return jax.tree.map(lambda x: x.astype(self.dtype), arrays)

    def _block(self, x: jax.Array, layer: dict) -> jax.Array:
        x = x + self._attention(_norm(x, layer["norm_1"]), layer)
        hidden = jax.nn.gelu(_norm(x, layer["norm_2"]) @ layer["up"])
        return x + hidden @ layer["down"]

    def _attention(self, x: jax.Array, layer: dict) -> jax.Array:
        batch, length, width = x.shape
        qkv = (x @ layer["qkv"]).reshape(batch, length, 3, self.heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return mixed.reshape(batch, length, width) @ layer["out"]


def to_bfloat16(params):
    """Matrices in bfloat16; scales of norms, which start at 1, stay float32."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if "norm" in path[-1].key else x.astype(jnp.bfloat16), params
    )


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """LayerNorm without a bias, computed in float32."""
    wide = x.astype(jnp.float32)
    return jax.nn.standardize(wide, epsilon=1e-5).astype(x.dtype) * scale
