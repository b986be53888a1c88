"""Fused updates as GPU kernels, with Pallas's Triton and Mosaic GPU backends.

A launcher, :mod:`.triton` or :mod:`.mosaic`, turns a :class:`.spec.Call` into a kernel:

1. :mod:`.tiling` divides each leaf into programs, the instances of the kernel in
   Pallas's grid, and :mod:`.sharing` chooses the leaves that one kernel updates.
2. :mod:`.kernel` collects the kernel's arguments and the shapes of its results.
3. :mod:`.program` is the code of each program. It finds the program's leaf, loads the
   operands, runs the body of the update, and stores the results. Offsets and masks come
   from :mod:`.lanes` and :mod:`.places`, the sizes and strides of the leaf from
   :mod:`.numbers`, and loads, stores and packed fields from :mod:`.operands`.
4. :mod:`.peephole` replaces operations of the body with shorter PTX instructions.

Launchers differ in how the elements of a program are arranged in arrays
(:mod:`.arrangements`), and in how they are loaded and stored: see :mod:`.triton_arrays`
and :mod:`.mosaic_arrays`.
"""
