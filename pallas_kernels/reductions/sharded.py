"""Reductions of arrays that are spread over a mesh.

Every device reduces its shards. Then the results of arrays that lie on the same mesh
axes are combined over these in one collective.
"""

import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.reductions.kinds import Kind

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
    mesh = jax.typeof(args[-1]).sharding.mesh
    if any(each == AxisType.Explicit for each in mesh.axis_types):
        specs = [P()] * shared + [
            _divided(x, jax.typeof(x).sharding.spec, mesh) for x in args[shared:]
        ]
        placed = [
            jax.sharding.reshard(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, specs, strict=True)
        ]
        return jax.shard_map(
            _local(run, kind, specs[shared:]),
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=P(),
            # Pallas's interpreter loses how new results vary over the mesh.
            check_vma=False,
        )(*placed)
    return _on_automatic_axes(run, kind, shared, args)


def _on_automatic_axes(run: Run, kind: Kind, shared: int, args) -> jax.Array:
    def partition(mesh, arguments, results):
        del results
        specs = [P()] * shared + [
            _divided(x, x.sharding.spec, mesh) for x in arguments[shared:]
        ]
        return (
            mesh,
            _local(run, kind, specs[shared:]),
            NamedSharding(mesh, P()),
            tuple(NamedSharding(mesh, spec) for spec in specs),
        )

    call = custom_partitioning(lambda *args: run(args))
    inside = [
        " ".join(f"x{number}a{axis}" for axis in range(x.ndim))
        for number, x in enumerate(args)
    ]
    call.def_partition(
        partition,
        infer_sharding_from_operands=lambda *args: partition(*args)[2],
        sharding_rule=f"{', '.join(inside)} -> results",
    )
    return call(*args)


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
    names = []
    for entry in spec:
        names += [entry] if isinstance(entry, str) else entry or ()
    return tuple(sorted(names))


def _divided(x, spec: P, mesh: Mesh) -> P:
    """The spec without mesh axes that do not divide their axis of the array."""

    def fits(axis: int, entry: typing.Any) -> bool:
        count = 1
        for name in _axes(P(entry)):
            count *= mesh.shape[name]
        return x.shape[axis] % count == 0

    return P(*(e if fits(axis, e) else None for axis, e in enumerate(spec)))
