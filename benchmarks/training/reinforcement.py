"""Fine-tuning by reinforcement at small learning rates, in each format.

    .venv/bin/python -m benchmarks reinforcement

A small GPT is trained on Python's standard library in float32, and then fine-tuned. Its
reward is the share of lower-case letters in the next 8 bytes. Each step samples 8
continuations of each of 8 prompts with the bfloat16 weights, as an inference engine
would. The policy gradient compares each reward with the other rewards of its prompt
(GRPO with one update per batch). All rows use the same initial weights, prompts and
random numbers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.training.text import stdlib_text
from tools.models.gpt import GPT

MODEL = GPT(2, 64, 4, 16)
PROMPT, SAMPLED, PROMPTS, GROUP = 8, 8, 8, 8
RATES = (1e-6, 1e-5, 1e-4)


# How the weights and the moments are kept.
ROWS = {
    "float32 master": (lowbit_optax.master_copy(), "float32"),
    "bfloat16, nearest": (lowbit_optax.nearest(), lowbit_optax.cast(jnp.bfloat16)),
    "stochastic": (lowbit_optax.stochastic_rounding(), None),
    "lowbit": (None, None),
}


@functools.cache
def pretrained():
    """Return float32 weights after 1,500 steps of AdamW with 32 sequences each."""
    text = stdlib_text.load().train
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0, 4e-3, 30, 1500))
    params = MODEL.init(jax.random.key(0))

    @jax.jit
    def train(params, state, batches):
        def step(carry, tokens):
            grads = jax.grad(MODEL.loss)(carry[0], tokens)
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return lax.scan(step, (params, state), batches)[0]

    batches = stdlib_text.random_windows(text, (0,), (1500, 32), MODEL.context + 1)
    return train(params, tx.init(params), batches)[0]


def sample(params, prompts: jax.Array, key: jax.Array) -> jax.Array:
    """Return prompts with continuations: int32 [batch, PROMPT + SAMPLED]."""
    tokens = jnp.pad(prompts, ((0, 0), (0, SAMPLED)))

    def body(at, tokens):
        logits = MODEL.logits(params, tokens)[:, at - 1]
        drawn = jax.random.categorical(jax.random.fold_in(key, at), logits)
        return tokens.at[:, at].set(drawn.astype(jnp.int32))

    return lax.fori_loop(PROMPT, PROMPT + SAMPLED, body, tokens)


def reward(tokens: jax.Array) -> jax.Array:
    """Return the share of sampled bytes that are lower-case letters: [batch]."""
    sampled = tokens[:, PROMPT:]
    return ((sampled >= ord("a")) & (sampled <= ord("z"))).mean(1)


def policy_loss(params, tokens: jax.Array, advantage: jax.Array) -> jax.Array:
    """Return minus the mean of advantage times log probability."""
    logits = MODEL.logits(params, tokens[:, :-1])[:, PROMPT - 1 :]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, PROMPT:])
    return (advantage[:, None] * losses).mean()


def gradients(params, prompts: jax.Array, key: jax.Array) -> tuple:
    """Return gradients and the mean reward of continuations of the prompts."""
    tokens = sample(params, jnp.repeat(prompts, GROUP, 0), key)
    rewards = reward(tokens).reshape(PROMPTS, GROUP)
    spread = rewards.std(1, keepdims=True) + 1e-4
    advantage = ((rewards - rewards.mean(1, keepdims=True)) / spread).reshape(-1)
    return jax.grad(policy_loss)(params, tokens, advantage), rewards.mean()


@functools.partial(jax.jit, static_argnums=0)
def _run(tx, params, state, prompts, keys):
    """Return the mean reward and the share of changed weights of each step."""
    matrices = lambda tree: [
        x for x in jax.tree.leaves(tree) if x.dtype == jnp.bfloat16
    ]

    def step(carry, given):
        params, state = carry
        grads, mean = gradients(params, *given)
        new, state = lowbit_optax.step(tx, params, state, grads)
        pairs = zip(matrices(params), matrices(new), strict=True)
        changed = sum((a != b).sum() for a, b in pairs)
        share = changed / sum(x.size for x in matrices(params))
        return (new, state), (mean, share)

    return lax.scan(step, (params, state), (prompts, keys))[1]


def begun(name: str, rate: float) -> tuple:
    """Return the transformation of a row, and its parameters and state."""
    weights, moments = ROWS[name]
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    tx = lowbit_optax.lowbit(inner, weights=weights, moments=moments)
    return tx, *lowbit_optax.from_master(tx, pretrained(), jnp.bfloat16)


def train(name: str, rate: float, args) -> dict:
    """Train one row with each seed."""
    tx, *start = begun(name, rate)
    text = stdlib_text.load().held_out
    rewards, shares = [], []
    for seed in range(args.seeds):
        prompts = stdlib_text.random_windows(
            text, (seed,), (args.steps, PROMPTS), PROMPT
        )
        keys = jax.random.split(jax.random.key(seed), args.steps)
        found = jax.device_get(_run(tx, *start, prompts, keys))
        rewards.append(records.means(found[0], min(20, args.steps)))
        shares.append(float(np.mean(found[1])))
        print(f"{rate:g} {name}, seed {seed}: {rewards[-1][-1]:.4f}", flush=True)
    return {
        "curves": rewards,
        "changed": float(np.mean(shares)),
    }


def table(record: dict) -> str:
    """Return a Markdown table: the master's final rewards, and differences from it."""
    ends = lambda run: np.asarray(run["curves"])[:, -1]
    shown = lambda values, digits: records.shown(records.spread(values), digits)
    heads = ["format", *(f"rate 1e{np.log10(float(x)):.0f}" for x in record["runs"])]
    lines = {name: [name] for name in ROWS}
    for runs in record["runs"].values():
        master = ends(runs["float32 master"])
        lines["float32 master"].append(shown(master, 3))
        for name in lines.keys() - {"float32 master"}:
            lines[name].append(shown(ends(runs[name]) - master, 4))
    return records.table(heads, list(lines.values()))


def idle(record: dict) -> str:
    """Return the reward of the weights at the start."""
    ends = np.asarray(record["not_trained"]["curves"])[:, -1]
    return records.shown(records.spread(ends), 3)


def text(record: dict) -> str:
    return f"{table(record)}\n\nnot trained: {idle(record)}"


@pictures.panels(3.6, (1,) * len(RATES), columns=4)
def draw(record: dict, *panels) -> str:
    """Draw the rewards minus the rewards of the weights at the start."""
    idle = np.mean(record["not_trained"]["curves"], 0)
    steps = np.arange(1, 21) * record["options"]["steps"] / 20
    looks = pictures.looks(ROWS).items()
    for axes, (rate, runs) in zip(panels, record["runs"].items(), strict=True):
        for i, (name, look) in enumerate(looks):
            curve = np.mean(runs[name]["curves"], 0) - idle
            look |= {"ls": pictures.LINES[i], "markevery": (i, 4)}
            axes.plot(steps, curve, label=name, **look)
        axes.set(title=f"learning rate 1e{np.log10(float(rate)):.0f}", xlabel="step")
    panels[0].set(ylabel="reward gained, mean of the seeds (higher is better)")
    return (
        "At small learning rates, plain bfloat16 learns almost nothing; stochastic "
        "rounding and lowbit follow the float32 master"
    )


def measure(args) -> dict:
    runs = {
        f"{rate:g}": {name: train(name, rate, args) for name in ROWS} for rate in RATES
    }
    return {"runs": runs, "not_trained": train("float32 master", 0.0, args)}


main = records.program(__name__, seeds=3, steps=200)
