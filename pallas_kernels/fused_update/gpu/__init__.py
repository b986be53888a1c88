"""Fused updates as GPU kernels, with Pallas's Triton and Mosaic GPU backends.

A launcher, :mod:`.triton` or :mod:`.mosaic`, turns a :class:`.spec.KernelCall` into a
kernel:

1. :mod:`.tiling` divides each leaf into programs, the instances of the kernel in
   Pallas's grid, and provides the leaf's sizes and strides.
2. :mod:`.kernel` chooses the leaves that one kernel updates, and collects the kernel's
   arguments and the shapes of its results.
3. :mod:`.program` is the code that each program runs. It finds the program's leaf,
   loads the operands, runs the body of the update, and stores the results.
   :mod:`.lanes` computes offsets and masks.
4. :mod:`.peephole` replaces operations of the body with shorter PTX instructions.

Launchers differ in how they arrange the elements of a program in arrays, and in how
they load and store these elements (:class:`.lanes.Arrangement`).
"""
