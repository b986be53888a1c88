"""The AdamW steps that ``gpu_step.py`` times, and their live arrays."""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks.leaf_sets import LeafSet

RATE, DECAY = 1e-3, 1e-4
BASELINE = "optax_adamw_float32"
GRADIENTS = jnp.bfloat16

Step = Callable[[typing.Any, typing.Any, typing.Any], tuple[typing.Any, typing.Any]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One way to call an optimizer: by ``step``, or by ``update``."""

    entry: str
    implementation: str
    step: Step

    @property
    def name(self) -> str:
        return f"{self.entry}, {self.implementation}"

    @property
    def priority(self) -> int:
        """What is left out first when time runs short has the largest."""
        return (self.entry == "update") + 2 * (self.implementation == "xla")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer and its entries, which share parameters and state.

    Args:
      name: in the table.
      dtype: of the parameters.
      init: parameters to state.
      entries: ways to step.
      reads_params: False where the new parameters come of the state alone.
    """

    name: str
    dtype: typing.Any
    init: Callable
    entries: tuple[Entry, ...]
    reads_params: bool = True


def _wide(grads):
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads)


def _plain(tx: optax.GradientTransformation, convert: Callable = lambda g: g) -> Step:
    def step(params, state, grads):
        updates, state = tx.update(convert(grads), state, params)
        return optax.apply_updates(params, updates), state

    return step


def _baselines() -> list[Optimizer]:
    """The usual ones: in float32, with a float32 master, and in bfloat16 throughout."""
    tx = optax.adamw(RATE, weight_decay=DECAY)

    def init_master(params):
        master = _wide(params)
        return master, tx.init(master)

    def master_step(params, state, grads):
        del params
        master, inner = _plain(tx, _wide)(*state, grads)
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), master), (master, inner)

    def entry(step):
        return (Entry("step", "optax", step),)

    float32 = entry(_plain(tx, _wide))
    return [
        Optimizer(BASELINE, jnp.float32, tx.init, float32),
        Optimizer(
            "optax_adamw_master", jnp.bfloat16, init_master, entry(master_step), False
        ),
        Optimizer("optax_adamw_bfloat16", jnp.bfloat16, tx.init, entry(_plain(tx))),
    ]


def _lowbit(name: str, alias: Callable, **options) -> Optimizer:
    """An alias, with its default implementation and with XLA's."""
    entries = []
    choices = {"default": None, "xla": "xla"}
    if "implementation" not in inspect.signature(alias).parameters:
        choices = {"default": None}
    for label, implementation in choices.items():
        chosen = {} if implementation is None else {"implementation": implementation}
        tx = alias(RATE, weight_decay=DECAY, **options, **chosen)

        def fast(params, state, grads, tx=tx):
            return lowbit_optax.step(tx, params, state, grads)

        entries += [Entry("step", label, fast), Entry("update", label, _plain(tx))]
    init = alias(RATE, weight_decay=DECAY, **options).init
    return Optimizer(name, jnp.bfloat16, init, tuple(entries))


def _flash() -> Optimizer:
    """FlashOptim's AdamW: 24-bit weights and 8-bit moments."""

    @functools.cache
    def made():
        return importlib.import_module("flashoptim_jax").flash_adamw(
            learning_rate=RATE, weight_decay=DECAY, master_weight_bits=24
        )

    step = lambda params, state, grads: made().step(params, state, grads)
    entries = (Entry("step", "flashoptim_jax", step),)
    init = lambda params: made().init(params)
    return Optimizer("flash_adamw", jnp.bfloat16, init, entries)


def optimizers() -> dict[str, Optimizer]:
    """All that can be had here, by name."""
    found = [
        *_baselines(),
        _lowbit("kahan_adamw", lowbit_optax.kahan_adamw),
        _lowbit("sr_adamw", lowbit_optax.sr_adamw),
        _lowbit("extra_bits_adamw_8", lowbit_optax.extra_bits_adamw, bits=8),
        _lowbit("extra_bits_adamw_16", lowbit_optax.extra_bits_adamw, bits=16),
    ]
    if hasattr(lowbit_optax, "lowbit_adamw"):
        found.append(_lowbit("lowbit_adamw", lowbit_optax.lowbit_adamw))
    if importlib.util.find_spec("flashoptim_jax"):
        found.append(_flash())
    return {each.name: each for each in found}


def gradients(leaf_set: LeafSet) -> list[jax.Array]:
    """Normal gradients in bfloat16."""
    keys = jax.random.split(jax.random.key(1), len(leaf_set.shapes))
    draw = lambda key, shape: jax.random.normal(key, shape, GRADIENTS)
    return [draw(*each) for each in zip(keys, leaf_set.shapes, strict=True)]


def nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


class Live:
    """An optimizer's parameters and state, which its entries advance in turn."""

    def __init__(self, optimizer: Optimizer, leaf_set: LeafSet, grads: list):
        self.optimizer, self.grads = optimizer, grads
        keys = jax.random.split(jax.random.key(0), len(leaf_set.shapes))
        draw = lambda key, shape: jax.random.normal(key, shape, optimizer.dtype)
        self.params = [draw(*each) for each in zip(keys, leaf_set.shapes, strict=True)]
        # No two donated arrays may share a buffer.
        self.state = jax.tree.map(jnp.copy, optimizer.init(self.params))
        jax.block_until_ready((self.params, self.state))
        self.stored_bytes = nbytes((self.params, self.state))
        self.moved_bytes = self._moved_bytes()

    def _moved_bytes(self) -> int:
        """Everything read once and, but for the gradients, written once."""
        reads = self.optimizer.reads_params + 1
        return reads * nbytes(self.params) + 2 * nbytes(self.state) + nbytes(self.grads)

    @property
    def arguments(self):
        return self.params, self.state, self.grads

    def advance(self, compiled: Callable, calls: int) -> None:
        """Run a compiled step so many times and wait for the last."""
        params, state = self.params, self.state
        for _ in range(calls):
            params, state = compiled(params, state, self.grads)
        self.params, self.state = jax.block_until_ready((params, state))
