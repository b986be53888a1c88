"""Trains a small GPT with the optimizer's step inside the backward pass.

    python -m benchmarks gpt_release
    python -m benchmarks gpt_release --no-release --remat dots

The text is the sources of Python's standard library. With and without `--release` the
batches and the numbers are the same; the memory is not, and at the end a table shows it
for both. `jax.lax.scan` in `tools/models/gpt.py` and `make_step` here are all that
a release takes.

Besides lowbit_optax it needs tqdm.
"""

import argparse
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from tqdm import tqdm

import lowbit_optax
from benchmarks.training import command_line
from benchmarks.training.text import gpt_flags, stdlib_text, step_memory
from lowbit_optax import lpmm, release
from tools.models.gpt import GPT

FETCH_EVERY = 10  # steps between reads of the loss: each read waits for the device
HELD_OUT = 8  # batches


class Result(NamedTuple):
    """What a run found; `memory` has the steps with and without release."""

    losses: list[float]
    held_out: float
    tokens_per_second: float
    memory: dict[str, step_memory.Memory]
    updates: dict[str, str]


def make_model(args: argparse.Namespace) -> GPT:
    """The model that the flags ask for."""
    return GPT(
        args.layers,
        args.width,
        args.heads,
        args.context,
        args.remat,
        jax.numpy.dtype(args.compute_dtype),
    )


def make_step(
    loss_fn, tx: optax.GradientTransformation, released: bool, max_grad_norm=None
):
    """A training step `(params, opt_state, tokens) -> (loss, params, opt_state)`."""
    if released:
        return release.value_and_update(loss_fn, tx, max_grad_norm=max_grad_norm)

    # jax.value_and_grad, that takes quantised parameters too.
    differentiate = lpmm.value_and_grad(loss_fn, lazy=True)

    def train_step(params, opt_state, tokens):
        loss, grads = differentiate(params, tokens)
        if max_grad_norm is not None:
            clip = optax.clip_by_global_norm(max_grad_norm)
            grads, _ = clip.update(grads, clip.init(params))
        params, opt_state = lowbit_optax.step(tx, params, opt_state, grads)
        return loss, params, opt_state

    return train_step


def train(args: argparse.Namespace, text: stdlib_text.Text) -> Result:
    """Compiles the step with and without release, and trains with one of them."""
    choice = gpt_flags.OPTIMIZERS[args.optimizer]
    model = make_model(args)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, args.steps // 10, args.steps
    )
    tx = choice.build(schedule, args.seed)
    params = choice.store(model.init(jax.random.key(args.seed)))
    opt_state = tx.init(params)

    def batch(step: int) -> np.ndarray:
        seed = (args.seed, step)
        return stdlib_text.random_windows(
            text.train, seed, args.batch_size, args.context + 1
        )

    compiled = {}
    for released in (False, True):
        train_step = make_step(model.loss, tx, released, args.max_grad_norm)
        compiled[released] = (
            jax.jit(train_step, donate_argnums=(0, 1))
            .lower(params, opt_state, batch(0))
            .compile()
        )
    updates = release.explain(model.loss, tx)(params, opt_state, batch(0))

    losses: list[Any] = []
    speed = 0.0
    start = time.perf_counter()
    with tqdm(range(args.steps), args.optimizer, unit="step") as progress:
        for step in progress:
            loss, params, opt_state = compiled[args.release](
                params, opt_state, batch(step)
            )
            losses.append(loss)
            if (step + 1) % FETCH_EVERY == 0 or step + 1 == args.steps:
                recent = np.mean(jax.device_get(losses[-FETCH_EVERY:]))
                tokens = len(losses) * args.batch_size * args.context
                speed = tokens / (time.perf_counter() - start)
                progress.set_postfix_str(f"loss {recent:.3f}, {speed:,.0f} tokens/s")
    return Result(
        losses=[float(loss) for loss in losses],
        held_out=evaluate(model, params, text.held_out, args.batch_size),
        tokens_per_second=speed,
        memory={
            "without release": step_memory.Memory.of(compiled[False]),
            "with release": step_memory.Memory.of(compiled[True]),
        },
        updates=updates,
    )


def evaluate(model: GPT, params, text: np.ndarray, batch_size: int) -> float:
    """The mean loss over stretches at even distances in a text."""
    windows = stdlib_text.even_windows(text, HELD_OUT * batch_size, model.context + 1)
    loss = jax.jit(model.loss)
    return float(np.mean([loss(params, rows) for rows in np.split(windows, HELD_OUT)]))


def main(argv: list[str] | None = None) -> Result:
    """Runs what the command line asks for; returns what it prints."""
    args = gpt_flags.parse_args(argv)
    text = stdlib_text.load()
    print(
        f"{len(text.train):,} bytes to train on and {len(text.held_out):,} held out; "
        f"GPT of {args.layers} layers, width {args.width}, context {args.context}, "
        f"{args.compute_dtype} computation on {jax.devices()[0].device_kind}"
    )
    with command_line.sentences("nothing of this run is kept"):
        result = train(args, text)
    mode = "with" if args.release else "without"
    print(
        f"{args.optimizer} {mode} release: training loss "
        f"{np.mean(result.losses[-FETCH_EVERY:]):.4f}, held-out loss "
        f"{result.held_out:.4f} nats a byte, {result.tokens_per_second:,.0f} tokens/s"
    )
    print("\nmemory of the compiled step, MiB:")
    print(step_memory.table(result.memory))
    print("\nwith release, parameters are updated")
    for name, where in result.updates.items():
        print(f"  {name:24} {where}")
    return result


if __name__ == "__main__":
    main()
