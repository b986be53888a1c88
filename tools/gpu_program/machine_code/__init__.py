"""Read registers, spills and instructions from the machine code (SASS) of kernels.

XLA writes the PTX of every kernel, including Pallas kernels, to the folder that
``xla_dump_to`` names. ptxas turns the PTX into machine code, and nvdisasm turns the
machine code into text. The ``gpu-program`` extra installs both. They need no GPU.

``program(lower_for(gpu_mesh(), fn, *args)).kernels["name"]`` is one kernel.
"""

from tools.gpu_program.machine_code.compilation import program
from tools.gpu_program.machine_code.kernel import Kernel, instructions_per_parameter

__all__ = ["Kernel", "instructions_per_parameter", "program"]
