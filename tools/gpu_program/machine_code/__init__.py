"""The machine code (SASS) of a program's kernels: registers, spills, instructions.

XLA writes the PTX of every kernel, Pallas kernels included, where ``xla_dump_to``
says. ptxas and nvdisasm, which need no GPU, turn it into machine code and back into
text. Both come with the ``gpu-program`` extra.

``program(lower_for(gpu_mesh(), fn, *args)).kernels["name"]`` is one kernel.
"""

from tools.gpu_program.machine_code.compilation import program
from tools.gpu_program.machine_code.kernel import Kernel, instructions_per_parameter

__all__ = ["Kernel", "instructions_per_parameter", "program"]
