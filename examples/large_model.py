"""Train a Llama-like model on a mesh of devices, in any format, and resume the run.

    python examples/large_model.py run lowbit_adamw 16

The page "Training a large model" of the documentation explains this program. It saves
a checkpoint after every fourth step, resumes from the last one, and continues in
another format with `--source`.
"""

import argparse
import functools
import pathlib
import sysconfig
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax import release

STEPS = 32
"""The number of steps after which the learning rate is 0."""

# --8<-- [start:shardings]

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


# --8<-- [end:shardings]


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


# --8<-- [start:optimizer]

MAX_GRAD_NORM = 1.0


class Format(NamedTuple):
    """How a run stores its weights, and how it computes a step.

    Attributes:
        alias: the optimizer, a function of the learning rate.
        dtype: the dtype of the matrices. Norms are always float32.
        is_released: whether updates are part of the backward pass.
        has_loss_scale: whether the loss is scaled, which float16 needs.
        options: further arguments of the alias.
    """

    alias: Callable
    dtype: Any = jnp.bfloat16
    is_released: bool = False
    has_loss_scale: bool = False
    options: dict = {}  # noqa: RUF012

    @property
    def is_plain(self) -> bool:
        """Whether the optimizer is optax's, with float32 weights."""
        return self.alias is optax.adamw

    def optimizer(self, steps: int, param_shardings) -> optax.GradientTransformation:
        """Return the optimizer of a run with this number of steps."""
        rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 4, decay_steps=steps)
        options = dict(self.options)
        if not self.is_plain:
            options["param_shardings"] = param_shardings
        tx = self.alias(rate, weight_decay=0.1, **options)
        if not self.is_released:  # max_grad_norm clips in a released step
            tx = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), tx)
        if self.has_loss_scale:
            scaling = lowbit_optax.loss_scaling.backoff_scale()
            tx = lowbit_optax.with_loss_scale(tx, scaling)
        return tx


def _master_copy_adamw(learning_rate, weight_decay, **options):
    inner = optax.adamw(learning_rate, weight_decay=weight_decay)
    return lowbit_optax.lowbit(inner, weights=lowbit_optax.master_copy(), **options)


FORMATS = {
    "float32": Format(optax.adamw, jnp.float32),
    "lowbit_adamw": Format(lowbit_optax.lowbit_adamw),
    "kahan_adamw": Format(lowbit_optax.kahan_adamw),
    "lowbit_adamw_released": Format(
        lowbit_optax.lowbit_adamw, is_released=True, options={"bits": 16}
    ),
    "float16_master_copy": Format(_master_copy_adamw, jnp.float16, has_loss_scale=True),
}


# --8<-- [end:optimizer]


class Run(NamedTuple):
    """Everything that a checkpoint contains: trees of sharded arrays."""

    params: Any
    state: Any
    average: Any
    average_state: Any


class Training(NamedTuple):
    """Everything else: constants, which every process creates."""

    model: Llama
    format: Format
    mesh: Mesh
    placed: dict
    tx: optax.GradientTransformation
    ema: optax.GradientTransformation


def mesh_of_all_devices(tensor: int = 2) -> Mesh:
    """Return a mesh with up to this many devices along the axis `tensor`."""
    tensor = min(tensor, len(jax.devices()))
    shape = len(jax.devices()) // tensor, tensor
    return jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def training_of(model: Llama, format_: Format, steps: int, mesh: Mesh) -> Training:
    """Return the optimizer and the average for a run with this number of steps."""
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    tx = format_.optimizer(steps, placed)
    ema = lowbit_optax.ema_of_params(0.9, param_shardings=placed)
    return Training(model, format_, mesh, placed, tx, ema)


# --8<-- [start:start]


def begin(training: Training, weights) -> Run:
    """Return a run that starts from float32 weights, and keeps their low bits."""
    average, average_state = lowbit_optax.from_master(training.ema, weights)
    if training.format.is_plain:
        params, state = weights, training.tx.init(weights)
    else:
        dtype = training.format.dtype
        params, state = lowbit_optax.from_master(training.tx, weights, dtype)
    return Run(params, state, average, average_state)


def targets(training: Training) -> Run:
    """Return the shapes of a run, each with its sharding."""
    shapes = jax.eval_shape(functools.partial(begin, training), training.model.shapes())
    placed = training.placed
    shardings = Run(
        placed,
        lowbit_optax.state_shardings(training.tx, shapes.params, placed),
        placed,
        lowbit_optax.state_shardings(training.ema, shapes.average, placed),
    )
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(place, shapes, shardings)


def shardings_of(tree):
    """Return the shardings of arrays or of targets."""
    return jax.tree.map(lambda x: x.sharding, tree)


def compiled_start(training: Training) -> tuple[Callable, Callable]:
    """Return functions that create sharded float32 weights, and start from them."""
    create = jax.jit(training.model.init, out_shardings=training.placed)
    places = shardings_of(targets(training))
    return create, jax.jit(functools.partial(begin, training), out_shardings=places)


# --8<-- [end:start]
# --8<-- [start:gradients]


def mean_gradients(training: Training, run: Run, tokens: jax.Array):
    """Return the mean loss and the mean float32 gradients of all microbatches."""
    if training.format.has_loss_scale:
        scaled = lowbit_optax.scaled_value_and_grad(training.model.loss)
        differentiate = lambda params, x: scaled(params, run.state, x)
    else:
        differentiate = jax.value_and_grad(training.model.loss)

    def add(sums, microbatch):
        found = differentiate(run.params, microbatch)
        return jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, found), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), run.params)
    zeros = jax.lax.with_sharding_constraint(zeros, training.placed)
    sums, _ = jax.lax.scan(add, (jnp.zeros([]), zeros), tokens)
    return jax.tree.map(lambda x: x / len(tokens), sums)


# --8<-- [end:gradients]
# --8<-- [start:release]


def released_update(training: Training, run: Run, tokens: jax.Array):
    """Return the loss, and params and state, updated during the backward pass."""
    update = release.value_and_update(
        training.model.loss, training.tx, max_grad_norm=MAX_GRAD_NORM
    )
    sequences = tokens.reshape(-1, tokens.shape[-1])
    return update(run.params, run.state, sequences)


# --8<-- [end:release]
# --8<-- [start:step]


def train_step(training: Training, run: Run, tokens: jax.Array):
    """Return the loss of a step, and the run after it."""
    if training.format.is_released:
        loss, params, state = released_update(training, run, tokens)
    else:
        loss, grads = mean_gradients(training, run, tokens)
        params, state = lowbit_optax.step(training.tx, run.params, run.state, grads)
    run = run._replace(params=params, state=state)
    average, average_state = lowbit_optax.step(
        training.ema, run.average, run.average_state, masters(training, run)
    )
    return loss, run._replace(average=average, average_state=average_state)


def compiled_step(training: Training) -> Callable:
    """Return `train_step` as a compiled function of the run and the tokens."""
    return jax.jit(
        functools.partial(train_step, training),
        donate_argnums=0,
        out_shardings=(None, shardings_of(targets(training))),
    )


def masters(training: Training, run: Run):
    """Return the float32 weights of a run."""
    if training.format.is_plain:
        return run.params
    return lowbit_optax.master_weights(run.params, run.state)


# --8<-- [end:step]
# --8<-- [start:checkpoints]


def save(manager: ocp.CheckpointManager, step: int, run: Run) -> None:
    """Save a run after a step. Orbax writes the files while the training continues."""
    manager.save(step, args=ocp.args.StandardSave(run))


def restore(manager: ocp.CheckpointManager, training: Training) -> tuple[int, Run]:
    """Return the number of steps of the last complete checkpoint, and its run."""
    step = manager.latest_step()
    if step is None:
        raise FileNotFoundError(f"{manager.directory} has no complete checkpoint")
    like = ocp.args.StandardRestore(targets(training))
    run: Any = manager.restore(step, args=like)
    return step, run


# --8<-- [end:checkpoints]
# --8<-- [start:convert]


def convert(run: Run, source: Training, training: Training) -> Run:
    """Convert a run to another format. The average keeps its format."""
    like = targets(training)
    change = functools.partial(
        lowbit_optax.convert,
        from_tx=source.tx,
        to_tx=training.tx,
        dtype=jax.tree.map(lambda x: x.dtype, like.params),
    )
    places = shardings_of((like.params, like.state))
    params, state = jax.jit(change, out_shardings=places)(run.params, run.state)
    return run._replace(params=params, state=state)


# --8<-- [end:convert]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("steps", type=int)
    parser.add_argument("--source", choices=FORMATS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--address", default="localhost:9876")
    args = parser.parse_args()
    if args.steps > STEPS:
        parser.error(f"steps must be at most {STEPS}, where the learning rate is 0")
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # only for CPUs
        jax.distributed.initialize(args.address, args.processes, args.rank)

    mesh = mesh_of_all_devices()
    of = lambda name: training_of(Llama(), FORMATS[name], STEPS, mesh)
    checkpoints_of = lambda name: ocp.CheckpointManager(args.folder.absolute() / name)
    training = of(args.format)
    with jax.set_mesh(mesh), checkpoints_of(args.format) as manager:
        if manager.latest_step() is not None:
            first, run = restore(manager, training)
        elif args.source:
            source = of(args.source)
            with checkpoints_of(args.source) as old:
                first, run = restore(old, source)
            run = convert(run, source, training)
        else:
            create, start = compiled_start(training)
            first, run = 0, start(create(jax.random.key(0)))
        advance = compiled_step(training)
        for step in range(first + 1, args.steps + 1):
            loss, run = advance(run, training.model.batch_of(step, mesh))
            if step % 4 == 0:
                save(manager, step, run)
                if jax.process_index() == 0:
                    print(f"step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
