"""Compile training steps of transformer blocks for meshes of H200s.

FSDP shards the batch and the rows of each parameter over the axis ``data``, and gathers
a parameter where it is used. Tensor parallelism shards the heads and the hidden units
of each block over the axis ``model``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tools.gpu_program.release_steps import (
    MEMORY_FIRST,
    CompiledStep,
    Model,
    compile_placed,
)
from tools.gpu_program.steps import bytes_of, leaf
from tools.gpu_program.targets import gpu_mesh, placed
from tools.models.llama import rms_norm

FSDP = {"in": P("data"), "out": P("data")}
TENSOR_PARALLEL = {"in": P(None, "model"), "out": P("model")}
BOTH = {"in": P("data", "model"), "out": P("model", "data")}
"""PartitionSpecs of the matrices before ("in") and after ("out") the hidden units."""

MESHES = {
    "fsdp on 8": (8, 1, FSDP),
    "fsdp on 256": (256, 1, FSDP),
    "tensor parallel on 8": (1, 8, TENSOR_PARALLEL),
    "both on 256": (32, 8, BOTH),
}
"""The lengths of ``data`` and ``model``, and the PartitionSpecs of the parameters."""

_ONE_BY_ONE: dict[str, str | bool] = {
    "xla_gpu_all_gather_combine_threshold_bytes": "0",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "0",
    "xla_gpu_all_reduce_combine_threshold_bytes": "0",
}
"""Options that do not combine collectives.

XLA combines collectives of up to 30 MB. In these small models, it would combine the
gathers of all layers, which it would not do in a large model.
"""

_MATRICES = {"qkv": "in", "mixed": "out", "up": "in", "down": "out"}


def mesh_of(data: int, model: int) -> Mesh:
    """Return a mesh of H200s with the axes ``data`` and ``model``."""
    devices = gpu_mesh(data * model).devices.reshape(data, model)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def blocks(batch: int, is_scanned: bool) -> Model:
    """Return a model of four transformer blocks without biases.

    The backward pass recomputes each block.

    Args:
      batch: the batch size of all devices together.
      is_scanned: whether the blocks are stacked and run in ``lax.scan``.
    """
    layers, width, heads, context = 4, 512, 8, 64

    @jax.checkpoint
    def block(x, p):
        split = (rms_norm(x) @ p["qkv"]).reshape(*x.shape[:2], heads, -1)
        parts = jnp.split(split, 3, axis=-1)
        mixed = jax.nn.dot_product_attention(*parts, is_causal=True)
        x += mixed.reshape(x.shape) @ p["mixed"]
        x += jax.nn.gelu(rms_norm(x) @ p["up"]) @ p["down"]
        return jax.lax.with_sharding_constraint(x, P("data"))

    def loss_fn(params, x):
        if is_scanned:
            x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = block(x, p)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    layer = {
        "qkv": leaf(width, 3 * width),
        "mixed": leaf(width, width),
        "up": leaf(width, 4 * width),
        "down": leaf(4 * width, width),
    }
    stacked = jax.tree.map(lambda x: leaf(layers, *x.shape), layer)
    params = {"layers": stacked if is_scanned else [layer] * layers}
    x = leaf(batch, context, width)
    return Model(loss_fn, params, x, bytes_of(x), layers)


def compile_sharded(
    make_step: Callable, model: Model, tx, mesh: Mesh, specs: dict[str, P]
) -> CompiledStep:
    """Compile a step of :func:`blocks`, with donated parameters and state.

    Args:
      make_step: ``release_steps.plain`` or ``release.value_and_update``.
      model: the model, from :func:`blocks`.
      tx: the optimizer.
      mesh: the mesh, from :func:`mesh_of`.
      specs: :data:`FSDP`, :data:`TENSOR_PARALLEL` or :data:`BOTH`.
    """

    def sharding(path, x) -> NamedSharding:
        spec = specs[_MATRICES[path[-1].key]]
        return NamedSharding(mesh, P(*(None,) * (x.ndim - 2), *spec))

    of_params = jax.tree_util.tree_map_with_path(sharding, model.params)
    batch = placed(model.batch, NamedSharding(mesh, P("data")))
    step, options = make_step(model.loss_fn, tx), {**MEMORY_FIRST, **_ONE_BY_ONE}
    return compile_placed(step, tx, model.params, of_params, batch, options)
