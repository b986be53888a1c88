"""Compiles for H200s on a machine without a GPU, and says what came out.

XLA's CUDA compiler runs without a device when it is given the target's description. It
needs the ``gpu-program`` extra and nothing else of CUDA. What it returns is the real
XLA:GPU program: fusions, buffer assignment, collectives. The optimised program can also
be turned back into StableHLO and run on the CPU, which shows what XLA:GPU's passes did
to the numbers (they drop casts), though not what a GPU's instructions do.
"""

import contextlib
import math
import re

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

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)


def h200_mesh(count: int = 1, axis: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of ``count`` H200s, up to 8, with the one axis ``d`` of a type."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        target_config=H200,
        topology=f"1 x 1 x {count}",
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


_WIDTH = {"pred": 1, "u8": 1, "s8": 1, "bf16": 2, "f16": 2, "u16": 2, "s16": 2}
_WIDTH |= {"f32": 4, "u32": 4, "s32": 4, "f64": 8, "s64": 8, "u64": 8}


def _bytes(type_text: str) -> int:
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", type_text)
    return sum(
        _WIDTH.get(kind, 1) * math.prod(int(d) for d in dims.split(",") if d)
        for kind, dims in shapes
    )


def kernels(compiled) -> list[tuple[str, int]]:
    """``(name, bytes read and written)`` of the entry computation's kernels.

    An operand that a kernel reads in part counts in full; loops are not looked into.
    """
    text = compiled.as_text()
    sizes, found = {}, []
    for line in text[text.index("\nENTRY") :].splitlines():
        match = re.match(
            r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)", line
        )
        if not match:
            continue
        name, type_text, op, operands = match.groups()
        sizes[name] = _bytes(type_text)
        if op in ("fusion", "custom-call", "copy"):
            read = sum(sizes.get(o, 0) for o in re.findall(r"%([\w.\-]+)", operands))
            found.append((name, sizes[name] + read))
    return found


def copies(compiled) -> list[int]:
    """Bytes of each copy's result, anywhere in the program, loops included."""
    found = re.findall(r"= (.*?) copy(?:-start)?\(", compiled.as_text())
    return [_bytes(type_text) for type_text in found]


def run_on_cpu(compiled, *args) -> list[np.ndarray]:
    """Run an optimised GPU program's arithmetic on the CPU.

    Args:
      compiled: from :func:`compile_for`, for one device, without custom calls.
      *args: trees of concrete arrays, in the program's argument order.

    Returns:
      The program's outputs, flat.
    """
    # No public interface turns a compiled module back into something that runs: this
    # is the one use of jaxlib's internals, here and nowhere in the package.
    from jaxlib import _jax, xla_client

    (module,) = compiled.runtime_executable().hlo_modules()
    computation = xla_client.XlaComputation(module.as_serialized_hlo_module_proto())
    text = _jax.mlir.xla_computation_to_mlir_module(computation)
    device = jax.devices("cpu")[0]
    executable = device.client.compile_and_load(
        _without_gpu_operations(text),
        _jax.DeviceList((device,)),
        xla_client.CompileOptions(),
    )
    inputs = [jax.device_put(x, device) for x in jax.tree.leaves(args)]
    outputs = executable.execute_sharded(inputs)
    return [
        np.asarray(shards[0])
        for shards in outputs.disassemble_into_single_device_arrays()
    ]


def _without_gpu_operations(text: str) -> str:
    """The module with its fusions inlined, and bitcasts and copies as StableHLO."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    def kind(value):
        return ir.RankedTensorType(value.type).element_type

    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        _drop_attributes(module.operation, keep=("sym_name",))
        (main,) = (
            f
            for f in module.body.operations
            if f.attributes["sym_name"].value == "main"
        )
        _drop_attributes(main, keep=("sym_name", "function_type"))
        block = main.regions[0].blocks[0]
        for op in list(block.operations):
            if op.operation.name == "mhlo.fusion":
                body = op.regions[0].blocks[0]
                for argument, operand in zip(body.arguments, op.operands, strict=True):
                    argument.replace_all_uses_with(operand)
                *inner, end = list(body.operations)
                returned = list(end.operands)
                for part in inner:
                    part.operation.move_before(op.operation)
                _replace(op, returned)
        for op in list(block.operations):
            if op.operation.name == "mhlo.copy":
                _replace(op, [op.operands[0]])
            elif op.operation.name == "mhlo.bitcast":
                (source,), (result,) = op.operands, op.results
                same = kind(source) == kind(result)
                new = ir.Operation.create(
                    "stablehlo.reshape" if same else "stablehlo.bitcast_convert",
                    results=[result.type],
                    operands=[source],
                    ip=ir.InsertionPoint(op.operation),
                )
                _replace(op, [new.results[0]])
        return module.operation.get_asm(enable_debug_info=False)


def _replace(op, values) -> None:
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(value)
    op.operation.erase()


def _drop_attributes(op, keep: tuple[str, ...]) -> None:
    for attribute in list(op.attributes):
        name = getattr(attribute, "name", attribute)
        if name not in keep:
            del op.attributes[name]
