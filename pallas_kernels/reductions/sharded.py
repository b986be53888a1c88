"""Reductions of arrays that are spread over a mesh.

Every device reduces its shards. Then the results of arrays that lie on the same mesh
axes are combined over these in one collective.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import shards
from pallas_kernels.reductions.kinds import Kind
from pallas_kernels.shards import axes_of, count_of

Run = Callable[[Sequence[jax.Array]], jax.Array]
"""From small arrays that every device has, and the arrays, to a vector."""


def over_shards(run: Run, kind: Kind, shared: int, args: Sequence) -> jax.Array:
    """``run`` on every device's shards.

    Args:
      run: see :data:`Run`.
      kind: how results of shards are combined.
      shared: how many small arrays ``args`` begins with.
      args: these, and the arrays.

    Returns:
      The results, the same on all devices.
    """

    def local_of(arguments, mesh, describe=lambda x: x) -> shards.Local:
        divided = [
            _divided(x, describe(x).sharding.spec, mesh) for x in arguments[shared:]
        ]
        return _local(run, kind, divided), [P()] * shared + divided, P()

    mesh = jax.typeof(args[-1]).sharding.mesh
    if shards.has_explicit_axes(mesh):
        return shards.over_explicit_axes(local_of(args, mesh, jax.typeof), args, mesh)
    inside = [
        " ".join(f"x{number}a{axis}" for axis in range(x.ndim))
        for number, x in enumerate(args)
    ]
    rule = f"{', '.join(inside)} -> results"
    return shards.over_automatic_axes(lambda *args: run(args), local_of, args, rule)


def _local(run: Run, kind: Kind, specs: Sequence[P]) -> Callable:
    """``run`` as a function of local arrays, within the mesh's axes."""
    axes = [_axes(spec) for spec in specs]

    def call(*args):
        own = whole = run(args)
        for names in dict.fromkeys(filter(None, axes)):
            is_there = jnp.asarray([each == names for each in axes])
            whole = jnp.where(is_there, kind.over_devices(own, names), whole)
        return whole

    return call


def _axes(spec: P) -> tuple[str, ...]:
    return tuple(sorted(itertools.chain(*axes_of(spec, len(spec)))))


def _divided(x, spec: P, mesh: Mesh) -> P:
    """The spec without mesh axes that do not divide their axis of the array."""
    places = zip(x.shape, axes_of(spec, x.ndim), strict=True)
    fitting = [names if n % count_of(mesh, names) == 0 else () for n, names in places]
    return P(*(names or None for names in fitting))
