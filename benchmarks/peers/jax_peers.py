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
    """An optimizer as a pair of functions.

    Attributes:
      dtype: the dtype of the parameters.
      init: a function of a learning rate and parameters, which returns a state.
      step: a function of a learning rate, parameters, state and gradients, which
        returns parameters and state.
      masters: a function of parameters and state, which returns the weights that the
        next step starts from.
    """

    dtype: Any
    init: Callable
    step: Callable
    masters: Callable = lambda params, state: params

    def run(self, rates, params, state, grads):
        """Run one step for each element of the first axes of rates and gradients."""

        def one(carry, now):
            return self.step(now[0], *carry, now[1]), None

        return jax.lax.scan(one, (params, state), (rates, grads))[0]


def _optax(rate):
    return optax.adamw(rate, **ADAMW)


def _plain(make, dtype) -> Peer:
    def step(rate, params, state, grads):
        updates, state = make(rate).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Peer(dtype, lambda rate, params: make(rate).init(params), step)


def _master() -> Peer:
    """Return the usual mixed precision, with float32 state and a bfloat16 copy."""
    return Peer(
        jnp.bfloat16,
        lambda rate, params: with_master(_optax(rate)).init(params),
        lambda rate, params, state, grads: with_master(_optax(rate)).update(
            grads, state, params
        ),
        lambda params, state: state[0],
    )


def _lowbit_adamw(rate, *, b1, b2, eps, weight_decay, **formats):
    inner = optax.adamw(rate, b1, b2, eps, weight_decay=weight_decay)
    return lowbit_optax.lowbit(inner, **formats)


def _ours(alias, **options) -> Peer:
    def make(rate):
        return alias(rate, **ADAMW, **options)

    def step(rate, params, state, grads):
        return lowbit_optax.step(make(rate), params, state, grads)

    return Peer(
        jnp.bfloat16,
        lambda rate, params: make(rate).init(params),
        step,
        lowbit_optax.master_weights,
    )


def _flash(fused: bool) -> Peer:
    def make(rate):
        flash = importlib.import_module("flashoptim_jax")
        # If the rate is an array, flash_adamw needs a schedule.
        rate = rate if isinstance(rate, float) else (lambda _, rate=rate: rate)
        return flash.flash_adamw(rate, master_weight_bits=24, fused=fused, **ADAMW)

    def masters(params, state):
        flash = importlib.import_module("flashoptim_jax")
        return flash.reconstruct_weights(params, state.ecc)

    return Peer(
        jnp.bfloat16,
        lambda rate, params: make(rate).init(params),
        lambda rate, params, state, grads: make(rate).step(params, state, grads),
        masters,
    )


FLASH = "flashoptim-jax flash_adamw"


def peers(fused_flash: bool = False) -> dict[str, Peer]:
    """Return the optimizers to compare, including flashoptim-jax if it is installed.

    Args:
      fused_flash: if True, flashoptim-jax uses its GPU kernels instead of XLA.
    """
    into_mu = lowbit_optax.stochastic_rounding(error_feedback="mu")
    found = {
        BASELINE: _plain(_optax, jnp.float32),
        "optax.adamw, float32 master": _master(),
        "optax.adamw, bfloat16": _plain(_optax, jnp.bfloat16),
        "kahan_adamw": _ours(lowbit_optax.kahan_adamw),
        "sr_adamw": _ours(lowbit_optax.sr_adamw),
        "extra_bits_adamw": _ours(lowbit_optax.extra_bits_adamw),
        "extra_bits_adamw(bits=8)": _ours(lowbit_optax.extra_bits_adamw, bits=8),
        "lowbit_adamw": _ours(lowbit_optax.lowbit_adamw),
        "lowbit, error into mu": _ours(_lowbit_adamw, weights=into_mu),
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
