"""``step_memory``: what a training step takes, as predicted and as XLA compiles it."""

import contextlib
import dataclasses
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._step import trees
from lowbit_optax._tables import Table, Tabular
from lowbit_optax._types import PyTree, Transformation
from lowbit_optax.lpmm.gradients import value_and_grad
from lowbit_optax.reports.memory import gradient_bytes, released
from lowbit_optax.states.sharding import state_shardings
from lowbit_optax.transformations.lowbit import step as lowbit_step


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes on one device during a step.

    Args:
      arguments: parameters, state and batch.
      temporary: what lives only within the step. Predicted are the gradients;
        compiled, also activations.
      outputs: new parameters and state, and the loss.
      in_place: of these, what is written where an argument was read.
    """

    arguments: int
    temporary: int
    outputs: int
    in_place: int

    @property
    def peak(self) -> int:
        """All that is held at once."""
        return self.arguments + self.temporary + self.outputs - self.in_place


@dataclasses.dataclass(frozen=True, repr=False)
class StepMemory(Tabular):
    """The report of :func:`step_memory`; ``print`` it.

    Args:
      predicted: from shapes alone.
      compiled: by XLA's analysis of the compiled program.
      platform: that it was compiled for, such as ``"cpu"`` or ``"cuda"``.
    """

    predicted: StepBytes
    compiled: StepBytes
    platform: str

    def table(self) -> Table:
        """Bytes per device, predicted and compiled, with a row for each part."""
        parts = ("arguments", "temporary", "outputs", "in_place", "peak")
        both = self.predicted, self.compiled
        rows = [(part, *(f"{getattr(x, part):,}" for x in both)) for part in parts]
        return Table(
            f"bytes per device, compiled for {self.platform}",
            [("", "predicted", "compiled"), *rows],
            ["predicted temporary memory has no activations"],
        )


def step_memory(
    tx: Transformation,
    params: PyTree,
    loss_fn: Callable,
    *batch,
    release: bool = False,
    shardings: typing.Any = None,
    grad_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    stacked: Callable[[str], bool] | None = None,
) -> StepMemory:
    """Compile a training step, without running it, and compare its memory with plans.

        predicted peak = params + state + batch + gradients + loss

    The step is ``jax.value_and_grad`` and :func:`lowbit_optax.step`, with ``release``
    :func:`lowbit_optax.release.value_and_update`; parameters and state are donated.
    Nothing is allocated but what the compiler needs.

    Args:
      tx: an optax transformation.
      params: tree of arrays or ShapeDtypeStructs.
      loss_fn: ``(params, *batch) -> scalar``. For a QuantizedTensor it calls
        :func:`lowbit_optax.lpmm.dequantize`.
      *batch: trees of arrays or ShapeDtypeStructs, which may have shardings; without
        them they are whole on each device.
      release: whether the step is in the backward pass.
      shardings: of the parameters, NamedShardings as for :func:`state_shardings`; the
        state's follow. Their mesh may be of devices that are not there, as
        ``jax.experimental.topologies`` describes them. If None, all is on one device of
        the default backend.
      grad_dtype, stacked: as for :func:`memory_report`.

    Returns:
      A :class:`StepMemory`; ``print`` it.

    Raises:
      TypeError: if a sharding is no NamedSharding, or ``grad_dtype`` is not a
        floating-point dtype.
      ValueError: if ``shardings`` do not fit; the error names the leaf. If the compiler
        does not analyse memory.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)}
    >>> loss_fn = lambda params, x: jnp.sum((x @ params["w"]) ** 2, dtype=jnp.float32)
    >>> x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    >>> found = step_memory(lowbit_optax.kahan_adamw(1e-3), params, loss_fn, x)
    >>> found.compiled.arguments == found.predicted.arguments
    True
    """
    grad_dtype = float_dtype("step_memory: grad_dtype", grad_dtype)
    params, batch = trees.abstract(params), jax.tree.map(_abstract, batch)
    state = jax.eval_shape(tx.init, params)
    placed, mesh = (params, state, *batch), None
    if shardings is not None:
        placed, mesh = _placed(tx, params, state, batch, shardings)
    advance = _step(tx, loss_fn, release, grad_dtype)
    of_results = (None, *jax.tree.map(lambda x: x.sharding, placed[:2]))
    jitted = jax.jit(advance, donate_argnums=(0, 1), out_shardings=of_results)
    # From JAX 0.11 Pallas reads the GPU that it lowers for from the mesh in force.
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        compiled = jitted.lower(*placed).compile()
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    predicted = _predicted(params, placed, release, grad_dtype, stacked)
    return StepMemory(predicted, _analysed(compiled), device.platform)


def _step(tx, loss_fn: Callable, release: bool, grad_dtype) -> Callable:
    if release:
        from lowbit_optax.release import value_and_update

        return value_and_update(loss_fn, tx, grad_dtype=grad_dtype)

    def train_step(params, state, *batch):
        differentiate = value_and_grad(loss_fn, grad_dtype, lazy=True)
        loss, grads = differentiate(params, *batch)
        return loss, *lowbit_step(tx, params, state, grads)

    return train_step


def _placed(tx, params, state, batch, shardings):
    """Parameters, state and batches with shardings, and the mesh of them."""
    given = jax.tree.leaves(shardings)
    for sharding in given:
        if not isinstance(sharding, jax.NamedSharding):
            raise TypeError(
                f"step_memory: a sharding is {sharding!r}; accepted are NamedShardings"
            )
    of_state = state_shardings(tx, params, shardings)
    of_params = jax.tree.broadcast(shardings, params)
    mesh = given[0].mesh
    whole = jax.NamedSharding(mesh, jax.P())
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    params, state = jax.tree.map(place, (params, state), (of_params, of_state))
    batch = jax.tree.map(lambda x: place(x, x.sharding or whole), batch)
    return (params, state, *batch), mesh


def _abstract(x) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    named = sharding if isinstance(sharding, jax.NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named)


def _local_bytes(x) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _predicted(params, placed, release: bool, grad_dtype, stacked) -> StepBytes:
    """From the shards of what is given, and of gradients like their parameters'."""
    local = lambda tree: sum(map(_local_bytes, jax.tree.leaves(tree)))
    updated = local(placed[:2])
    leaves = trees.named_leaves(placed[0])[1]
    sizes = []
    for leaf, (whole, one) in zip(
        leaves, gradient_bytes(params, grad_dtype, stacked), strict=True
    ):
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(leaf))
        sizes.append((one if release else whole) * local(leaf) // max(size, 1))
    temporary = released(sizes) if release else sum(sizes)
    loss = 4
    return StepBytes(local(placed), temporary, updated + loss, updated)


def _analysed(compiled: jax.stages.Compiled) -> StepBytes:
    found = compiled.memory_analysis()
    if found is None:
        raise ValueError("step_memory: this compiler does not analyse its memory")
    return StepBytes(
        found.argument_size_in_bytes,
        found.temp_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
    )
