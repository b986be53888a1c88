"""The JAX side of ``peers``: optax, flashoptim-jax and this package."""

import dataclasses
import functools
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks.peers import tasks
from tools.gpu_program.steps import with_master

ADAMW = {"b1": tasks.B1, "b2": tasks.B2, "eps": tasks.EPS, "weight_decay": tasks.DECAY}
BASELINE = "optax.adamw, float32"


@dataclasses.dataclass(frozen=True)
class Peer:
    """An optimizer.

    Attributes:
      dtype: the dtype of the parameters.
      make: a function of a learning rate, which returns the optimizer.
      advance: a function of an optimizer, parameters, state and gradients, which
        returns parameters and state.
      masters: a function of parameters and state, which returns the weights that the
        next step starts from.
    """

    dtype: Any
    make: Callable
    advance: Callable = lowbit_optax.step
    masters: Callable = lambda params, state: params

    def init(self, rate, params):
        """Return the state at the start."""
        return self.make(rate).init(params)

    def step(self, rate, params, state, grads):
        """Return parameters and state after a step."""
        return self.advance(self.make(rate), params, state, grads)

    def run(self, rates, params, state, grads):
        """Run one step for each element of the first axes of rates and gradients."""

        def one(carry, now):
            return self.step(now[0], *carry, now[1]), None

        return jax.lax.scan(one, (params, state), (rates, grads))[0]


def _optax(rate):
    return optax.adamw(rate, **ADAMW)


def _by_optax(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _master() -> Peer:
    """Return the usual mixed precision, with float32 state and a bfloat16 copy."""
    return Peer(
        jnp.bfloat16,
        lambda rate: with_master(_optax(rate)),
        lambda tx, params, state, grads: tx.update(grads, state, params),
        lambda params, state: state[0],
    )


def _ours(alias, **options) -> Peer:
    make = lambda rate: alias(rate, **ADAMW, **options)
    return Peer(jnp.bfloat16, make, masters=lowbit_optax.master_weights)


def _flash(fused: bool) -> Peer:
    flash = importlib.import_module("flashoptim_jax")

    def make(rate):
        # If the rate is an array, flash_adamw needs a schedule.
        rate = rate if isinstance(rate, float) else (lambda _, rate=rate: rate)
        return flash.flash_adamw(rate, master_weight_bits=24, fused=fused, **ADAMW)

    return Peer(
        jnp.bfloat16,
        make,
        lambda tx, params, state, grads: tx.step(params, state, grads),
        lambda params, state: flash.reconstruct_weights(params, state.ecc),
    )


FLASH = "flashoptim-jax flash_adamw"


def peers(fused_flash: bool = False) -> dict[str, Peer]:
    """Return the optimizers to compare, including flashoptim-jax if it is installed.

    Args:
      fused_flash: if True, flashoptim-jax uses its GPU kernels instead of XLA.
    """
    into_mu = lowbit_optax.stochastic_rounding(error_feedback="mu")
    found = {
        BASELINE: Peer(jnp.float32, _optax, _by_optax),
        "optax.adamw, float32 master": _master(),
        "optax.adamw, bfloat16": Peer(jnp.bfloat16, _optax, _by_optax),
        "kahan_adamw": _ours(lowbit_optax.kahan_adamw),
        "sr_adamw": _ours(lowbit_optax.sr_adamw),
        "extra_bits_adamw": _ours(lowbit_optax.extra_bits_adamw),
        "extra_bits_adamw(bits=8)": _ours(lowbit_optax.extra_bits_adamw, bits=8),
        "lowbit_adamw": _ours(lowbit_optax.lowbit_adamw),
        "lowbit, error into mu": Peer(
            jnp.bfloat16,
            lambda rate: lowbit_optax.lowbit(_optax(rate), weights=into_mu),
            masters=lowbit_optax.master_weights,
        ),
    }
    if importlib.util.find_spec("flashoptim_jax"):
        found[FLASH] = _flash(fused_flash)
    return found


# Measurements.


def stored(peer: Peer) -> float:
    """Return the bytes of parameters and optimizer state, per parameter."""
    params = {"w": jnp.zeros(tasks.STORED, peer.dtype)}
    state = peer.init(1e-3, params)
    size = params["w"].size
    return sum(x.nbytes for x in jax.tree.leaves((params, state))) / size


def _float32(tree) -> np.ndarray:
    (only,) = jax.tree.leaves(tree)
    return np.asarray(only, np.float32)


def _same_bits(a, b) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def failures(peer: Peer) -> tuple[dict[str, float | None], str]:
    """Return the error of each case, and whether a restored run is bit-identical."""
    run = jax.jit(peer.run)
    found, resume = {}, ""
    for name, case in tasks.cases().items():
        rates = jnp.full(tasks.HALF, case.rate, jnp.float32)
        halves = jnp.asarray(case.gradients, peer.dtype).reshape(
            2, tasks.HALF, *tasks.SHAPE
        )
        params = jnp.asarray(tasks.start(), peer.dtype)
        carry = params, jax.jit(peer.init)(rates[0], params)
        carry = run(rates, *carry, halves[0])
        half = _float32(peer.masters(*carry))
        saved = jax.tree.map(np.array, carry)
        carry = run(rates, *carry, halves[1])
        found[name] = tasks.error(case, half, _float32(peer.masters(*carry)))
        again = run(rates, *jax.tree.map(jnp.asarray, saved), halves[1])
        same = jax.tree.map(_same_bits, carry, again)
        resume = (
            "same bits" if jax.tree.all(same) and resume != "differs" else "differs"
        )
    return found, resume


def losses(peer: Peer, seeds: int) -> list[float]:
    """Return the final test loss for each seed."""
    rates = jnp.asarray([tasks.rate_at(i) for i in range(tasks.STEPS)], jnp.float32)

    def loss_of(params, inputs, classes):
        x = inputs
        for param in params[:-1]:
            x = jnp.tanh(x @ param.astype(jnp.float32))
        logits = x @ params[-1].astype(jnp.float32)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, classes)
        return losses.mean()

    def one(carry, now):
        rate, *batch = now
        params, state = carry
        grads = jax.grad(loss_of)(params, *batch)
        return peer.step(rate, params, state, grads), None

    @jax.jit
    def trained(weights, inputs, classes, *test):
        params = [w.astype(peer.dtype) for w in weights]
        carry = params, peer.init(rates[0], params)
        params, _ = jax.lax.scan(one, carry, (rates, inputs, classes))[0]
        return loss_of(params, *test)

    return [float(trained(*tasks.training(seed))) for seed in range(seeds)]


def time_ratios(some: dict[str, Peer]) -> dict[str, float]:
    """Return the time of a donated step, divided by the time of the baseline's step.

    Each round times one step of every optimizer. The result is the median over the
    rounds. Gradients are bfloat16 for every optimizer.
    """
    grads = jnp.full(tasks.TIMED, 0.01, jnp.bfloat16)
    carries, steps, times = {}, {}, {name: [] for name in some}
    for name, peer in some.items():
        params = jnp.ones(tasks.TIMED, peer.dtype)
        carries[name] = params, peer.init(1e-3, params)
        step = functools.partial(peer.step, 1e-3)
        steps[name] = jax.jit(step, donate_argnums=(0, 1))
        carries[name] = steps[name](*carries[name], grads)
    for _ in range(tasks.ROUNDS):
        for name in some:
            jax.block_until_ready(carries[name])
            start = time.perf_counter()
            carries[name] = jax.block_until_ready(steps[name](*carries[name], grads))
            times[name].append(time.perf_counter() - start)
    baseline = np.asarray(times[BASELINE])
    return {name: float(np.median(times[name] / baseline)) for name in some}


def seconds_to_trace(peer: Peer, model) -> float:
    """Return seconds to trace a step on a model's leaves to StableHLO, for a CPU."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, peer.dtype), model)
    state = jax.eval_shape(functools.partial(peer.init, 1e-3), params)
    step = jax.jit(functools.partial(peer.step, 1e-3), donate_argnums=(0, 1))
    start = time.perf_counter()
    step.lower(params, state, model)
    return time.perf_counter() - start
