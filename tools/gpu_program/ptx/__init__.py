"""Runs compiled programs from the PTX of their kernels, on the CPU.

``program.compile_program(lower_for(gpu_mesh(), fn, *args)).run(*arrays)`` gives what
``fn`` gives on a GPU: every kernel of the program, Pallas kernels and XLA's own, is
executed instruction by instruction, all threads at once in numpy, in memory as XLA
assigns it. It knows the instructions that these kernels have, and refuses others.

What it proves: that each kernel computes these results from these arrays, whatever the
compiler made of its source; that it stays inside of its arrays, in alignment; that it
reads nothing that is not set, and writes all of its results; that no two threads race,
which is checked for the accesses made, in whichever order they come.

What it does not: anything of ptxas and the machine code; the last bits of the
approximating units, for which correctly rounded functions stand in (``rcp``, ``sqrt``,
``div``; ``rsqrt``, ``ex2`` and ``lg2`` as float64 gives them), while a GPU's may be off
by an ulp or two; the order of memory accesses between threads, beyond the absence of
races; payloads of NaNs; time.
"""
