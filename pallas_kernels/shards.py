"""Run functions on the local shards of arrays that are distributed over a mesh.

On explicit axes, shardings are known while tracing, and ``jax.shard_map`` runs the
function. It also runs the function on automatic axes if the user passes the shardings.
Otherwise, XLA's partitioner runs it through ``custom_partitioning``, which XLA:TPU does
not support (https://github.com/jax-ml/jax/issues/38196).
"""

import math
import typing
from collections.abc import Callable, Sequence

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Local = tuple[Callable, Sequence[P], list[P]]
"""A function of local arrays, and the PartitionSpecs of its arguments and results on
the mesh."""


def has_explicit_axes(mesh) -> bool:
    """Return whether the mesh has axes whose shardings are known while tracing."""
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def over_known_axes(local: Local, args: Sequence[jax.Array], mesh):
    """Run a local function on arrays whose shardings are known."""
    run, inside, outside = local
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(inside),
        out_specs=outside,
        # Pallas's interpreter does not track how new results vary over the mesh.
        check_vma=False,
    )(*moved(args, inside, mesh))


def over_automatic_axes(
    whole: Callable,
    local_of: Callable[[Sequence, Mesh], Local],
    args: Sequence[jax.Array],
    rule: str,
    **sizes: typing.Any,
):
    """Run a local function on automatic axes, so that XLA does not gather its arrays.

    While tracing, shardings on these axes are unknown, and the mesh is known only if it
    is set. XLA's partitioner calls ``local_of`` later.

    Args:
      whole: a function of the whole arrays.
      local_of: a function that returns a :data:`Local`, given the shapes and shardings
        of the arrays, and the mesh.
      args: the arrays.
      rule, **sizes: the sharding rule, and the sizes of its factors; see
        ``custom_partitioning``.
    """

    def partition(mesh, arguments, results):
        del results
        local, inside, outside = local_of(arguments, mesh)
        placed = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        return mesh, local, placed(outside), tuple(placed(inside))

    call = custom_partitioning(whole)
    call.def_partition(
        partition,
        infer_sharding_from_operands=lambda *args: partition(*args)[2],
        sharding_rule=rule,
        **sizes,
    )
    return call(*args)


def moved(arrays: Sequence, specs: Sequence[P], mesh) -> list[jax.Array]:
    """Reshard each array to its PartitionSpec on a mesh.

    With explicit axes, the types of the arrays change. With other axes, this function
    adds sharding constraints.
    """
    to = jax.lax.with_sharding_constraint
    if has_explicit_axes(mesh):
        to = jax.sharding.reshard
    return [
        to(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]


def placed_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Reshard an array like another of the same rank, if both shardings are known."""
    here, there = (jax.typeof(array).sharding for array in (x, other))
    is_known = has_explicit_axes(here.mesh) and has_explicit_axes(there.mesh)
    if not is_known or axes_of(here.spec, x.ndim) == axes_of(there.spec, x.ndim):
        return x
    return moved([x], [there.spec], there.mesh)[0]


def axes_of(spec: P, rank: int) -> list[tuple[str, ...]]:
    """Return, for each axis of an array, the names of the mesh axes that shard it."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return [
        () if e in (None, P.UNCONSTRAINED) else (e,) if isinstance(e, str) else tuple(e)
        for e in entries
    ]


def count_of(mesh: Mesh | AbstractMesh, names: Sequence[str]) -> int:
    """Return the number of shards into which these mesh axes divide an axis."""
    return math.prod(mesh.shape[name] for name in names)


def on_whole_units(
    spec: P, shape: Sequence[int], mesh, unit: Callable[[int], int]
) -> P:
    """Return a PartitionSpec that is changed so that shards consist of whole units.

    Otherwise, two devices would store parts of the same word or block. A mesh axis that
    would cut a unit shards another axis of the array instead, if one fits.

    Args:
      spec: PartitionSpec of the array.
      shape: shape of the array.
      mesh: mesh of the PartitionSpec.
      unit: a function from an axis to the number that must divide a shard's length.
    """

    def fits(axis: int, names) -> bool:
        count = count_of(mesh, names)
        return shape[axis] % (count * unit(axis) if count > 1 else 1) == 0

    wanted = axes_of(spec, len(shape))
    placed = [names if fits(axis, names) else () for axis, names in enumerate(wanted)]
    for names in [names for names in wanted if names and names not in placed]:
        free = (a for a in range(len(placed)) if not placed[a] and fits(a, names))
        other = next(free, None)
        if other is not None:
            placed[other] = names
    return P(*(names or None for names in placed))
