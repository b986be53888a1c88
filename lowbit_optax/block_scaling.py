"""Weights as block-scaled float8."""

import typing
from collections.abc import Callable

import jax.numpy as jnp

from lowbit_optax._arguments import check_static_int
from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step import trees
from lowbit_optax.formats.block_scaled import BlockScaledTensor, quantize

__all__ = ["BlockScaledTensor", "block_scale"]


def block_scale(
    tree: typing.Any,
    *,
    axis: int | Callable[[str], int | None] = -2,
    min_size: int = 4096,
) -> typing.Any:
    """Store arrays as MXFP8: float8 codes with one power of two per 32 values.

        x ~ code 2^e,    e the smallest integer with max |x| <= 448 2^e over the block

    The dtype of codes is float8_e4m3fn, and the dtype of scales is float8_e8m0fnu.
    Products of block-scaled arrays need blocks along the axis that they sum over: the
    last axis of x and the second to last axis of w in ``x @ w``::

        jax.lax.scaled_dot(x.codes, w.codes, lhs_scale=x.scales, rhs_scale=w.scales)

    ``lowbit`` and all aliases except ``kahan_*`` accept the result as parameters, and
    store the same residuals as for float8 weights, in units of the scales. To keep the
    low bits of float32 weights, pass shapes to ``from_master``::

        like = jax.eval_shape(lowbit_optax.block_scaling.block_scale, params)
        params, state = lowbit_optax.from_master(tx, params, like)

    Values are rounded to nearest and never saturate. NaNs and infinities become NaN,
    and do not change other values of their block.

    Args:
      tree: tree of arrays, or one array, such as activations.
      axis: the axis that is divided into blocks, usually -1 or -2, or a function that
        returns it for a leaf's path, such as ``"['dense']['kernel']"``. If the function
        returns None, the leaf does not change.
      min_size: leaves with fewer elements do not change, and neither do scalars,
        vectors, and leaves that are not real floating-point arrays.

    Returns:
      The tree, in which all other leaves become a :class:`BlockScaledTensor` with 8.25
      bits per value.

    Raises:
      TypeError: if a leaf is not an array, or is already block-scaled; if ``axis`` is
        not an integer.
      ValueError: if the length of the axis is not a multiple of 32.

    References:
      OCP Microscaling Formats (MX) Specification 1.0, sections 5.2, 5.3 and 6.3. The
      specification uses the exponent ``floor(log2 max |x|) - 8`` instead.

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
            "block_scale: axis must be an integer, or a function from a leaf's path to "
            f"an integer or None, got {axis!r} for params{name}"
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
            f"block_scale: params{name}: {error}; choose another axis, or pass a "
            "function of the path that returns None for this leaf"
        ) from error
