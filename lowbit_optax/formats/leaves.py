"""Join or split a whole leaf in one pass, with a kernel on CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._numerics.straight_through import straight_through
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.block_scaled import (
    E4M3,
    BlockScaledTensor,
    BlockScaledWeights,
)
from lowbit_optax.formats.extra_bits import extra_bits_named
from lowbit_optax.formats.kahan import kahan_named
from lowbit_optax.formats.plain import MasterCopyFormat
from pallas_kernels import Operand, Result, fused_update
from pallas_kernels.fused_update import shards


def join_leaf(
    format_: WeightFormat, param: jax.Array, residual: jax.Array | None
) -> jax.Array:
    """Return the float32 master of a stored leaf.

    Args:
      format_: weight format of the leaf.
      param: the parameter, in its narrow dtype.
      residual: the residual from the state, packed or not.

    Returns:
      float32 array with the shape of the parameter.
    """
    join = functools.partial(_joined, format_)
    if isinstance(param, jax.Array) and isinstance(residual, jax.Array):
        # Otherwise, every device would gather the residual of a sharded state.
        param = shards.placed_beside(param, [residual])
    return straight_through(join)(param, residual)


def _joined(format_: WeightFormat, param, residual):
    if residual is None or not format_.width:
        return format_.join(param, residual)
    # If shards would cut words, the words are sharded along another axis.
    moved = shards.placed_like(param, residual)
    (master,) = fused_update(
        _Join(format_.on_fields()),
        [Operand(moved), Operand(residual, format_.width)],
        [Result(jnp.float32)],
        shape=param.shape,
    )
    return shards.placed_like(master, param)


def split_leaf(
    format_: WeightFormat, master: jax.Array, dtype: jnp.dtype, random: RandomBits
) -> tuple[jax.Array, jax.Array | None]:
    """Split a float32 master into the parameter and residual that are stored.

    Args:
      format_: weight format of the leaf.
      master: float32 array.
      dtype: dtype of the parameter.
      random: random bits of the leaf.

    Returns:
      ``(param, residual)``. The residual is packed if the format packs it.
    """
    split = functools.partial(_split, format_, jnp.dtype(dtype))
    return straight_through(split)(master, random)


def _split(format_: WeightFormat, dtype, master, random):
    if not format_.width:
        return format_.split(master, dtype, random)
    param, residual = fused_update(
        _Split(format_.on_fields(), dtype),
        [Operand(master)],
        [Result(dtype), Result(jnp.uint32, format_.width)],
        scalars=jnp.stack([random.key, random.second]),
    )
    return param, residual


def format_named(name: str, param, residual) -> WeightFormat:
    """Return a format that joins and splits a leaf whose residual has this name.

    Args:
      name: see :class:`.Residuals`.
      param, residual: the leaf, as arrays or shapes.

    Raises:
      ValueError: if no format uses this name.

    >>> x = jnp.ones(4, jnp.bfloat16)
    >>> format_named("wide_compensation", x, x).arithmetic
    'param'
    """
    if isinstance(param, BlockScaledTensor):
        codes = jax.ShapeDtypeStruct(param.shape, E4M3)
        of_codes = format_named(name, codes, residual)
        return BlockScaledWeights(of_codes, param.axis)
    if name == MasterCopyFormat().residual_name:
        return MasterCopyFormat()
    for named in (extra_bits_named, kahan_named):
        if (found := named(name, param, residual)) is not None:
            return found
    raise ValueError(
        "the name of residuals in the state must belong to a weight format, got "
        f"{name!r}; was the state saved with another version of lowbit_optax?"
    )


@dataclasses.dataclass(frozen=True)
class _Join:
    format: WeightFormat

    def __call__(self, values, scalars, index):
        return [self.format.join(*values)]


@dataclasses.dataclass(frozen=True)
class _Split:
    format: WeightFormat
    dtype: jnp.dtype

    def __call__(self, values, scalars, index):
        (master,) = values
        random = RandomBits(scalars[0], scalars[1], index=index)
        return list(self.format.split(master, self.dtype, random))
