"""``step_memory``: the memory of a training step, predicted and compiled with XLA."""

import contextlib
import dataclasses
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lowbit_optax._arguments import check_transformation, check_type
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._step import trees
from lowbit_optax._tables import Table, Tabular
from lowbit_optax._types import Function, PyTree, Transformation
from lowbit_optax.lpmm.gradients import value_and_grad
from lowbit_optax.reports.memory import gradient_bytes, released
from lowbit_optax.states.sharding import state_shardings
from lowbit_optax.transformations.step import step as lowbit_step

_ON_CPUS = """\
XLA converts bfloat16 arrays to float32 on CPUs, so the step may need much less memory
on a GPU or TPU. Pass shardings on a described device to compile for it; see
docs/memory.md."""


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """The memory of one device during a step, in bytes.

    Args:
      arguments: parameters, state and batch.
      temporary: arrays that exist only within the step. The prediction includes
        gradients but not activations.
      outputs: new parameters and state, and the loss.
      in_place: the part of the outputs that overwrites arguments.
    """

    arguments: int
    temporary: int
    outputs: int
    in_place: int

    @property
    def peak(self) -> int:
        """The peak number of bytes in use."""
        return self.arguments + self.temporary + self.outputs - self.in_place


@dataclasses.dataclass(frozen=True, repr=False)
class StepMemory(Tabular):
    """The result of :func:`step_memory`; ``print`` it.

    Args:
      predicted: the bytes computed from shapes and dtypes.
      compiled: the bytes that XLA reports for the compiled program.
      platform: the platform of the program, such as ``"cpu"`` or ``"cuda"``.
    """

    predicted: StepBytes
    compiled: StepBytes
    platform: str

    def table(self) -> Table:
        """Return the predicted and compiled bytes, with a row for each part."""
        parts = ("arguments", "temporary", "outputs", "in_place", "peak")
        both = self.predicted, self.compiled
        rows = [(part, *(f"{getattr(x, part):,}" for x in both)) for part in parts]
        notes = ["predicted temporary memory does not include activations"]
        if self.platform == "cpu":
            notes.append(_ON_CPUS)
        title = f"bytes per device, compiled for {self.platform}"
        return Table(title, [("", "predicted", "compiled"), *rows], notes)


def step_memory(
    tx: Transformation,
    params: PyTree,
    loss_fn: Function,
    *batch: PyTree,
    release: bool = False,
    shardings: typing.Any = None,
    grad_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    stacked: Callable[[str], bool] | None = None,
) -> StepMemory:
    """Compile a training step without running it, and report its memory.

    Compiled for a CPU, a bfloat16 step needs more memory than on a GPU or TPU, because
    XLA converts bfloat16 arrays to float32 there.

        predicted peak = params + state + batch + gradients + loss

    The step is ``jax.value_and_grad`` and :func:`lowbit_optax.step`, or
    :func:`lowbit_optax.release.value_and_update`. Parameters and state are donated.

    Args:
      tx: an optax transformation.
      params: tree of arrays or ShapeDtypeStructs.
      loss_fn: a function ``(params, *batch) -> scalar``. To use a QuantizedTensor, it
        calls :func:`lowbit_optax.lpmm.dequantize`.
      *batch: trees of arrays or ShapeDtypeStructs. Arrays without a sharding are
        replicated on all devices.
      release: if True, parameters are updated inside the backward pass.
      shardings: NamedShardings of the parameters, as for :func:`state_shardings`. The
        state is sharded like the parameters. You do not need the devices of the mesh,
        which may come from ``jax.experimental.topologies``. If None, all arrays are on
        one device of the default backend.
      grad_dtype, stacked: see :func:`memory_report`.

    Returns:
      A :class:`StepMemory`; ``print`` it.

    Raises:
      TypeError: if a sharding is not a NamedSharding, or if ``grad_dtype`` is not a
        float dtype.
      ValueError: if ``shardings`` do not match a parameter, or if the compiler does not
        report memory.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)}
    >>> loss_fn = lambda params, x: jnp.sum((x @ params["w"]) ** 2, dtype=jnp.float32)
    >>> x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    >>> found = step_memory(lowbit_optax.kahan_adamw(1e-3), params, loss_fn, x)
    >>> found.compiled.arguments == found.predicted.arguments
    True
    """
    check_transformation("step_memory", "tx", tx)
    grad_dtype = float_dtype("step_memory: grad_dtype", grad_dtype)
    params, batch = trees.abstract(params), jax.tree.map(_abstract, batch)
    state = jax.eval_shape(tx.init, params)
    placed, mesh = (params, state, *batch), None
    if shardings is not None:
        placed, mesh = _placed(tx, params, state, batch, shardings)
    advance = _step(tx, loss_fn, release, grad_dtype)
    of_results = (None, *jax.tree.map(lambda x: x.sharding, placed[:2]))
    jitted = jax.jit(advance, donate_argnums=(0, 1), out_shardings=of_results)
    # Since JAX 0.11, Pallas lowers for the GPU of the current mesh.
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
    """Return parameters, state and batch with shardings, and their mesh."""
    given = jax.tree.leaves(shardings)
    for sharding in given:
        argument = "step_memory: shardings"
        check_type(argument, sharding, jax.NamedSharding, "NamedShardings")
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
    return jax.eval_shape(jnp.asarray, x).update(sharding=named)


def _local_bytes(x) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _predicted(params, placed, release: bool, grad_dtype, stacked) -> StepBytes:
    """Predict memory from shard sizes. Gradients are sharded like their parameters."""
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
        raise ValueError("step_memory: the compiler did not report the step's memory")
    return StepBytes(
        found.argument_size_in_bytes,
        found.temp_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
    )
