"""Lowers and compiles programs for H100s, H200s and B200s on a machine without a GPU.

XLA's CUDA compiler runs without a device when it is given the target's description. It
needs the ``gpu-program`` extra, or jax's plugin for CUDA 13 and ptxas, and nothing else
of CUDA. What it returns is the real XLA:GPU program: fusions, buffer assignment,
collectives.
"""

import dataclasses
import tempfile
import typing
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tools.gpu_program import mosaic


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Args:
      name: of the product.
      capability: major number of its compute capability.
      cores: streaming multiprocessors.
      bandwidth: of its memory, bytes per second.
      memory: bytes.
      l2_cache: bytes.
      clock_ghz: of its cores.
    """

    name: str
    capability: int
    cores: int
    bandwidth: int
    memory: int
    l2_cache: int
    clock_ghz: float

    @property
    def description(self) -> str:
        """The GPU as XLA's compiler wants it described."""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: {self.cores}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  memory_bandwidth: {self.bandwidth}  l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock_ghz}  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {self.capability} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  device_address_bits: 64  ecc_enabled: true
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {self.capability}.0a"
  driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  name: "NVIDIA {self.name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA {self.name}"
"""


H100 = Target("H100", 9, 132, 3_350_000_000_000, 85017493504, 52428800, 1.98)
H200 = Target("H200", 9, 132, 4_800_000_000_000, 151397597184, 52428800, 1.98)
B200 = Target("B200", 10, 148, 7_672_320_000_000, 191514411008, 132644864, 1.965)
TARGETS = {target.name: target for target in (H100, H200, B200)}


def gpu_mesh(
    count: int = 1, axis: AxisType = AxisType.Auto, target: Target = H200
) -> Mesh:
    """A mesh of ``count`` GPUs, 8 per host, with the one axis ``d`` of a type."""
    of_a_host = min(count, 8)
    if count % of_a_host:
        raise ValueError(f"gpu_mesh: count is {count}, not at most 8 or 8 per host")
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=target.name.lower(),
        target_config=target.description,
        topology=f"1 x {count // of_a_host} x {of_a_host}",
    )
    return Mesh(np.array(topology.devices), ("d",), axis_types=(axis,))


def trace_for(
    mesh: Mesh,
    fn,
    *args,
    spec: P | Callable[[typing.Any], P] | None = None,
    donate: Sequence[int] = (),
) -> jax.stages.Traced:
    """Trace ``fn`` for a mesh, which must be in force (``jax.set_mesh``).

    From JAX 0.11 Pallas reads the GPU that it lowers for from the mesh in force.

    Args:
      mesh: from :func:`gpu_mesh`.
      fn: of the arguments; its outputs are placed like arguments of their shape.
      *args: trees of arrays or ShapeDtypeStructs.
      spec: PartitionSpec of every array of rank 2 or more, or a function from such an
        array to its PartitionSpec; replicated if None.
      donate: argument numbers.
    """

    def place(x):
        chosen = P()
        if x.ndim >= 2 and spec is not None:
            chosen = spec if isinstance(spec, P) else spec(x)
        sharding = NamedSharding(mesh, chosen)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = jax.tree.map(place, args)
    out = NamedSharding(mesh, P())
    if spec is not None:  # then their shapes matter, for which fn is traced
        out = jax.tree.map(lambda x: place(x).sharding, jax.eval_shape(fn, *args))
    jitted = jax.jit(fn, donate_argnums=donate, out_shardings=out, keep_unused=True)
    return jitted.trace(*placed)


def lower_for(mesh: Mesh, fn, *args, **options) -> jax.stages.Lowered:
    """Lower ``fn`` for a mesh; the arguments are those of :func:`trace_for`."""
    with jax.set_mesh(mesh):
        return trace_for(mesh, fn, *args, **options).lower()


def compile_lowered(
    lowered: jax.stages.Lowered, options: dict[str, str | bool] | None = None
) -> jax.stages.Compiled:
    """Compile a program from :func:`lower_for`.

    Kernels on shards are lowered only now, so the mesh must be in force again.
    """
    mesh = jax.tree.leaves(lowered.out_info)[0].sharding.mesh
    with tempfile.TemporaryDirectory() as folder, mosaic.dumped_to(folder):
        with jax.set_mesh(mesh):
            compiled = lowered.compile(compiler_options=options)
        mosaic.remember(compiled.as_text() or "", folder)
    return compiled


def compile_for(mesh: Mesh, fn, *args, **options) -> jax.stages.Compiled:
    """Compile ``fn`` for a mesh; the arguments are those of :func:`lower_for`."""
    return compile_lowered(lower_for(mesh, fn, *args, **options))
