"""A Llama-like model of bytes, whose layers are stacked, on a mesh of two axes.

The axis `fsdp` divides the batch, and the weights where no layer uses them. The axis
`tensor` divides the heads of attention and the hidden units of each MLP.
"""

import pathlib
import sysconfig
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

IN, OUT = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
SPECS = {
    "embedding": P("tensor", "fsdp"),
    "layers": {
        "norm_1": P(),
        "q": IN,
        "k": IN,
        "v": IN,
        "out": OUT,
        "norm_2": P(),
        "gate": IN,
        "up": IN,
        "down": OUT,
    },
    "norm": P(),
    "head": P("tensor", "fsdp"),
}


class Llama(NamedTuple):
    """The sizes of a model and of its batches.

    Attributes:
        layers: the number of layers.
        width: the width of the residual stream; the MLP is twice as wide.
        heads: the number of attention heads.
        length: the number of bytes of a sequence.
        batch: the number of sequences of a step.
        microbatches: the number of parts of a batch, whose gradients are averaged.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    length: int = 32
    batch: int = 16
    microbatches: int = 2

    def shapes(self) -> dict:
        """Return a tree of float32 ShapeDtypeStructs."""
        depth, width, inner = self.layers, self.width, 2 * self.width
        of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        layers = dict.fromkeys("qkv", of(depth, width, width))
        layers |= dict.fromkeys(("norm_1", "norm_2"), of(depth, width))
        layers |= dict.fromkeys(("gate", "up"), of(depth, width, inner))
        layers |= {"out": of(depth, width, width), "down": of(depth, inner, width)}
        rows = of(256, width)
        return {"embedding": rows, "layers": layers, "norm": of(width), "head": rows}

    def init(self, key: jax.Array) -> dict:
        """Return random float32 weights."""

        def draw(path, like):
            name = jax.tree_util.keystr(path)
            if "norm" in name:
                return jnp.ones(like.shape)
            own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            return jax.random.normal(own_key, like.shape) / self.width**0.5

        return jax.tree.map_with_path(draw, self.shapes())

    def loss(self, params: dict, tokens: jax.Array) -> jax.Array:
        """Return the mean loss in nats per byte, for int32 [batch, length + 1]."""

        @jax.checkpoint
        def body(x, layer):
            x = x + self._attention(_norm(x, layer["norm_1"]), layer)
            y = _norm(x, layer["norm_2"])
            hidden = jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])
            return x + hidden @ layer["down"], None

        x = params["embedding"][tokens[:, :-1]]
        x = jax.lax.with_sharding_constraint(x, P("fsdp"))
        x, _ = jax.lax.scan(body, x, params["layers"])
        logits = _norm(x, params["norm"]) @ params["head"].T
        logits = logits.astype(jnp.float32)
        labels = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def _attention(self, x: jax.Array, layer: dict) -> jax.Array:
        split = lambda x: x.reshape(*x.shape[:2], self.heads, -1)
        q, k, v = (split(x @ layer[name]) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", _turned(q), _turned(k))
        scores = scores.astype(jnp.float32) / q.shape[-1] ** 0.5
        is_past = jnp.tri(x.shape[1], dtype=bool)
        shares = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf)).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, v)
        return mixed.reshape(x.shape) @ layer["out"]

    def batch_of(self, step: int, mesh: jax.sharding.Mesh) -> jax.Array:
        """Return the bytes of a step, int32 [microbatches, sequences, length + 1]."""
        folder = pathlib.Path(sysconfig.get_path("stdlib"))
        text = np.frombuffer((folder / "argparse.py").read_bytes(), np.uint8)
        shape = self.microbatches, self.batch // self.microbatches, 1
        random = np.random.default_rng(step)
        starts = random.integers(len(text) - self.length, size=shape)
        tokens = text[starts + np.arange(self.length + 1)].astype(np.int32)
        rows = NamedSharding(mesh, P(None, "fsdp"))
        return jax.make_array_from_callback(tokens.shape, rows, tokens.__getitem__)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Apply RMSNorm, computed in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-5) * scale).astype(x.dtype)


def _turned(x: jax.Array) -> jax.Array:
    """Apply the rotary position embedding to the halves of each head."""
    length, half = x.shape[1], x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(length)[:, None, None] * rates
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, -1).astype(x.dtype)
