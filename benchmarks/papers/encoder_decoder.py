"""T5's architecture: an encoder, and a decoder that attends to it, both stacks scanned.

The model uses learned absolute positions instead of T5's relative positions, and no
dropout. As in FLAN-T5, the feed-forward layers are gated and the head is a separate
matrix.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class EncoderDecoder(NamedTuple):
    """The sizes of a model.

    Attributes:
      layers: the number of layers of the encoder, and of the decoder.
      width, heads, head_width, hidden: the sizes of each layer.
      vocabulary, length: the number of tokens, and the length of a sequence.
      dtype: the dtype of the computation.
    """

    layers: int
    width: int
    heads: int
    head_width: int
    hidden: int
    vocabulary: int
    length: int
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> dict:
        """Return float32 parameters."""
        keys = iter(jax.random.split(key, 32))
        normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
        n, width, inner = self.layers, self.width, self.heads * self.head_width

        def attention(name: str) -> dict:
            shapes = {"q": (width, inner), "kv": (width, 2 * inner)}
            shapes["out"] = inner, width
            return {f"{name}_{part}": normal(n, *shapes[part]) for part in shapes}

        def feed_forward() -> dict:
            up = normal(n, width, 2 * self.hidden)
            return {"up": up, "down": normal(n, self.hidden, width)}

        return {
            "embedding": jax.random.normal(next(keys), (self.vocabulary, width)),
            "positions": jax.random.normal(next(keys), (self.length, width)),
            "encoder": attention("self") | feed_forward(),
            "decoder": attention("self") | attention("cross") | feed_forward(),
            "head": normal(width, self.vocabulary),
        }

    def loss(self, params: dict, tokens: jax.Array) -> jax.Array:
        """Return the mean loss in nats of the target tokens.

        Args:
          params: parameters from :meth:`init`, in any float dtype.
          tokens: int32 [batch, 2, length + 1]: source and target.
        """

        def encoder(x, layer):
            x = x + self._attention("self", layer, _norm(x), _norm(x), False)
            return x + self._feed_forward(layer, _norm(x)), None

        def decoder(x, layer):
            x = x + self._attention("self", layer, _norm(x), _norm(x), True)
            x = x + self._attention("cross", layer, _norm(x), source, False)
            return x + self._feed_forward(layer, _norm(x)), None

        embed = lambda tokens: (
            params["embedding"][tokens] + params["positions"]
        ).astype(self.dtype)
        source, _ = jax.lax.scan(encoder, embed(tokens[:, 0, :-1]), params["encoder"])
        source = _norm(source)
        x, _ = jax.lax.scan(decoder, embed(tokens[:, 1, :-1]), params["decoder"])
        logits = (_norm(x) @ params["head"].astype(self.dtype)).astype(jnp.float32)
        labels = tokens[:, 1, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    def _attention(self, name, layer, x, given, is_causal: bool):
        weights = lambda part: layer[f"{name}_{part}"].astype(self.dtype)
        heads = lambda x: x.reshape(*x.shape[:2], self.heads, self.head_width)
        keys, values = jnp.split(given @ weights("kv"), 2, -1)
        mixed = jax.nn.dot_product_attention(
            heads(x @ weights("q")), heads(keys), heads(values), is_causal=is_causal
        )
        return mixed.reshape(*x.shape[:2], -1) @ weights("out")

    def _feed_forward(self, layer, x):
        gate, value = jnp.split(x @ layer["up"].astype(self.dtype), 2, -1)
        return (jax.nn.gelu(gate) * value) @ layer["down"].astype(self.dtype)


FLAN_T5_LARGE = EncoderDecoder(24, 1024, 16, 64, 2816, 32128, 128, jnp.bfloat16)
SMALL = EncoderDecoder(2, 32, 2, 16, 64, 256, 16)


def _norm(x: jax.Array) -> jax.Array:
    """Divide by the root mean square in float32, without a scale."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide**2, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)
