"""Llama with stacked layers, for measuring the memory of large models.

Attention and the loss loop over pieces of the sequence, and recompute each piece during
the backward pass. Therefore no array has the size of the squared sequence length, or of
the sequence length times the vocabulary. On a mesh, parameters are gathered where they
are used (FSDP).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import lowbit_optax

BF16, F32 = jnp.bfloat16, jnp.float32


class Llama(NamedTuple):
    """The sizes of a model. The defaults are the sizes of Llama 3.1 8B.

    Attributes:
        layers: the number of layers.
        width: the width of the residual stream.
        inner: the width of the MLP.
        heads: the number of query heads.
        shared_heads: the number of key and value heads, each for several query heads.
        vocabulary: the number of tokens.
        piece: the number of positions that attention and the loss compute at a time.
    """

    layers: int = 32
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    shared_heads: int = 8
    vocabulary: int = 128256
    piece: int = 512

    def shapes(self) -> dict:
        """Return ShapeDtypeStructs of bfloat16 matrices and float32 scales."""
        depth, width, inner = self.layers, self.width, self.inner
        keys = width // self.heads * self.shared_heads
        matrix = lambda *shape: jax.ShapeDtypeStruct(shape, BF16)
        scales = lambda *shape: jax.ShapeDtypeStruct(shape, F32)
        return {
            "embedding": matrix(self.vocabulary, width),
            "layers": {
                "norm_1": scales(depth, width),
                "q": matrix(depth, width, width),
                "k": matrix(depth, width, keys),
                "v": matrix(depth, width, keys),
                "out": matrix(depth, width, width),
                "norm_2": scales(depth, width),
                "gate": matrix(depth, width, inner),
                "up": matrix(depth, width, inner),
                "down": matrix(depth, inner, width),
            },
            "norm": scales(width),
            "head": matrix(self.vocabulary, width),
        }

    def loss(self, params: dict, tokens: jax.Array) -> jax.Array:
        """Return the mean loss in nats per token of predicting each next token.

        Args:
            params: arrays or quantized weights with the shapes of `shapes`.
            tokens: int32 [batch, length + 1]; `piece` divides the length.
        """
        params = {k: x if k == "layers" else opened(x) for k, x in params.items()}
        x = whole(params["embedding"]).at[tokens[:, :-1]].get(out_sharding=_rows())

        @jax.checkpoint
        def body(x, layer):
            return self._block(x, jax.tree.map(whole, opened(layer))), None

        x, _ = jax.lax.scan(body, x, params["layers"])
        x, head = rms_norm(x, whole(params["norm"])), whole(params["head"])

        @jax.checkpoint
        def piece(total, inputs):
            x, labels = inputs
            logits = jnp.einsum("bld,vd->blv", x, head, preferred_element_type=F32)
            each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return total + each.sum(), None

        pieces = self._pieces(x), self._pieces(tokens[:, 1:])
        return jax.lax.scan(piece, 0.0, pieces)[0] / tokens[:, 1:].size

    def _pieces(self, x: jax.Array) -> jax.Array:
        batch, length, *rest = x.shape
        count = length // self.piece
        return jnp.moveaxis(x.reshape(batch, count, self.piece, *rest), 1, 0)

    def _block(self, x: jax.Array, layer: dict) -> jax.Array:
        x = x + self._attention(rms_norm(x, layer["norm_1"]), layer)
        y = rms_norm(x, layer["norm_2"])
        return x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]

    def _attention(self, x: jax.Array, layer: dict) -> jax.Array:
        batch, length, width = x.shape
        size, shared = width // self.heads, self.shared_heads
        q = _turned((x @ layer["q"]).reshape(batch, length, self.heads, size))
        k = _turned((x @ layer["k"]).reshape(batch, length, shared, size))
        v = (x @ layer["v"]).reshape(batch, length, shared, size)
        q = q.reshape(batch, length, shared, self.heads // shared, size)
        places = jnp.arange(length)

        @jax.checkpoint
        def piece(_, inputs):
            q, place = inputs
            scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=F32)
            seen = places <= place[:, None]
            scores = jnp.where(seen, scores * size**-0.5, -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
            return None, jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)

        pieces = self._pieces(q), places.reshape(-1, self.piece)
        _, mixed = jax.lax.scan(piece, None, pieces)
        # With explicit axes, a reshape cannot merge dimensions of different shardings.
        mixed = jnp.moveaxis(mixed, 0, 1).reshape(batch, -1, self.piece, width)
        return mixed.reshape(x.shape) @ layer["out"]


def by_rows(path, x) -> P:
    """Shard the rows of a parameter over the axis `d`. Scales are replicated."""
    if "norm" in path[-1].key:
        return P()
    return P(None, "d") if x.ndim == 3 else P("d")


def opened(layer):
    """Dequantize quantized weights."""
    return lowbit_optax.lpmm.dequantize(layer, BF16)


def whole(x: jax.Array) -> jax.Array:
    """Gather a parameter from the devices, on a mesh with explicit axes."""
    return x if _mesh().empty else jax.sharding.reshard(x, P())


def rms_norm(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    """Apply RMSNorm, computed in float32."""
    wide = x.astype(F32)
    mean = jnp.mean(wide * wide, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-5) * scale).astype(x.dtype)


def _mesh() -> jax.sharding.AbstractMesh:
    return jax.sharding.get_abstract_mesh()


def _rows() -> P | None:
    return None if _mesh().empty else P("d")


def _turned(x: jax.Array) -> jax.Array:
    """Apply the rotary position embedding to the halves of each head."""
    length, half = x.shape[1], x.shape[-1] // 2
    rates = 500000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(length)[:, None, None] * rates
    first, second = jnp.split(x.astype(F32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, -1).astype(x.dtype)
