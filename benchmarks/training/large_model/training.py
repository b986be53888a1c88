"""Start a run on a mesh, train it for a step, and convert it to another format."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

import lowbit_optax
from benchmarks.training.large_model.formats import MAX_GRAD_NORM, Format
from benchmarks.training.large_model.model import SPECS, Llama
from lowbit_optax import release


class Run(NamedTuple):
    """Everything that a checkpoint contains, as trees of sharded arrays."""

    params: Any
    state: Any
    average: Any
    average_state: Any


class Training:
    """The functions of a run, for one format and one mesh."""

    def __init__(self, model: Llama, format_: Format, steps: int, mesh: Mesh):
        self.model, self.format, self.mesh = model, format_, mesh
        self.placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
        self.tx = format_.optimizer(steps, self.placed)
        self.ema = lowbit_optax.ema_of_params(0.9, param_shardings=self.placed)
        self.shapes = jax.eval_shape(self._begin, model.shapes())
        self.shardings = Run(
            self.placed,
            lowbit_optax.state_shardings(self.tx, self.shapes.params, self.placed),
            self.placed,
            lowbit_optax.state_shardings(self.ema, self.shapes.average, self.placed),
        )
        self.train_step = jax.jit(
            self._train_step, donate_argnums=0, out_shardings=(None, self.shardings)
        )

    def start(self, factor: float) -> Run:
        """Start from random float32 weights, which are sharded from the beginning."""
        init = lambda key, by: jax.tree.map(lambda x: x * by, self.model.init(key))
        weights = jax.jit(init, out_shardings=self.placed)(jax.random.key(0), factor)
        return jax.jit(self._begin, out_shardings=self.shardings)(weights)

    def targets(self) -> Run:
        """Return shapes with shardings, for restoring a checkpoint."""
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(place, self.shapes, self.shardings)

    def convert(self, run: Run, source: "Training") -> Run:
        """Convert a run to this format. The average keeps its own format."""
        change = functools.partial(
            lowbit_optax.convert,
            from_tx=source.tx,
            to_tx=self.tx,
            dtype=jax.tree.map(lambda x: x.dtype, self.shapes.params),
        )
        places = self.shardings[:2]
        changed = jax.jit(change, out_shardings=places)(run.params, run.state)
        return run._replace(params=changed[0], state=changed[1])

    def masters(self, run: Run):
        """Return the float32 weights of a run."""
        if self.format.is_plain:
            return run.params
        return lowbit_optax.master_weights(run.params, run.state)

    def _begin(self, weights) -> Run:
        average, average_state = lowbit_optax.from_master(self.ema, weights)
        if self.format.is_plain:
            return Run(weights, self.tx.init(weights), average, average_state)
        params, state = lowbit_optax.from_master(self.tx, weights, self.format.dtype)
        return Run(params, state, average, average_state)

    def _train_step(self, run: Run, tokens: jax.Array):
        """Return the loss, and the run after a step; tokens are from `batch_of`."""
        if self.format.is_released:
            update = release.value_and_update(
                self.model.loss, self.tx, max_grad_norm=MAX_GRAD_NORM
            )
            rows = tokens.reshape(-1, tokens.shape[-1])
            loss, params, state = update(run.params, run.state, rows)
        else:
            loss, grads = self._gradients(run, tokens)
            params, state = lowbit_optax.step(self.tx, run.params, run.state, grads)
        run = run._replace(params=params, state=state)
        average, average_state = lowbit_optax.step(
            self.ema, run.average, run.average_state, self.masters(run)
        )
        return loss, run._replace(average=average, average_state=average_state)

    def _gradients(self, run: Run, tokens: jax.Array):
        """Return the mean loss and the mean float32 gradients of all microbatches."""
        if self.format.has_loss_scale:
            scaled = lowbit_optax.scaled_value_and_grad(self.model.loss)
            differentiate = lambda params, x: scaled(params, run.state, x)
        else:
            differentiate = jax.value_and_grad(self.model.loss)

        def add(sums, microbatch):
            found = differentiate(run.params, microbatch)
            return jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, found), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), run.params)
        zeros = jax.lax.with_sharding_constraint(zeros, self.placed)
        sums, _ = jax.lax.scan(add, (jnp.zeros([]), zeros), tokens)
        return jax.tree.map(lambda x: x / len(tokens), sums)
