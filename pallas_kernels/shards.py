"""Functions of the local shards of arrays that are spread over a mesh.

On explicit axes placements are known while tracing, and ``jax.shard_map`` runs them; so
it does where the user says how arrays lie on automatic axes. Elsewhere
``custom_partitioning`` has XLA's partitioner run them, which XLA:TPU does not have
(https://github.com/jax-ml/jax/issues/38196).
"""

import math
import typing
from collections.abc import Callable, Sequence

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Local = tuple[Callable, Sequence[P], typing.Any]
"""A function of local arrays, within the mesh's axes, and where its arguments and its
results are."""


def has_explicit_axes(mesh) -> bool:
    """Whether placements of arrays on some axes of the mesh are known while tracing."""
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def over_known_axes(local: Local, args: Sequence[jax.Array], mesh):
    """The results of a local function of arrays whose placements are known."""
    run, inside, outside = local
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(inside),
        out_specs=outside,
        # Pallas's interpreter loses how new results vary over the mesh.
        check_vma=False,
    )(*moved(args, inside, mesh))


def over_automatic_axes(
    whole: Callable,
    local_of: Callable[[Sequence, Mesh], Local],
    args: Sequence[jax.Array],
    rule: str,
    **sizes: typing.Any,
):
    """The results of a local function: without it XLA gathers what a kernel reads.

    While tracing, placements on these axes are not known, and the mesh only if it is
    set. XLA's partitioner asks for the local function later.

    Args:
      whole: the same function, of whole arrays.
      local_of: of arrays' shapes and shardings, and the mesh.
      args: the arrays.
      rule, **sizes: how XLA spreads placements, and the sizes of the rule's factors;
        see ``custom_partitioning``.
    """

    def partition(mesh, arguments, results):
        del results
        local, inside, outside = local_of(arguments, mesh)
        placed = lambda specs: jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec
        )
        return mesh, local, placed(outside), placed(tuple(inside))

    call = custom_partitioning(whole)
    call.def_partition(
        partition,
        infer_sharding_from_operands=lambda *args: partition(*args)[2],
        sharding_rule=rule,
        **sizes,
    )
    return call(*args)


def moved(arrays: Sequence, specs: Sequence[P], mesh) -> list[jax.Array]:
    """The arrays at these places of a mesh, by a spec for each.

    With explicit axes their types change too; elsewhere it is a constraint.
    """
    to = jax.lax.with_sharding_constraint
    if has_explicit_axes(mesh):
        to = jax.sharding.reshard
    return [
        to(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]


def placed_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """The array where another one of its rank is known to be."""
    here, there = (jax.typeof(array).sharding for array in (x, other))
    is_known = has_explicit_axes(here.mesh) and has_explicit_axes(there.mesh)
    if not is_known or axes_of(here.spec, x.ndim) == axes_of(there.spec, x.ndim):
        return x
    return moved([x], [there.spec], there.mesh)[0]


def axes_of(spec: P, rank: int) -> list[tuple[str, ...]]:
    """The names of the mesh axes that each axis of an array is spread over."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return [
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries
    ]


def count_of(mesh: Mesh, names: Sequence[str]) -> int:
    """How many shards mesh axes of these names make together."""
    return math.prod(mesh.shape[name] for name in names)


def on_whole_units(
    spec: P, shape: Sequence[int], mesh, unit: Callable[[int], int]
) -> P:
    """The spec, changed so that every shard is whole units.

    If a word or a block were cut, two devices would hold parts of it. A mesh axis that
    would cut one shards another axis of the array instead, or none.

    Args:
      spec: of an array of this shape.
      shape: of the array.
      mesh: whose axes the spec names.
      unit: of an axis, the number of which a shard's length must be a multiple.
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


def _is_spec(x) -> bool:
    return isinstance(x, P)
