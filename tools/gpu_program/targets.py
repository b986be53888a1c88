"""Lower and compile programs for GPUs on a machine without a GPU.

XLA's CUDA compiler needs only a description of the device. Install the ``gpu-program``
extra, or jax's plugin for CUDA 13 and ptxas; no other part of CUDA is needed. The
result is the real XLA:GPU program, with its fusions, buffer assignment and collectives.
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
class Architecture:
    """The properties that all GPUs of one compute capability share.

    Args:
      capability: the compute capability, such as "9.0".
      fpus: the number of float32 lanes of a streaming multiprocessor.
      threads: the maximum number of threads of a streaming multiprocessor.
      shared_memory: the number of bytes of shared memory in a streaming multiprocessor.
      of_a_block: the number of bytes of shared memory that one block can use.
    """

    capability: str
    fpus: int
    threads: int
    shared_memory: int
    of_a_block: int


# https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html
# lists threads and memory. The lanes are from its table of arithmetic throughput.
_KIB = 1024
_TURING = Architecture("7.5", 64, 1024, 64 * _KIB, 64 * _KIB)
_AMPERE = Architecture("8.0", 64, 2048, 164 * _KIB, 163 * _KIB)
_ADA = Architecture("8.9", 128, 1536, 100 * _KIB, 99 * _KIB)
_HOPPER = Architecture("9.0", 128, 2048, 228 * _KIB, 227 * _KIB)
_BLACKWELL = Architecture("10.0", 128, 2048, 228 * _KIB, 227 * _KIB)
_BLACKWELL_RTX = Architecture("12.0", 128, 1536, 100 * _KIB, 99 * _KIB)


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Args:
      name: the name of the product.
      kind: JAX's ``device_kind``.
      architecture: the architecture of the GPU.
      cores: the number of streaming multiprocessors.
      bandwidth: the memory bandwidth in bytes per second.
      memory: the size of the memory in bytes.
      l2_cache: the size of the L2 cache in bytes.
      clock_ghz: the clock rate of the cores.
    """

    name: str
    kind: str
    architecture: Architecture
    cores: int
    bandwidth: int
    memory: int
    l2_cache: int
    clock_ghz: float

    @property
    def description(self) -> str:
        """The description of the GPU for XLA's compiler."""
        of_all = self.architecture
        major, minor = of_all.capability.split(".")
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {of_all.shared_memory}
  shared_memory_per_block_optin: {of_all.of_a_block}
  threads_per_core_limit: {of_all.threads}
  core_count: {self.cores}  fpus_per_core: {of_all.fpus}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  memory_bandwidth: {self.bandwidth}  l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock_ghz}  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  device_address_bits: 64  ecc_enabled: true
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {of_all.capability}"
  driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  name: "{self.kind}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.kind}"
"""


# The figures of A100, H100, H200, B200 and RTX PRO 6000 are from XLA's descriptions,
# https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs.
# The figures of T4, L4, RTX 4090 and RTX 5090 are from NVIDIA's data sheets and white
# papers (Turing, Ada, RTX Blackwell), with nominal memory and the boost clock.
_GIB, _MIB = 2**30, 2**20
T4 = Target(
    *("T4", "Tesla T4", _TURING),
    *(40, 320_000_000_000, 16 * _GIB, 4 * _MIB, 1.59),
)
A100 = Target(
    *("A100", "NVIDIA A100-SXM4-80GB", _AMPERE),
    *(108, 2_039_040_000_000, 85100068864, 40 * _MIB, 1.41),
)
L4 = Target(
    *("L4", "NVIDIA L4", _ADA),
    *(58, 300_000_000_000, 24 * _GIB, 48 * _MIB, 2.04),
)
RTX_4090 = Target(
    *("RTX 4090", "NVIDIA GeForce RTX 4090", _ADA),
    *(128, 1_008_000_000_000, 24 * _GIB, 72 * _MIB, 2.52),
)
RTX_5090 = Target(
    *("RTX 5090", "NVIDIA GeForce RTX 5090", _BLACKWELL_RTX),
    *(170, 1_792_000_000_000, 32 * _GIB, 96 * _MIB, 2.41),
)
RTX_PRO_6000 = Target(
    *("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell", _BLACKWELL_RTX),
    *(188, 1_792_000_000_000, 96 * _GIB, 128 * _MIB, 2.6),
)
H100 = Target(
    *("H100", "NVIDIA H100 80GB HBM3", _HOPPER),
    *(132, 3_352_320_000_000, 84942979072, 50 * _MIB, 1.98),
)
H200 = Target(
    *("H200", "NVIDIA H200", _HOPPER),
    *(132, 4_800_000_000_000, 151397597184, 50 * _MIB, 1.98),
)
B200 = Target(
    *("B200", "NVIDIA B200", _BLACKWELL),
    *(148, 7_672_320_000_000, 191514411008, 132644864, 1.965),
)
TARGETS = {target.name: target for target in (H100, H200, B200)}
"""The GPUs for which the benchmarks compile."""


def gpu_mesh(
    count: int = 1, axis: AxisType = AxisType.Auto, target: Target = H200
) -> Mesh:
    """Return a mesh of ``count`` GPUs with the axis ``d``, at most 8 GPUs per host."""
    of_a_host = min(count, 8)
    if count % of_a_host:
        raise ValueError(
            f"gpu_mesh: count must be at most 8 or a multiple of 8, got {count}"
        )
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=target.name.lower().replace(" ", "_"),
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
    """Trace ``fn`` for a mesh. Call the result's ``lower()`` under ``jax.set_mesh``.

    Args:
      mesh: the devices, from :func:`gpu_mesh`.
      fn: a function of ``args``. Each output is sharded like arguments of its shape.
      *args: trees of arrays or ShapeDtypeStructs.
      spec: the PartitionSpec of every array of rank 2 or more, or a function that
        returns the PartitionSpec of such an array. If None, all arrays are replicated.
      donate: the indices of the arguments to donate.
    """
    out = NamedSharding(mesh, P())
    if spec is not None:  # the specs depend on the shapes of the outputs
        out = shardings_for(mesh, jax.eval_shape(fn, *args), spec)
    jitted = jax.jit(fn, donate_argnums=donate, out_shardings=out, keep_unused=True)
    with jax.set_mesh(mesh):
        return jitted.trace(*placed(args, shardings_for(mesh, args, spec)))


def shardings_for(mesh: Mesh, tree, spec: P | Callable[[typing.Any], P] | None):
    """Return the NamedShardings that :func:`trace_for` uses for a tree of arrays."""

    def of(x) -> NamedSharding:
        chosen = P()
        if x.ndim >= 2 and spec is not None:
            chosen = spec if isinstance(spec, P) else spec(x)
        return NamedSharding(mesh, chosen)

    return jax.tree.map(of, tree)


def placed(tree, shardings) -> typing.Any:
    """Return a tree of ShapeDtypeStructs with these shardings."""
    place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    return jax.tree.map(place, tree, shardings)


def shards(tree, shardings) -> typing.Any:
    """Return the ShapeDtypeStructs of the shards that one device stores."""
    shard = lambda x, where: jax.ShapeDtypeStruct(where.shard_shape(x.shape), x.dtype)
    return jax.tree.map(shard, tree, shardings)


def lower_for(mesh: Mesh, fn, *args, **options) -> jax.stages.Lowered:
    """Lower ``fn`` for a mesh, with the arguments of :func:`trace_for`."""
    traced = trace_for(mesh, fn, *args, **options)
    # From JAX 0.11 on, Pallas lowers for the GPUs of the current mesh.
    with jax.set_mesh(mesh):
        return traced.lower()


def compile_lowered(
    lowered: jax.stages.Lowered, options: dict[str, str | bool] | None = None
) -> jax.stages.Compiled:
    """Compile a program from :func:`lower_for`.

    XLA lowers kernels on shards when it compiles, so this function sets the mesh again.
    """
    shardings = (x.sharding for x in jax.tree.leaves(lowered.out_info))
    mesh = next(sharding.mesh for sharding in shardings if sharding is not None)
    with tempfile.TemporaryDirectory() as folder, mosaic.dumped_to(folder):
        with jax.set_mesh(mesh):
            compiled = lowered.compile(compiler_options=options)
        mosaic.remember(compiled.as_text() or "", folder)
    return compiled


def compile_for(mesh: Mesh, fn, *args, **options) -> jax.stages.Compiled:
    """Compile ``fn`` for a mesh, with the arguments of :func:`trace_for`."""
    return compile_lowered(lower_for(mesh, fn, *args, **options))
