"""Losses of quantized weights, with gradients for the dequantized weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.straight_through import with_tangent_of
from lowbit_optax._types import Function
from lowbit_optax.formats import quantized_tensor as tensors
from lowbit_optax.formats.block_scaled import BlockScaledTensor
from lowbit_optax.formats.quantized_tensor import QuantizedWeight
from lowbit_optax.lpmm.quantization import dequantize


def value_and_grad(
    loss_fn: Function,
    dtype: jax.typing.DTypeLike = jnp.float32,
    has_aux: bool = False,
    lazy: bool = False,
) -> Function:
    """Return a function like ``jax.value_and_grad`` for quantized parameters.

        loss(dequantize(params)),  d loss / d dequantize(params)

    Args:
      loss_fn: a function that is called as ``loss_fn(params, *args, **kwargs)``, with
        an array for every quantized weight.
      dtype: any float dtype, for these arrays and their gradients. Other leaves keep
        their dtypes.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      lazy: if True, ``loss_fn`` receives quantized weights, and must call
        :func:`lowbit_optax.lpmm.dequantize` before it uses them. A ``lax.scan`` over
        stacked layers then dequantizes one layer at a time, if its body is inside
        ``jax.checkpoint``. Without ``jax.checkpoint``, all dequantized layers are kept
        for the backward pass.

    Returns:
      A function ``(params, *args, **kwargs) -> (value, gradients)``. The gradients have
      an array for every quantized weight.

    Raises:
      TypeError: if ``dtype`` is not a float dtype. With ``lazy``, also if ``loss_fn``
        computes with a weight that it has not dequantized.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = lowbit_optax.lpmm.quantize_params(jnp.ones((3, 64, 64)))
    >>> def loss_fn(layers, x):
    ...     @jax.checkpoint
    ...     def body(x, layer):
    ...         return x @ lowbit_optax.lpmm.dequantize(layer, jnp.bfloat16), None
    ...     return jax.lax.scan(body, x, layers)[0].sum()
    >>> x = jnp.ones((1, 64), jnp.bfloat16)
    >>> loss, grads = value_and_grad(loss_fn, jnp.bfloat16, lazy=True)(params, x)
    >>> grads.shape, grads.dtype
    ((3, 64, 64), dtype(bfloat16))
    """
    dtype = float_dtype("value_and_grad: dtype", dtype)

    @functools.wraps(loss_fn)
    def differentiated(params, *args, **kwargs):
        def loss(arrays):
            if lazy:
                arrays = jax.tree.map(
                    with_stand_in, params, arrays, is_leaf=tensors.is_quantized
                )
            return loss_fn(arrays, *args, **kwargs)

        def stand_in(leaf):
            return jnp.zeros(leaf.shape, dtype) if tensors.is_quantized(leaf) else leaf

        if lazy:
            arrays = jax.tree.map(stand_in, params, is_leaf=tensors.is_quantized)
        else:
            arrays = dequantize(params, dtype)
        return jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)(arrays)

    return differentiated


def with_stand_in(leaf, stand_in):
    """Return a leaf with respect to which JAX can differentiate a loss.

    Args:
      leaf: a leaf of the parameters.
      stand_in: the array that receives the gradient.

    Returns:
      The stand-in. For a quantized weight, a weight that dequantizes to the same values
      and passes their gradient to the stand-in.
    """
    if not tensors.is_quantized(leaf):
        return stand_in
    return _DifferentiableTensor(leaf, stand_in)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _DifferentiableTensor(QuantizedWeight):
    """A quantized weight together with the array that receives its gradient.

    The arrays of the weight are integers and have no gradients. The values of the
    stand-in are never read.
    """

    tensor: tensors.QuantizedTensor | BlockScaledTensor
    stand_in: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def codes(self) -> jax.Array:
        return self.tensor.codes

    @property
    def scales(self) -> jax.Array:
        return self.tensor.scales

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        values = self.tensor.dequantize(float_dtype("dequantize: dtype", dtype))
        return with_tangent_of(self.stand_in, values)
