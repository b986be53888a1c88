"""Training steps of Llama on one device or several, to compile for H200s and v6e's.

Parameters are spread over the devices by rows, and so is the batch, a sequence for each
device. Parameters and state are donated.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
"""Tokens of a sequence."""

MESHES: dict[str, Callable[[], Mesh]] = {
    "1 H200": lambda: gpu_mesh(1, AxisType.Explicit),
    "8 H200s": lambda: gpu_mesh(8, AxisType.Explicit),
    "1 v6e": lambda: tpu_mesh("v6e:2x2", (1,), axis=AxisType.Explicit),
    "8 v6e's": lambda: tpu_mesh("v6e:2x4", (8,), axis=AxisType.Explicit),
}

GIB = 2**30
MEMORY = {"H200": 139 * GIB, "v6e": 31.25 * GIB}
"""Of a device, what programs can have: all of an H200's; of a v6e's 32 GiB XLA keeps
some."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to train.

    Args:
      make_step: ``release_steps.plain``, ``usual_mixed_precision``, or
        ``release.value_and_update``.
      tx: the optimizer.
    """

    make_step: Callable
    tx: typing.Any

    def params(self, model: Llama):
        """The parameters, as ShapeDtypeStructs."""
        shapes = model.shapes()
        return to_float32(shapes) if self.make_step is usual_mixed_precision else shapes


def device_bytes(case: Case, model: Llama, where: str) -> dict[str, int]:
    """Bytes on each device during a step, by what they are, from the compiled program.

    Args:
      case, model: what to train, and how.
      where: a key of :data:`MESHES`.
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
    """How many a model has."""
    return sum(x.size for x in jax.tree.leaves(model.shapes()))
