"""Weights of a model as block-scaled float8."""

import typing
from collections.abc import Callable

import jax.numpy as jnp

from lowbit_optax._arguments import check_static_int
from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step import trees
from lowbit_optax.formats.block_scaled_tensor import BlockScaledTensor, quantize

__all__ = ["BlockScaledTensor", "block_scale"]


def block_scale(
    tree: typing.Any,
    *,
    axis: int | Callable[[str], int | None] = -2,
    min_size: int = 4096,
) -> typing.Any:
    """Store arrays as float8 codes and a power of two per 32 values: MXFP8.

        x ~ code 2^e,    e the smallest integer with max |x| <= 448 2^e over the block

    Codes are float8_e4m3fn and scales float8_e8m0fnu. These are what products of
    block-scaled arrays take, whose blocks lie along the axis that is summed over. For
    ``x @ w`` that is the last one of x and the last but one of w::

        jax.lax.scaled_dot(x.codes, w.codes, lhs_scale=x.scales, rhs_scale=w.scales)

    ``lowbit`` and the aliases take the tree as parameters. What they keep beside
    float8 weights, such as 8 extra bits, they keep beside the codes, in units of the
    scales. To begin from float32 weights with all of these bits, give ``from_master``
    shapes::

        like = jax.eval_shape(lowbit_optax.block_scaling.block_scale, params)
        params, state = lowbit_optax.from_master(tx, params, like)

    Values are rounded to nearest. None saturates. NaNs and infinities become NaN, and
    do not affect their neighbours.

    Args:
      tree: tree of arrays, or one array, such as activations.
      axis: of the blocks, -1 or -2 as a rule; or a function from a leaf's path, such as
        ``"['dense']['kernel']"``, to it, or to None for a leaf that is to stay as it
        is.
      min_size: leaves with fewer elements, and those of rank 0 and 1, stay as they are,
        and so do those that are not real floating-point arrays.

    Returns:
      The tree with a :class:`BlockScaledTensor` in place of the other leaves, which
      takes 8.25 bits per value.

    Raises:
      TypeError: if a leaf is not an array, or is one already; if ``axis`` is not an
        integer.
      ValueError: if ``axis`` does not divide into blocks of 32. Errors about a leaf
        name its path.

    References:
      OCP Microscaling Formats (MX) Specification 1.0, sections 5.2, 5.3 and 6.3, but
      for the exponent, which there is ``floor(log2 max |x|) - 8``.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = {"kernel": jnp.ones((64, 128)), "bias": jnp.zeros(128)}
    >>> scaled = block_scale(params)
    >>> scaled["kernel"].scales.shape, scaled["bias"].dtype
    ((2, 128), dtype('float32'))
    """
    check_static_int("block_scale", "min_size", min_size, 0)
    names, leaves, treedef = trees.named_leaves(tree)

    def convert(name: str, leaf):
        trees.check_plain("block_scale", name, leaf)
        if not trees.is_float(leaf) or leaf.ndim < 2 or leaf.size < max(min_size, 1):
            return leaf
        blocked = axis(name) if callable(axis) else axis
        if blocked is None:
            return leaf
        return _scaled(name, leaf, blocked)

    return treedef.unflatten(map(convert, names, leaves))


def _scaled(name: str, leaf, axis: int):
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(
            f"block_scale: axis is {axis!r} for params{name}; accepted are an integer, "
            "and a function from a leaf's path to an integer or None"
        )
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(
            f"block_scale: params{name} of shape {list(leaf.shape)} has no axis {axis}"
        )
    axis = axis if axis < 0 else axis - leaf.ndim
    try:
        return traced_once(quantize, axis)(to_float32(jnp.asarray(leaf)))
    except ValueError as error:
        raise ValueError(
            f"block_scale: params{name}: {error}; choose another axis, or None to "
            "leave it as it is: axis may be a function of the path"
        ) from error
