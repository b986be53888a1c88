"""Memory and loss of T5's architecture with the update in the backward pass.

    .venv/bin/python -m benchmarks t5_release

Lewandowski and Kosson 2023, table 2: if the update is fused with the backward pass, a
large FLAN-T5 needs 11% less memory and learns the same. Memory is read from a step with
the sizes of FLAN-T5 large, compiled for an H200. Losses are from a small model with the
same architecture, which predicts a window of a text from the previous window.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import next_byte
from benchmarks.training.text import stdlib_text
from lowbit_optax import release
from tools.gpu_program.release_steps import plain

NEEDS = ("jax_plugins.xla_cuda12",)


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


GIB, PAPER, BATCH, RATE = 2**30, -0.11, 32, 3e-3
SIZES = (8, 32)
"""Batch sizes to compare. Larger batches have more activations in memory."""

MODES = {"without": plain, "with": release.value_and_update}
PARTS = {
    "stored": "parameters and optimizer state",
    "temporary": "gradients, activations, copies",
}


def optimizer(rate, min_size: int | None = None):
    """Return AdamW with float32 moments and all bits of a float32 master."""
    whole = lowbit_optax.extra_bits(16)
    return lowbit_optax.lowbit(
        optax.adamw(rate), weights=whole, moments="float32", min_size=min_size
    )


def memory() -> dict[str, dict]:
    """Return the bytes of the compiled steps, keyed by batch size and mode."""
    from tools.gpu_program.release_steps import Model, compile_step
    from tools.gpu_program.steps import bytes_of

    model = FLAN_T5_LARGE
    float32 = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), float32
    )
    found: dict[str, dict] = {}
    for batch in SIZES:
        tokens = jax.ShapeDtypeStruct((batch, 2, model.length + 1), jnp.int32)
        carry = 2 * batch * model.length * model.width
        shapes = Model(model.loss, params, tokens, carry, model.layers)
        for mode in MODES:
            step = compile_step(MODES[mode], shapes, optimizer(1e-3))
            found.setdefault(str(batch), {})[mode] = {
                "gradients": bytes_of(params),
                "stored": step.stored,
                "peak": step.peak,
            }
    return found


@functools.partial(jax.jit, static_argnums=0)
def train(mode: str, master, batches):
    """Return the loss of each step."""
    tx = optimizer(optax.cosine_decay_schedule(RATE, len(batches)), 0)
    step = MODES[mode](SMALL.loss, tx)

    def body(carry, tokens):
        loss, *carry = step(*carry, tokens)
        return tuple(carry), loss

    start = lowbit_optax.from_master(tx, master, jnp.bfloat16, None)
    return jax.lax.scan(body, start, batches)[1]


def end(mode: str, seed: int, steps: int) -> dict[str, float]:
    """Return the mean loss of the last tenth of the steps."""
    length = SMALL.length
    windows = stdlib_text.random_windows(
        next_byte.text().train, (seed,), (steps, BATCH), 2 * length + 1
    )
    # The target begins with the last byte of the source.
    batches = jnp.stack([windows[..., : length + 1], windows[..., length:]], 2)
    losses = train(mode, SMALL.init(jax.random.key(seed)), batches)
    return {"loss": losses[-steps // 10 :].mean()}


def measure(args) -> dict:
    of = lambda mode, seed: end(mode, seed, args.steps)
    found = memory()
    loss = records.of_seeds(MODES, args.seeds, of)["loss"]
    return {
        "paper": PAPER,
        "memory": found,
        "loss": records.spreads(loss),
        "gap": records.gaps(loss, "without")["with"],
    }


@pictures.panels(3.1)
def draw(record: dict, bars) -> str:
    cases, texts, saved = {}, {}, []
    for batch, modes in record["memory"].items():
        for mode, each in modes.items():
            name = f"16 extra bits{', release' * (mode == 'with')},\nbatch of {batch}"
            cases[name] = each | {"temporary": each["peak"] - each["stored"]}
            texts[name] = f"{each['peak'] / GIB:.2f}"
        share = 1 - modes["with"]["peak"] / modes["without"]["peak"]
        saved.append(f"{share:.0%} less memory in batches of {batch}")
    pictures.stacked(bars, cases, PARTS, GIB, texts)
    bars.set(xlabel="GiB on one H200, compiled and not run (lower is better)")
    return f"With gradient release, FLAN-T5 large needs {' and '.join(saved)}"


WHERE = "compiled for an H200; losses on a {here}"
main = records.program(__name__, seeds=3, steps=200, ran=WHERE)
