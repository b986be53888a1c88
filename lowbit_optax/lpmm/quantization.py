"""Convert the weights of a model to :class:`QuantizedTensor` and back."""

import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from lowbit_optax._arguments import check_choice, check_static_int, check_type
from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.random_bits import RandomBits, leaf_number, random_bits
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step import trees
from lowbit_optax._step.seeds import seed_of
from lowbit_optax.formats.base import Rounding
from lowbit_optax.formats.quantized_tensor import is_quantized, quantize
from pallas_kernels.layout import check_block_size, layout_of

PAPER_BLOCK_SIZE = 2048
"""The block size of the LPMM paper."""


def quantize_params(
    params: typing.Any,
    *,
    bits: int = 12,
    block_size: int = PAPER_BLOCK_SIZE,
    min_size: int = 4096,
    seed: int = 0,
    rounding: Rounding = "nearest",
    stacked: Callable[[str], bool] | None = None,
) -> typing.Any:
    """Store a model's weights as codes of ``bits`` bits.

        x ~ c delta,  |c| <= B = 2^(bits-1) - 1,  delta >= max |x| / B

    A value x is stored as an integer c, its code, with one step size delta per block.

    Args:
      params: tree of arrays. Leaves that are not floating-point do not change.
      bits: bits of a code, 4 to 16.
      block_size: number of values that share a step size, a power of two from 32 to
        2048. 2048 values are 64 rows by 32 columns.
      min_size: float leaves with fewer elements become float32 instead.
      seed: seed for stochastic rounding.
      rounding: ``"nearest"``, which has the smallest error, or ``"stochastic"``.
        Training steps use the rounding of the optimizer instead.
      stacked: a function that returns whether the first axis of a leaf is a stack of
        layers, from the leaf's path, such as ``"['layers']['bias']"``. This axis is not
        packed, so you can slice it or scan over it. You need ``stacked`` if a layer
        does not divide well into rows of 8, as with vectors; see
        :func:`pallas_kernels.layout_of`.

    Returns:
      The tree, with a :class:`QuantizedTensor` for each float leaf of at least
      ``min_size`` elements. It needs ``bits + 32 / block_size`` bits per parameter.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value. Errors about a
        leaf name its path.

    References:
      LPMM, sections 5.1 and 5.2, "Dynamic quantization".

    >>> import jax.numpy as jnp
    >>> params = {"w": jnp.ones((64, 64)), "b": jnp.zeros(64, jnp.bfloat16)}
    >>> quantized = quantize_params(params, bits=8)
    >>> quantized["w"].codes.shape, quantized["b"].dtype
    ((16, 64), dtype('float32'))
    """
    check_static_int("quantize_params", "bits", bits, 4, 16)
    check_static_int("quantize_params", "block_size", block_size, 1)
    check_block_size("quantize_params", block_size)
    check_choice("quantize_params", "rounding", rounding, Rounding)
    check_static_int("quantize_params", "min_size", min_size, 0)
    check_static_int("quantize_params", "seed", seed, 0, 2**32 - 1)
    accepted = "a function path -> bool, or None"
    check_type("quantize_params: stacked", stacked, Callable | None, accepted)
    names, leaves, treedef = trees.named_leaves(params)
    draws: Sequence[RandomBits | None] = [None] * len(names)
    if rounding == "stochastic":
        own = seed_of(seed, leaves)
        draws = random_bits(own, jnp.uint32(0), list(map(leaf_number, names)))

    def convert(name: str, leaf, random: RandomBits | None):
        trees.check_plain("quantize_params", name, leaf)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            where = f"quantize_params: params{name}"
            raise TypeError(f"{where} must have a real dtype, got {leaf.dtype}")
        if not trees.is_float(leaf):
            return leaf
        x = to_float32(jnp.asarray(leaf))
        is_stack = stacked is not None and stacked(name)
        if x.ndim < 1 + is_stack or not x.size or x.size < min_size:
            return x
        axis = layout_of(x.shape[1:] if is_stack else x.shape).axis
        return traced_once(quantize, bits, block_size, axis)(x, random)

    return treedef.unflatten(map(convert, names, leaves, draws))


def dequantize(
    tree: typing.Any, dtype: jax.typing.DTypeLike = jnp.float32
) -> typing.Any:
    """Replace every quantized weight of a tree with an array.

        x = c delta  for a QuantizedTensor,    x = c 2^e  for a BlockScaledTensor

    Args:
      tree: parameters, or a part of them, such as one layer inside a scan.
      dtype: any float dtype, for the arrays.

    Returns:
      The tree with arrays. Other leaves do not change.

    Raises:
      TypeError: if ``dtype`` is not a float dtype.
      ValueError: if the arrays of a quantized weight do not match. The error names its
        path.

    >>> import jax.numpy as jnp
    >>> params = quantize_params({"w": jnp.ones((64, 64)), "step": jnp.int32(1)})
    >>> dequantize(params, jnp.bfloat16)["w"].dtype
    dtype(bfloat16)
    """
    dtype = float_dtype("dequantize: dtype", dtype)
    names, leaves, treedef = trees.named_leaves(tree)

    def convert(name, leaf):
        with trees.naming(name):
            return leaf.dequantize(dtype) if is_quantized(leaf) else leaf

    return treedef.unflatten(map(convert, names, leaves))
