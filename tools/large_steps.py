"""Compile training steps of Llama for one or several H200s or v6e chips.

The rows of the parameters are sharded over the devices. Each device has one sequence of
the batch. Parameters and state are donated.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from tools.gpu_program.release_steps import (
    compile_placed,
    to_float32,
    usual_mixed_precision,
)
from tools.gpu_program.steps import bytes_of
from tools.gpu_program.targets import gpu_mesh, shards
from tools.hlo import memory
from tools.models.llama import Llama, by_rows
from tools.tpu_program.targets import tpu_mesh

LENGTH = 4096
"""The number of tokens in a sequence."""

MESHES: dict[str, Callable[[], Mesh]] = {
    "1 H200": lambda: gpu_mesh(1, AxisType.Explicit),
    "8 H200s": lambda: gpu_mesh(8, AxisType.Explicit),
    "1 v6e": lambda: tpu_mesh("v6e:2x2", (1,), axis=AxisType.Explicit),
    "8 v6e's": lambda: tpu_mesh("v6e:2x4", (8,), axis=AxisType.Explicit),
}

GIB = 2**30
BLOCK_SIZE = 64
"""The number of quantized weights that share a step size."""

MEMORY = {"H200": 139 * GIB, "v6e": 31.25 * GIB}
"""The memory that programs can use on a device, in bytes.

XLA reserves part of the 32 GiB of a v6e.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step and its optimizer.

    Args:
      make_step: ``release_steps.plain``, ``usual_mixed_precision``, or
        ``release.value_and_update``.
      tx: the optimizer.
      bits: the number of bits of quantized weights; None for arrays.
    """

    make_step: Callable
    tx: typing.Any
    bits: int | None = None

    def params(self, model: Llama):
        """Return the parameters, as ShapeDtypeStructs."""
        shapes = model.shapes()
        if self.bits is not None:
            return quantized(model, self.bits)
        return to_float32(shapes) if self.make_step is usual_mixed_precision else shapes


def quantized(model: Llama, bits: int):
    """Return the shapes of a model with quantized matrices, in blocks of 64."""
    quantize = functools.partial(
        lowbit_optax.lpmm.quantize_params,
        bits=bits,
        block_size=BLOCK_SIZE,
        stacked=is_stacked,
        min_size=2**20,  # scales of norms stay float32
    )
    return jax.eval_shape(quantize, to_float32(model.shapes()))


def is_stacked(path: str) -> bool:
    """Return whether the first axis of a leaf is a stack of layers."""
    return "layers" in path


def device_bytes(case: Case, model: Llama, where: str) -> dict[str, int]:
    """Return the memory of a step on each device, from the compiled program.

    Args:
      case: the training step and its optimizer.
      model: the model.
      where: a key of :data:`MESHES`.

    Returns:
      Bytes of the parameters, the state, the carries between layers and the other
      temporary memory, and the peak.
    """
    mesh = MESHES[where]()
    devices = mesh.size
    params = case.params(model)

    def place(path, x) -> NamedSharding:
        return NamedSharding(mesh, by_rows(path, x) if devices > 1 else P())

    of_params = jax.tree_util.tree_map_with_path(place, params)
    tokens = jax.ShapeDtypeStruct(
        (devices, LENGTH + 1), jnp.int32, sharding=NamedSharding(mesh, P("d"))
    )
    step = case.make_step(model.loss, case.tx)
    compiled = compile_placed(step, case.tx, params, of_params, tokens)
    given = memory(compiled.program).argument_size_in_bytes
    carries = 2 * LENGTH * model.width * model.layers
    stored = bytes_of(shards(params, of_params))
    return {
        "parameters": stored,
        "state": given - stored - tokens.shape[1] * 4,
        "carries": carries,
        "temporary": compiled.temporary - carries,
        "peak": compiled.peak,
    }


def parameters(model: Llama) -> int:
    """Return the number of parameters of a model."""
    return sum(x.size for x in jax.tree.leaves(model.shapes()))
