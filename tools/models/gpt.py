"""A decoder-only transformer over bytes, whose layers are stacked.

Every leaf of `params["layers"]` has a leading axis of layers, and `jax.lax.scan` loops
over this axis. With `release.value_and_update`, the backward loop updates one layer at
a time.
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
"""The parts of a layer that the backward pass recomputes, by name."""


class GPT(NamedTuple):
    """The sizes of a model.

    Attributes:
        layers: the number of layers.
        width: the width of the residual stream; the MLP is four times as wide.
        heads: the number of attention heads.
        context: the maximum length of a sequence.
        remat: a key of `REMAT`.
        dtype: the dtype of the computation. Weights are cast to it where they are used.
        vocabulary: the number of rows of the embedding.
        dropout: the share of values that dropout sets to 0, if the loss gets a key.
        is_unrolled: whether to compile each layer separately, and GELU apart from the
            matrix products. On a CPU, small models then train 1.5 times as fast.
    """

    layers: int
    width: int
    heads: int
    context: int
    remat: str = "none"
    dtype: Any = jnp.float32
    vocabulary: int = BYTES
    dropout: float = 0.0
    is_unrolled: bool = False

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> dict:
        """Return random parameters: matrices in `dtype`, norm scales in float32."""
        depth, width = self.layers, self.width
        keys = iter(jax.random.split(key, 6))

        def normal(*shape, scale=1.0):
            # The deviation is 0.02 for GPT-2's width of 768.
            deviation = scale * 0.02 * math.sqrt(768 / width)
            values = deviation * jax.random.normal(next(keys), shape, jnp.float32)
            return values.astype(dtype)

        shrunk = 1 / math.sqrt(2 * depth)  # for additions to the residual stream
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

    def logits(self, params: dict, tokens: jax.Array, key=None) -> jax.Array:
        """Return float32 [batch, length, vocabulary] for int32 [batch, length]."""

        @REMAT[self.remat]
        def body(carry, layer):
            x, key = carry
            key, *keys = _split(key, 4)
            # The weights of one layer are cast here. A cast before the scan would
            # create a second stack of all weights and of all gradients.
            return (self._block(x, self._weights(layer), keys), key), None

        embedding = self._weights(params["embedding"])
        positions = self._weights(params["positions"])
        key, of_sum = _split(key, 2)
        x = self._dropped(embedding[tokens] + positions[: tokens.shape[1]], of_sum)
        unroll = self.layers if self.is_unrolled else 1
        (x, _), _ = jax.lax.scan(body, (x, key), params["layers"], unroll=unroll)
        x = _norm(x, self._weights(params["norm"]))
        # The head is the embedding, whose gradient is the sum of both gradients.
        return (x @ embedding.T).astype(jnp.float32)

    def loss(self, params: dict, tokens: jax.Array, key=None) -> jax.Array:
        """Return the mean loss in nats per byte of predicting each next byte.

        Args:
            params: parameters from `init`, which may be quantized.
            tokens: int32 [batch, length + 1].
            key: a random key for dropout, or None for no dropout.
        """
        logits = self.logits(params, tokens[:, :-1], key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def _weights(self, tree):
        """Dequantize the parameters, and cast them to the dtype of the computation."""
        arrays = lowbit_optax.lpmm.dequantize(tree, self.dtype)
        return jax.tree.map(lambda x: x.astype(self.dtype), arrays)

    def _dropped(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Apply dropout: scale a random part of the values, and set the rest to 0."""
        if key is None:
            return x
        is_kept = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return jnp.where(is_kept, x / (1 - self.dropout), 0)

    def _block(self, x: jax.Array, layer: dict, keys) -> jax.Array:
        of_weights, of_attention, of_mlp = keys
        mixed = self._attention(_norm(x, layer["norm_1"]), layer, of_weights)
        x = x + self._dropped(mixed, of_attention)
        # XLA:CPU computes GELU again for each use in a matrix product, unless a barrier
        # stands between them.
        apart = jax.lax.optimization_barrier if self.is_unrolled else lambda x: x
        hidden = apart(jax.nn.gelu(apart(_norm(x, layer["norm_2"]) @ layer["up"])))
        return x + self._dropped(hidden @ layer["down"], of_mlp)

    def _attention(self, x: jax.Array, layer: dict, key) -> jax.Array:
        batch, length, width = x.shape
        qkv = (x @ layer["qkv"]).reshape(batch, length, 3, self.heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        if key is None:
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        else:  # dot_product_attention has no dropout
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type="f4")
            is_past = jnp.tri(length, dtype=bool)
            scores = jnp.where(is_past, scores / math.sqrt(q.shape[-1]), -jnp.inf)
            weights = self._dropped(jax.nn.softmax(scores).astype(v.dtype), key)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return mixed.reshape(batch, length, width) @ layer["out"]


def _split(key: jax.Array | None, count: int) -> list:
    """Return `count` keys, or `count` times None if the key is None."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def to_bfloat16(params):
    """Cast matrices to bfloat16. Scales of norms, which start at 1, stay float32."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if "norm" in path[-1].key else x.astype(jnp.bfloat16), params
    )


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Apply LayerNorm without a bias, computed in float32."""
    wide = x.astype(jnp.float32)
    return jax.nn.standardize(wide, epsilon=1e-5).astype(x.dtype) * scale
