"""Helpers that several test files share, one module for each idea.

Training
  optimizers         aliases, formats and problems in tables, and jitted steps
  wrappers           wrappers around a transformation, such as chain and partition
  exact_steps        steps without rounding in float32, so that results have equal bits
  released           steps with gradient release next to ordinary steps
  quantized_weights  quantized weights with exact products, and gradients for them
  moment_updates     updates with few-bit moments, compared with float32 moments
  rounded_losses     losses with a precision assignment
  stores             Orbax and flax as stores of a run

Numbers
  patterns           floats compared by their bits
  packing            packed fields, written from the definition of the layout
  given_words        random words that a test chooses

Kernels
  kernels            a numpy model of fused updates, and cases to compare
  blocks             the same with maxima over blocks
  gpu_steps          formats and optimizers whose steps are compiled for GPUs
  tpu_refusals       which leaves the kernels for TPUs take

Other libraries
  optaxs_tests       optax's own tests with the aliases of this package
  side_by_side       trainers with optax's AdamW and with this package's optimizers
  nnx_network        a sharded network of flax nnx

Processes
  places             the repository's folder, and Python in another process
  processes          programs that tests run in processes of their own
"""
