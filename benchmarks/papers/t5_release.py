"""Memory and loss of T5's architecture with the update in the backward pass.

    .venv/bin/python -m benchmarks t5_release

Lewandowski and Kosson 2023, table 2: if the update is fused with the backward pass, a
large FLAN-T5 needs 11% less memory and learns the same. Memory is read from a step with
the sizes of FLAN-T5 large, compiled for an H200. Losses are from a small model with the
same architecture, which predicts a window of a text from the previous window.
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
from tools.gpu_program.release_steps import plain

MINUTES = 6
NEEDS = ("jax_plugins.xla_cuda12", "matplotlib")

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


def text(record: dict) -> str:
    lines = []
    for batch, modes in record["memory"].items():
        share = modes["with"]["peak"] / modes["without"]["peak"] - 1
        lines.append(f"batch of {batch}: {share:+.1%}")
    gap = {"with": record["gap"]}
    heads = "loss", "minus the loss without"
    return "\n".join([*lines, records.listing(heads, record["loss"], gap, digits=5)])


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


def main(argv: list[str] | None = None) -> None:
    args = records.Options(__doc__, seeds=3, steps=(200, 20_000)).parse_args(argv)
    ran = f"compiled for an H200; losses on a {records.ran_here()}"
    records.run(__name__, args, measure, text, draw, ran)
