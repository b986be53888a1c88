"""Inline assembly in kernels of Triton's."""

import jax
from jax.experimental.pallas import triton

from pallas_kernels.gpu.instructions import Instructions


class TritonInstructions(Instructions):
    """See :class:`.instructions.Instructions`."""

    def elementwise(
        self, instructions: str, constraints: str, args, dtype, pack: int = 1
    ) -> jax.Array:
        (result,) = triton.elementwise_inline_asm(
            instructions,
            args=args,
            constraints=constraints,
            pack=pack,
            result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
        )
        return result


INSTRUCTIONS = TritonInstructions()
