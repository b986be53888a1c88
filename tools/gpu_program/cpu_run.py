"""Runs the arithmetic of an optimised GPU program on the CPU.

The program is turned back into StableHLO. That shows what XLA:GPU's passes did to the
numbers (they drop casts), though not what a GPU's instructions do.
"""

import jax
import numpy as np


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
    from jaxlib.mlir import ir

    def kind(value):
        return ir.RankedTensorType(value.type).element_type

    # A context of jaxlib's own knows no dialects; JAX's knows those of XLA's modules.
    context = jax.jit(lambda: 0).lower().compiler_ir().context
    with context, ir.Location.unknown():
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
