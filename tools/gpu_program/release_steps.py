"""Compile training steps of two models with stacked layers for H200s.

A step without gradient release computes all gradients and then calls
``lowbit_optax.step``. The usual mixed precision stores parameters and moments in
float32, and casts the parameters to bfloat16 in every step.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from tools.gpu_program.steps import bytes_of
from tools.gpu_program.targets import compile_lowered, gpu_mesh, lower_for, placed
from tools.hlo import collectives, memory
from tools.models.gpt import GPT, to_bfloat16

BF16 = jnp.bfloat16
MIB = 2**20

MEMORY_FIRST: dict[str, str | bool] = {"xla_gpu_enable_latency_hiding_scheduler": False}
"""Options that make XLA schedule for low memory use, the default before JAX 0.12.

The other scheduler hides communication, and ignores memory until it is nearly full. For
example, it computes the gradient of a layer while the layer's weights are still needed.
"""


@dataclasses.dataclass(frozen=True)
class Model:
    """The shapes of a model, and its loss.

    Args:
      loss_fn: a function of parameters and a batch.
      params: ShapeDtypeStructs; ``["layers"]`` is stacked.
      batch: a ShapeDtypeStruct.
      carry: the number of bytes that one layer passes to the next.
      layers: the number of layers.
    """

    loss_fn: Callable
    params: typing.Any
    batch: jax.ShapeDtypeStruct
    carry: int
    layers: int

    @property
    def one_layer(self) -> int:
        """The bytes of the parameters, or of the gradients, of one layer."""
        return bytes_of(self.params["layers"]) // self.layers


def matrices(layers=12, width=4096, batch=512) -> Model:
    """Return layers ``tanh(h @ w)``, which backpropagation recomputes."""

    def loss_fn(params, h):
        body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        h, _ = jax.lax.scan(body, h, params["layers"])
        return jnp.mean(h.astype(jnp.float32) ** 2)

    rows = jax.ShapeDtypeStruct((batch, width), BF16)
    stack = jax.ShapeDtypeStruct((layers, width, width), BF16)
    return Model(loss_fn, {"layers": stack}, rows, bytes_of(rows), layers)


def transformer(
    layers=12, width=2048, heads=16, context=1024, batch=4, remat=True
) -> Model:
    """Return the GPT of ``tools/models``."""
    gpt = GPT(layers, width, heads, context, "full" if remat else "none", BF16)
    params = jax.eval_shape(lambda: to_bfloat16(gpt.init(jax.random.key(0))))
    tokens = jax.ShapeDtypeStruct((batch, context + 1), jnp.int32)
    return Model(gpt.loss, params, tokens, 2 * batch * context * width, layers)


def plain(loss_fn: Callable, tx: optax.GradientTransformation) -> Callable:
    """Return a training step that computes all gradients, then runs the optimizer."""

    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return loss, *lowbit_optax.step(tx, params, opt_state, grads)

    return train_step


def plain_scaled(loss_fn: Callable, tx: optax.GradientTransformation) -> Callable:
    """Return a :func:`plain` step with a scaled loss, for ``with_loss_scale``."""

    def train_step(params, opt_state, batch):
        differentiate = lowbit_optax.scaled_value_and_grad(loss_fn)
        loss, grads = differentiate(params, opt_state, batch)
        return loss, *lowbit_optax.step(tx, params, opt_state, grads)

    return train_step


def in_float16(model: Model) -> Model:
    """Return the model with float16 arrays instead of bfloat16 arrays."""

    def cast(x):
        dtype = jnp.float16 if x.dtype == BF16 else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype)

    params, batch = jax.tree.map(cast, (model.params, model.batch))
    return dataclasses.replace(model, params=params, batch=batch)


def usual_mixed_precision(
    loss_fn: Callable, tx: optax.GradientTransformation
) -> Callable:
    """Return an optax step on float32 parameters, with gradients of a bfloat16 copy."""

    def train_step(params, opt_state, batch):
        copies = to_bfloat16(params)
        loss, grads = jax.value_and_grad(loss_fn)(copies, batch)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    return train_step


def to_float32(params):
    """Return the shapes of parameters, with dtype float32."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)


def by_rows(array) -> P:
    """Shard the rows of stacked layers. Other arrays are replicated."""
    return P(None, "d") if array.ndim == 3 else P()


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step.

    Args:
      program: the step.
      stored: the number of bytes of parameters and state.
    """

    program: jax.stages.Compiled
    stored: int

    @functools.cached_property
    def temporary(self) -> int:
        """The number of bytes of temporary memory."""
        return memory(self.program).temp_size_in_bytes

    @functools.cached_property
    def peak(self) -> int:
        """The number of bytes of arguments, results and temporary memory."""
        found = memory(self.program)
        held = found.argument_size_in_bytes + found.output_size_in_bytes
        return held - found.alias_size_in_bytes + found.temp_size_in_bytes

    @functools.cached_property
    def collectives(self) -> set[str]:
        """The kinds of collectives in the program."""
        return set(collectives(self.program))


def compile_step(
    make_step: Callable,
    model: Model,
    tx,
    devices: int = 1,
    options: Mapping[str, str | bool] = MEMORY_FIRST,
) -> CompiledStep:
    """Compile a step for H200s, with donated parameters and state.

    Args:
      make_step: :func:`plain`, :func:`usual_mixed_precision` or
        ``release.value_and_update``.
      model: the model to train. On several devices, the rows of its layers are sharded.
      tx: the optimizer.
      devices: the number of H200s, at most 8.
      options: compiler options of XLA.
    """
    usual = make_step is usual_mixed_precision
    params = to_float32(model.params) if usual else model.params
    state = jax.eval_shape(tx.init, params)
    step = make_step(model.loss_fn, tx)
    arguments, spec = (params, state, model.batch), by_rows if devices > 1 else None
    mesh = gpu_mesh(devices)
    lowered = lower_for(mesh, step, *arguments, spec=spec, donate=(0, 1))
    program = compile_lowered(lowered, dict(options))
    return CompiledStep(program, bytes_of(params, state))


def compile_placed(
    step: Callable, tx, params, of_params, batch, options=None
) -> CompiledStep:
    """Compile a step for a mesh, with donated parameters and state.

    Args:
      step: the training step.
      tx: the optimizer of the step.
      params: ShapeDtypeStructs.
      of_params: the NamedShardings of ``params``.
      batch: a ShapeDtypeStruct with its NamedSharding.
      options: compiler options of XLA.
    """
    of_state = lowbit_optax.state_shardings(tx, params, of_params)
    state = jax.eval_shape(tx.init, params)
    mesh = batch.sharding.mesh
    out = NamedSharding(mesh, P()), of_params, of_state
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
    arguments = placed(params, of_params), placed(state, of_state), batch
    with jax.set_mesh(mesh):
        lowered = jitted.lower(*arguments)
    return CompiledStep(compile_lowered(lowered, options), bytes_of(params, state))
