"""Lowers and compiles programs for H200s on a machine without a GPU.

XLA's CUDA compiler runs without a device when it is given the target's description. It
needs the ``gpu-program`` extra and nothing else of CUDA. What it returns is the real
XLA:GPU program: fusions, buffer assignment, collectives.
"""

import contextlib

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  device_address_bits: 64  ecc_enabled: true
  device_vendor: "NVIDIA Corporation"  platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  name: "NVIDIA H200"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def h200_mesh(count: int = 1, axis: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of ``count`` H200s, 8 per host, with the one axis ``d`` of a type."""
    of_a_host = min(count, 8)
    if count % of_a_host:
        raise ValueError(f"h200_mesh: count is {count}, not at most 8 or 8 per host")
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        target_config=H200,
        topology=f"1 x {count // of_a_host} x {of_a_host}",
    )
    return Mesh(np.array(topology.devices), ("d",), axis_types=(axis,))


def lower_for(mesh: Mesh, fn, *args, spec=None, donate=()) -> jax.stages.Lowered:
    """Lower ``fn`` for a mesh.

    Args:
      mesh: from :func:`h200_mesh`.
      fn: of the arguments; its outputs are placed like arguments of their shape.
      *args: trees of arrays or ShapeDtypeStructs.
      spec: PartitionSpec of every array of rank 2 or more, or a function from such an
        array to its PartitionSpec; replicated if None.
      donate: argument numbers.
    """

    def place(x):
        chosen = spec(x) if callable(spec) and x.ndim >= 2 else spec
        sharding = NamedSharding(mesh, chosen if chosen and x.ndim >= 2 else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = jax.tree.map(place, args)
    out = jax.tree.map(lambda x: place(x).sharding, jax.eval_shape(fn, *args))
    jitted = jax.jit(fn, donate_argnums=donate, out_shardings=out, keep_unused=True)
    explicit = AxisType.Explicit in mesh.axis_types
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        return jitted.lower(*placed)


def compile_for(mesh: Mesh, fn, *args, **options) -> jax.stages.Compiled:
    """Compile ``fn`` for a mesh; the arguments are those of :func:`lower_for`."""
    return lower_for(mesh, fn, *args, **options).compile()
