"""Newton-Schulz iterations, which move all singular values of a matrix close to 1.

The iterations need the whole matrix. Shards of matrices are moved between devices, in
bfloat16, before and after the iterations::

    a stack      shards ---> whole matrices, some on each device ---> shards
    one matrix   shards ---> the matrix, on every device ---> its shards, which are cut
                             out of the result without an exchange
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.fused_update.shards import axes_of, moved

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-8


def orthogonalized(
    x: jax.Array, steps: int = 5, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """Moves all singular values close to 1, and multiplies by Muon's shape factor.

    Args:
      x: float32 or bfloat16 [..., rows, columns].
      steps, dtype: ``ns_steps`` and ``ns_dtype`` of :func:`.muon.lowbit_muon`.

    Returns:
      An array with the shape and the dtype of x.

    >>> import jax.numpy as jnp
    >>> x = orthogonalized(jnp.diag(jnp.float32([4.0, 2.0])))
    >>> bool(jnp.all(jnp.abs(jnp.diag(x) - 1) < 0.35)), float(x[0, 1])
    (True, 0.0)
    """
    if not x.size:
        return x
    if x.ndim > 2:
        of_one = functools.partial(orthogonalized, steps=steps, dtype=dtype)
        return lax.map(of_one, x.reshape(-1, *x.shape[-2:])).reshape(x.shape)
    rows, columns = x.shape
    is_high = rows > columns
    a, b, c = (jnp.asarray(value, dtype) for value in _COEFFICIENTS)
    wide = x.astype(jnp.float32)
    y = (wide / (jnp.sqrt(jnp.sum(wide * wide)) + jnp.float32(_EPS))).astype(dtype)
    y = y.T if is_high else y
    for _ in range(steps):
        square = y @ y.T
        y = a * y + (b * square + c * (square @ square)) @ y
    y = (y.T if is_high else y).astype(jnp.float32)
    return (y * jnp.float32(max(1, columns / rows) ** 0.5)).astype(x.dtype)


def orthogonalized_shards(
    x: jax.Array,
    sharding: NamedSharding | None,
    steps: int = 5,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Does the same as :func:`orthogonalized` for an array on several devices.

    Args:
      x: float32 [..., rows, columns].
      sharding: its sharding; None if it is unknown, or if x is on one device.
      steps, dtype: see :func:`orthogonalized`.

    Returns:
      An array with the shape, the dtype and the sharding of x.
    """
    of_whole = functools.partial(orthogonalized, steps=steps, dtype=dtype)
    if sharding is None or not any(sharding.spec):
        return of_whole(x)
    mesh, spec = sharding.mesh, sharding.spec
    if not any(axes_of(spec, x.ndim)[-2:]):
        return jax.shard_map(of_whole, mesh=mesh, in_specs=spec, out_specs=spec)(x)
    # The layers of the longest axis of the stack are divided among the devices.
    layers = max(range(x.ndim - 2), key=lambda axis: x.shape[axis], default=None)
    if layers is not None and x.shape[layers] == 1:
        layers = None
    specs = _specs_to_whole(spec, x.ndim, layers)
    narrow = x.astype(jnp.bfloat16)
    if layers is not None:
        names = axes_of(specs[-1], x.ndim)[layers]
        narrow = _padded(narrow, layers, math.prod(mesh.shape[name] for name in names))
    # Starts with the spec of x. Otherwise, XLA would move float32 operands of x.
    for to in specs:
        narrow = moved([narrow], [to], mesh)[0]
    run = jax.shard_map(of_whole, mesh=mesh, in_specs=specs[-1], out_specs=specs[-1])
    found = run(narrow)
    for to in reversed(specs[:-1]):
        found = moved([found], [to], mesh)[0]
    if layers is not None and found.shape != x.shape:
        found = lax.slice_in_dim(found, 0, x.shape[layers], axis=layers)
    return found.astype(x.dtype)


def _specs_to_whole(
    spec: PartitionSpec, rank: int, layers: int | None
) -> list[PartitionSpec]:
    """Returns the shardings between shards of matrices and whole matrices.

    Only one axis of the matrices changes at a time, because XLA would replicate a whole
    stack for a change of both. If ``layers`` is None, the matrices are replicated.
    """
    specs, axes = [spec], axes_of(spec, rank)
    for axis in rank - 2, rank - 1:
        if axes[axis]:
            if layers is not None:
                axes[layers] += axes[axis]
            axes[axis] = ()
            specs.append(PartitionSpec(*(names or None for names in axes)))
    return specs


def _padded(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Returns x with zeros at the end of an axis, up to a multiple of ``count``."""
    missing = -x.shape[axis] % count
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
