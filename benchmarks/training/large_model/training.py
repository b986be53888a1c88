"""Start a run on a mesh, train it for a step, and convert it to another format."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

import lowbit_optax
from benchmarks.training.large_model.formats import MAX_GRAD_NORM, Format
from benchmarks.training.large_model.model import SPECS, Llama
from lowbit_optax import release


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
    """Return a mesh with this many devices along the axis `tensor`."""
    shape = len(jax.devices()) // tensor, tensor
    return jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def training_of(model: Llama, format_: Format, steps: int, mesh: Mesh) -> Training:
    """Return the optimizer and the average for a run with this number of steps."""
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    tx = format_.optimizer(steps, placed)
    ema = lowbit_optax.ema_of_params(0.9, param_shardings=placed)
    return Training(model, format_, mesh, placed, tx, ema)


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


def released_update(training: Training, run: Run, tokens: jax.Array):
    """Return the loss, and params and state, updated during the backward pass."""
    update = release.value_and_update(
        training.model.loss, training.tx, max_grad_norm=MAX_GRAD_NORM
    )
    sequences = tokens.reshape(-1, tokens.shape[-1])
    return update(run.params, run.state, sequences)


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
