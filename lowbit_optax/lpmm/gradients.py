"""Losses of dequantised weights, and gradients in those weights' shapes."""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lowbit_optax.formats import quantized_tensor as tensors


def value_and_grad(
    loss_fn: Callable,
    dtype: jax.typing.DTypeLike = jnp.float32,
    has_aux: bool = False,
    lazy: bool = False,
) -> Callable:
    """``jax.value_and_grad`` of a loss, at parameters that are quantised.

    Args:
      loss_fn: called as ``loss_fn(params, *args, **kwargs)``, with arrays at the places
        of QuantizedTensors.
      dtype: of those arrays and of their gradients. Other leaves stay as they are.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      lazy: leave it to ``loss_fn`` to call :func:`lowbit_optax.dequantize` on what it
        is about to use. In a ``lax.scan`` over stacked layers only the current layer is
        then dequantised, if the scan's body is under ``jax.checkpoint``: else the
        layers are kept for the backward pass.

    Returns:
      A function of ``(params, *args, **kwargs)`` that returns ``(value, gradients)``,
      the gradients with arrays at the places of QuantizedTensors.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = lowbit_optax.quantize_params(jnp.ones((3, 64, 64)))
    >>> def loss_fn(layers, x):
    ...     @jax.checkpoint
    ...     def body(x, layer):
    ...         return x @ lowbit_optax.dequantize(layer, jnp.bfloat16), None
    ...     return jax.lax.scan(body, x, layers)[0].sum()
    >>> x = jnp.ones((1, 64), jnp.bfloat16)
    >>> loss, grads = value_and_grad(loss_fn, jnp.bfloat16, lazy=True)(params, x)
    >>> grads.shape, grads.dtype
    ((3, 64, 64), dtype(bfloat16))
    """
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"value_and_grad: dtype is {jnp.dtype(dtype)}, not a float")

    @functools.wraps(loss_fn)
    def with_gradient(params, *args, **kwargs):
        def whole(arrays):
            return loss_fn(arrays, *args, **kwargs)

        def parts(slots):
            held = treedef.unflatten(map(slotted, leaves, slots))
            return loss_fn(held, *args, **kwargs)

        differentiate = functools.partial(
            jax.value_and_grad, has_aux=has_aux, allow_int=True
        )
        if not lazy:
            return differentiate(whole)(tensors.dequantize(params, dtype))
        _, leaves, treedef = tensors.named_leaves(params)
        slots = [
            jnp.zeros(leaf.shape, dtype) if tensors.is_quantized(leaf) else leaf
            for leaf in leaves
        ]
        value, grads = differentiate(parts)(slots)
        return value, treedef.unflatten(grads)

    return with_gradient


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Slotted:
    """A QuantizedTensor and the array that stands for it in differentiation.

    uint32 arrays have no gradients. The slot does; its values are never read.
    """

    lpmm_tensor: typing.Any
    slot: typing.Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lpmm_tensor.shape

    @property
    def ndim(self) -> int:
        return self.lpmm_tensor.ndim

    @property
    def dtype(self):
        return self.lpmm_tensor.dtype

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        return _read(jnp.dtype(dtype), self.slot.dtype, self.lpmm_tensor, self.slot)


def slotted(leaf, slot):
    """A leaf as a loss sees it: a quantised one with the slot of its gradient."""
    return _Slotted(leaf, slot) if tensors.is_quantized(leaf) else slot


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _read(dtype, slot_dtype, tensor, slot):
    del slot_dtype, slot
    return tensor.dequantize(dtype)


def _forward(dtype, slot_dtype, tensor, slot):
    return _read(dtype, slot_dtype, tensor, slot), None


def _backward(dtype, slot_dtype, _, cotangent):
    del dtype
    return None, cotangent.astype(slot_dtype)


_read.defvjp(_forward, _backward)
