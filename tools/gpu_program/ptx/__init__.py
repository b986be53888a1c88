"""Execute the PTX of compiled programs on the CPU.

``program.compile_program(lower_for(gpu_mesh(), fn, *args)).run(*arrays)`` returns the
results that ``fn`` has on a GPU. It executes every kernel of the program, including
XLA's own kernels, instruction by instruction. numpy computes all threads at once, in
memory as XLA assigns it. The interpreter supports the instructions that these kernels
use, and raises an error for others.

A run shows that each kernel computes its results from its arrays, that its accesses are
in bounds and aligned, that it reads only initialized values and writes all of its
results, and that no two threads race. Races are found in any order of the accesses.

A run shows nothing about ptxas and the machine code, about the order of memory accesses
between threads beyond the absence of races, about the payloads of NaNs, or about time.
It also does not show the last bits of approximating units, which may be off by one or
two ulps on a GPU. The interpreter rounds ``rcp``, ``sqrt`` and ``div`` correctly, and
computes ``rsqrt``, ``ex2`` and ``lg2`` in float64.
"""
