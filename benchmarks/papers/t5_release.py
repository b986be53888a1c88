"""Memory and loss of T5's architecture with the update in the backward pass.

    .venv/bin/python -m benchmarks t5_release

Lewandowski and Kosson 2023, table 2: a large FLAN-T5 takes 11% less memory if the
update is fused with the backward pass, and learns the same. Memory is that of a step
with the sizes of FLAN-T5 large, compiled for an H200; the losses those of a small model
of the same architecture, that predicts a window of a text from the one before it.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import next_byte
from benchmarks.papers.encoder_decoder import FLAN_T5_LARGE, SMALL
from benchmarks.training.text import stdlib_text
from lowbit_optax import release

GIB, PAPER, BATCH, RATE = 2**30, -0.11, 32, 3e-3
SIZES = (8, 32)
"""Batches whose memory is looked at; gradients weigh less in larger ones."""

MODES = ("without", "with")


def optimizer(rate, min_size: int | None = None):
    """AdamW with float32 moments, and all bits of a float32 master."""
    whole = lowbit_optax.extra_bits(16)
    return lowbit_optax.lowbit(
        optax.adamw(rate), weights=whole, moments="float32", min_size=min_size
    )


def step_of(mode: str, loss_fn, tx):
    """``(params, state, batch) -> (loss, params, state)``."""
    if mode == "with":
        return release.value_and_update(loss_fn, tx)

    def train_step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return loss, *lowbit_optax.step(tx, params, state, grads)

    return train_step


def measure() -> dict[str, dict]:
    """Bytes of the compiled steps, by batch and mode."""
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
            make_step = functools.partial(step_of, mode)
            step = compile_step(make_step, shapes, optimizer(1e-3))
            found.setdefault(str(batch), {})[mode] = {
                "gradients": bytes_of(params),
                "stored": step.stored,
                "peak": step.peak,
            }
            print(f"batch {batch} {mode:8} {step.peak / GIB:.2f} GiB", flush=True)
    return found


@functools.partial(jax.jit, static_argnums=0)
def train(mode: str, master, batches):
    """The loss of each step."""
    tx = optimizer(optax.cosine_decay_schedule(RATE, len(batches)), 0)
    step = step_of(mode, SMALL.loss, tx)

    def body(carry, tokens):
        loss, *carry = step(*carry, tokens)
        return tuple(carry), loss

    start = lowbit_optax.from_master(tx, master, jnp.bfloat16)
    return jax.lax.scan(body, start, batches)[1]


def losses(seeds: int, steps: int) -> dict[str, list]:
    """The mean loss of the last tenth, by mode, of each seed."""
    found: dict[str, list] = {mode: [] for mode in MODES}
    length = SMALL.length
    for seed in range(seeds):
        windows = stdlib_text.random_windows(
            next_byte.text().train, (seed,), steps * BATCH, 2 * length + 1
        )
        # The target begins with the last byte of the source.
        pairs = jnp.stack([windows[:, : length + 1], windows[:, length:]], 1)
        batches = jnp.asarray(pairs).reshape(steps, BATCH, 2, length + 1)
        master = SMALL.init(jax.random.key(seed))
        for mode, kept in found.items():
            end = train(mode, master, batches)[-steps // 10 :].mean()
            kept.append(float(end))
            print(f"seed {seed} {mode:8} {end:.6f}", flush=True)
    return found


def draw(record: dict, is_apart: bool) -> None:
    path = pictures.picture_of("t5_release", is_apart)
    with pictures.drawn(path, 2.6, (1,)) as (bars,):
        for batch, modes in record["memory"].items():
            for mode, each in modes.items():
                label = f"batch of {batch}, {mode} release"
                peak, stored = each["peak"] / GIB, each["stored"] / GIB
                rest = {"left": stored, "color": pictures.PARTS[2]}
                bars.barh(label, stored, color=pictures.PARTS[0])
                bars.barh(label, peak - stored, **rest)
                share = each["peak"] / modes["without"]["peak"] - 1
                text = f"{peak:.2f} GiB" + (f", {share:+.0%}" if share else "")
                bars.text(peak + 0.1, label, text, va="center")
        bars.invert_yaxis()
        bars.margins(x=0.15)
        bars.set(xlabel="GiB of one H200: parameters and state, and temporary memory")


def main(argv: list[str] | None = None) -> None:
    parser = records.parser(__doc__, seeds=3)
    parser.add_argument("--steps", type=int, help="of the small model, 200 by default")
    args = parser.parse_args(argv)
    args.steps = args.steps or (20_000 if args.full else 200)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        memory, runs = measure(), losses(args.seeds, args.steps)
        records.save(
            path,
            args,
            f"compiled for an H200; losses on a {records.ran_here()}",
            paper=PAPER,
            memory=memory,
            loss={mode: records.spread(each) for mode, each in runs.items()},
            gap=records.gaps(runs, "without")["with"],
        )
    record = records.load(path)
    for batch, modes in record["memory"].items():
        share = modes["with"]["peak"] / modes["without"]["peak"] - 1
        print(f"batch of {batch}: {share:+.1%}")
    gap = records.shown(record["gap"], 5)
    loss = records.shown(record["loss"]["with"], 4)
    print(f"loss {loss}, against without {gap}")
    draw(record, args.is_apart)
