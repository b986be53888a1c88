"""Fused updates as GPU kernels, with Pallas's Triton and Mosaic GPU backends.

A launcher, :mod:`.triton` or :mod:`.mosaic`, turns a :class:`.spec.Call` into a kernel:

1. :mod:`.tiling` divides each leaf into programs, the instances of the kernel in
   Pallas's grid, and :mod:`.sharing` chooses the leaves that one kernel updates.
2. :mod:`.kernel` collects the kernel's arguments and the shapes of its results.
3. :mod:`.program` is the code that each program runs. It finds the program's leaf,
   loads the operands, runs the body of the update, and stores the results.
   :mod:`.lanes` and :mod:`.places` compute offsets and masks, :mod:`.numbers` provides
   the leaf's sizes and strides, and :mod:`.operands` handles loads, stores and packed
   fields.
4. :mod:`.peephole` replaces operations of the body with shorter PTX instructions.

Launchers differ in how they arrange the elements of a program in arrays
(:mod:`.arrangements`), and in how they load and store these elements
(:mod:`.triton_arrays` and :mod:`.mosaic_arrays`).
"""
