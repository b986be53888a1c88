"""Compile optimizer steps for TPUs, and read bytes, memory and kernels."""

import dataclasses
import functools
import time

import jax

from tools import hlo
from tools.gpu_program.steps import OptimizerStep, bytes_of, fast, quantized_like
from tools.gpu_program.targets import (
    compile_lowered,
    lower_for,
    shardings_for,
    shards,
)
from tools.tpu_program.targets import tpu_mesh


@dataclasses.dataclass(frozen=True)
class TpuStep(OptimizerStep):
    """A lowered step, which is compiled on first use. Counts are per device.

    Args:
      seconds_to_lower: the time that tracing and lowering took.
    """

    seconds_to_lower: float

    @functools.cached_property
    def _timed(self) -> tuple[jax.stages.Compiled, float]:
        start = time.perf_counter()
        compiled = compile_lowered(self.lowered)
        return compiled, time.perf_counter() - start

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled program."""
        return self._timed[0]

    @property
    def seconds_to_compile(self) -> float:
        """The time that XLA:TPU took to compile the step."""
        return self._timed[1]

    @functools.cached_property
    def instructions(self) -> list[hlo.Instruction]:
        """The instructions of the entry computation."""
        return hlo.entry(self.compiled)

    @property
    def large(self) -> list[hlo.Instruction]:
        """Instructions that move more than a byte per parameter."""
        return [x for x in self.instructions if x.moved > self.parameters]

    @property
    def kernels(self) -> list[hlo.Instruction]:
        """The instructions that run as kernels."""
        return [x for x in self.instructions if x.op in hlo.KERNELS]

    @property
    def fused_launches(self) -> int:
        """The number of Pallas kernels."""
        return (self.compiled.as_text() or "").count('"tpu_custom_call"')

    @property
    def moved(self) -> float:
        """The bytes of operands and results of all instructions, per parameter.

        They include the padding of layouts, and arrays in the device's memory and on
        the chip.
        """
        return self._sum(lambda x: x.moved)

    @property
    def without_padding(self) -> float:
        """The bytes of operands and results without padding, per parameter."""
        return self._sum(lambda x: x.without_padding)

    @property
    def of_memory(self) -> float:
        """The bytes of operands and results in the device's memory, per parameter."""
        return self._sum(lambda x: x.of_memory)

    def _sum(self, size) -> float:
        return sum(map(size, self.instructions)) / self.parameters

    @property
    def peak(self) -> float:
        """The peak memory use, including arguments, in bytes per parameter."""
        return hlo.memory(self.compiled).peak_memory_in_bytes / self.parameters

    @property
    def copied(self) -> float:
        """The number of bytes that ``copy`` operations write, per parameter."""
        return sum(hlo.copies(self.compiled)) / self.parameters

    @property
    def in_place(self) -> bool:
        """Whether the step updates all parameters and all of the state in place."""
        return hlo.memory(self.compiled).alias_size_in_bytes >= self.stored


def lower_step(tx, params, make_step=fast, mesh=None, spec=None, grads=None) -> TpuStep:
    """Lower a step that donates parameters and state.

    Args:
      tx: a transformation.
      params: a tree of ShapeDtypeStructs, or of QuantizedTensors that contain them.
      make_step: a function from ``tools.gpu_program.steps``.
      mesh: the devices; if None, one v6e.
      spec: see ``tools.gpu_program.targets.trace_for``.
      grads: a tree of ShapeDtypeStructs; if None, ``params``, which must not contain
        QuantizedTensors then.
    """
    mesh = tpu_mesh() if mesh is None else mesh
    start = time.perf_counter()
    state = jax.eval_shape(tx.init, params)
    grads = params if grads is None else grads
    arguments = params, state, grads
    lowered = lower_for(mesh, make_step(tx), *arguments, spec=spec, donate=(0, 1))
    local = lambda tree: shards(tree, shardings_for(mesh, tree, spec))
    return TpuStep(
        lowered,
        sum(x.size for x in jax.tree.leaves(local(grads))),
        bytes_of(local(state), local(params)),
        time.perf_counter() - start,
    )


def lower_lpmm_step(tx, like, bits=12, block_size=2048, **options) -> TpuStep:
    """Lower a step on quantized weights; see ``tools.gpu_program.steps``."""
    params = quantized_like(like, bits, block_size)
    return lower_step(tx, params, grads=like, **options)
