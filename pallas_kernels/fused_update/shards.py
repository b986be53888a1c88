"""Run functions on the local shards of arrays that are distributed over a mesh.

On explicit axes, shardings are known while tracing, and ``jax.shard_map`` runs the
function. It also runs the function on automatic axes if the user passes the shardings.
Otherwise, XLA's partitioner runs it through ``custom_partitioning``, which XLA:TPU does
not support (https://github.com/jax-ml/jax/issues/38196).

All arrays of a leaf have the leaf's rank, so its PartitionSpec shards all of them. If
shards consist of whole words and blocks, their updates need no communication.
"""

import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import platforms
from pallas_kernels.fused_update.spec import Leaf, Shard

# A multiple of this number is also a multiple of any smaller power of two.
_MAX_DEVICES = 256

Run = Callable[[typing.Any, Sequence[Shard]], list[jax.Array]]
"""``run(shared, shards)`` returns the results of all leaves in one list. The arrays of
the tree ``shared`` are replicated on every device."""


def over_shards(
    run: Run, shared, leaves: Sequence[Leaf], *, can_partition: bool
) -> list[jax.Array]:
    """Call ``run`` on every device with its parts of the leaves.

    Args:
      run: see :data:`Run`.
      shared: tree of small arrays.
      leaves: whole leaves.
      can_partition: whether XLA can partition kernels on automatic axes. If False,
        only leaves with a ``sharding`` may be sharded over such axes.

    Returns:
      The results of ``run`` as whole arrays, sharded like their leaves.
    """
    args, structure = jax.tree.flatten((shared, leaves))
    mesh = mesh_of(leaves[0])
    count = len(jax.tree.leaves(shared))

    def whole(*args):
        shared, leaves = structure.unflatten(args)
        return run(shared, [Shard(leaf, leaf.shape) for leaf in leaves])

    def local_of(arguments, mesh, spec_of=_spec_of) -> Local:
        _, described = structure.unflatten(arguments)
        specs = [_supported(leaf, spec_of(leaf), mesh) for leaf in described]

        def local(*args):
            shared, leaves = structure.unflatten(args)
            pairs = zip(leaves, specs, strict=True)
            return run(shared, [_shard(leaf, spec, mesh) for leaf, spec in pairs])

        return local, *_all_specs(described, specs, count)

    if mesh is not None and (has_explicit_axes(mesh) or not can_partition):
        local = local_of(args, mesh, _known_spec)
        results = over_known_axes(local, args, mesh)
        # Only the kernel needs shards of whole words and blocks.
        return moved(results, _result_specs(leaves, mesh), mesh)
    if not can_partition:
        return whole(*args)
    mesh = jax.typeof(_anchor(leaves[0])).sharding.mesh
    devices = _MAX_DEVICES if mesh.empty else mesh.size
    leaves = [_with_placed_gradients(leaf, devices) for leaf in leaves]
    args = jax.tree.leaves((shared, leaves))
    rule, sizes = _sharding_rule(leaves, args[:count], devices)
    return over_automatic_axes(whole, local_of, args, rule, **sizes)


def _with_placed_gradients(leaf: Leaf, devices: int) -> Leaf:
    """Returns the leaf, with gradients sharded like its state if XLA may choose.

    The gradients of a sharded batch are then summed directly into shards. Otherwise,
    every device would store the whole sum, because :func:`_sharding_rule` names the
    axes of the gradient separately. A gradient with another sharding is not moved here.
    """
    anchors = [leaf.operands[i] for i in _anchors(leaf)]
    sizes: dict[str, int] = {}
    name = lambda like, stacked: _axes("a", leaf, like, stacked, devices, sizes)
    rest = [name(x, leaf.stacked) for x in anchors]
    first = lambda x, *_: [x]

    def local_of(arguments, mesh) -> Local:
        del mesh
        specs = [x.sharding.spec for x in arguments]
        return first, specs, specs[:1]

    arrays = leaf.arrays
    for number, operand in enumerate(leaf.operands):
        x = operand.array
        if number in _anchors(leaf) or x.shape != leaf.shape:
            continue
        own = name(operand, False)
        rule = f"{', '.join([own, *rest])} -> {own}"
        args = [x, *(anchor.array for anchor in anchors)]
        split = _used_sizes(rule, sizes)
        (arrays[number],) = over_automatic_axes(first, local_of, args, rule, **split)
    return leaf.with_arrays(arrays)


def _result_specs(leaves: Sequence[Leaf], mesh) -> list[P]:
    """Returns the PartitionSpecs that a caller expects for the results of leaves.

    Overwritten arrays keep their sharding. New arrays are sharded like the leaf. If
    that would not divide their shape evenly, they keep the sharding from the kernel.
    """
    places = []
    for leaf in leaves:
        asked = _known_spec(leaf)
        for result in leaf.results:
            if result.overwrites is not None and has_explicit_axes(mesh):
                given = jax.typeof(leaf.arrays[result.overwrites])
                places.append(given.sharding.spec)
                continue
            stored = leaf.stored_shape(result)
            counts = [count_of(mesh, names) for names in axes_of(asked, len(stored))]
            divides = not any(n % c for n, c in zip(stored, counts, strict=True))
            place = asked if divides else _supported(leaf, asked, mesh)
            is_stack = result.overwrites in leaf.in_stacks
            places.append(P(None, *place) if is_stack else place)
    return places


def _shard(leaf: Leaf, spec: P, mesh: Mesh) -> Shard:
    """Returns the device's part of a leaf with local arrays."""
    shape, base = list(leaf.shape), None
    for axis, names in enumerate(axes_of(spec, len(shape))):
        shape[axis] //= count_of(mesh, names)
        if count_of(mesh, names) > 1:
            step = shape[axis] * math.prod(leaf.shape[axis + 1 :]) % 2**32
            part = lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(step)
            base = part if base is None else base + part
    return Shard(leaf, tuple(shape), base)


def _supported(leaf: Leaf, spec: P, mesh: Mesh) -> P:
    """Returns the spec, changed so that shards consist of whole words and blocks."""
    return on_whole_units(spec, leaf.shape, mesh, leaf.unit)


def mesh_of(leaf: Leaf) -> Mesh | AbstractMesh | None:
    """Return the mesh on which the leaf's sharding is known, or None.

    If the mesh has explicit axes, the types of arrays contain it. Otherwise, the user
    may pass a sharding, which is ignored inside a ``jax.shard_map``.
    """
    typed = jax.typeof(_anchor(leaf)).sharding.mesh
    if has_explicit_axes(typed):
        return typed
    if leaf.sharding is None or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return leaf.sharding.mesh


def is_partitioned(leaf: Leaf) -> bool | None:
    """Return whether XLA may have to partition the leaf; None if not known yet."""
    return platforms.is_partitioned() if mesh_of(leaf) is None else False


def _known_spec(leaf: Leaf) -> P:
    """Returns the leaf's PartitionSpec on the mesh of :func:`mesh_of`."""
    typed = jax.typeof(_anchor(leaf)).sharding.mesh
    if leaf.sharding is not None and not has_explicit_axes(typed):
        return leaf.sharding.spec
    spec = jax.typeof(_anchor(leaf)).sharding.spec
    return P(*spec[1:]) if leaf.stacked else spec


def _spec_of(leaf: Leaf) -> P:
    """Returns the leaf's PartitionSpec: that of its most divided overwritten array.

    This is the parameter, unless the state is sharded over more devices (ZeRO-1).
    """
    anchors: list[typing.Any] = [leaf.arrays[i] for i in _anchors(leaf)]
    spec = _most_divided([x.sharding.spec for x in anchors], anchors[0].sharding.mesh)
    return P(*spec[1:]) if leaf.stacked else spec


def _anchors(leaf: Leaf) -> list[int]:
    """Returns the operands whose sharding determines that of the leaf."""
    return sorted(leaf.overwritten) or [0]


def _anchor(leaf: Leaf):
    return leaf.arrays[_anchors(leaf)[0]]


def _all_specs(leaves, specs, shared: int) -> tuple[list[P], list[P]]:
    """Returns the PartitionSpecs of all arguments and of all results."""
    inside, outside = [P()] * shared, []
    for leaf, spec in zip(leaves, specs, strict=True):
        inside += [
            P(None, *spec) if i in leaf.in_stacks else _without(spec, operand.repeated)
            for i, operand in enumerate(leaf.operands)
        ]
        outside += [
            P(None, *spec) if result.overwrites in leaf.in_stacks else spec
            for result in leaf.results
        ]
    return inside, outside


def _without(spec: P, repeated: Sequence[int]) -> P:
    """Returns ``spec`` without sharding along the ``repeated`` axes."""
    return P(*(None if axis in repeated else x for axis, x in enumerate(spec)))


def _sharding_rule(
    leaves: Sequence[Leaf], shared, devices: int
) -> tuple[str, dict[str, int]]:
    """Returns the rule that propagates shardings, and the sizes of the rule's factors.

    XLA's partitioner (Shardy) reads this einsum-like rule before it calls
    ``partition``. Axes with the same name get the same sharding. The axes of results
    have the names of the axes of overwritten arrays, so that these arrays stay in
    place. The axes of other operands, such as gradients, have separate names, so that
    the partitioner moves these operands instead.
    """
    inside = [
        " ".join(f"s{number}a{axis}" for axis in range(x.ndim))
        for number, x in enumerate(shared)
    ]
    outside, sizes = [], {}

    def add(to: list[str], name: str, leaf: Leaf, like, stacked: bool) -> None:
        to.append(_axes(name, leaf, like, stacked, devices, sizes))

    for number, leaf in enumerate(leaves):
        anchors = _anchors(leaf)
        for i, operand in enumerate(leaf.operands):
            name = f"l{number}" if i in anchors else f"l{number}o{i}"
            add(inside, name, leaf, operand, i in leaf.in_stacks)
        for result in leaf.results:
            stacked = result.overwrites in leaf.in_stacks
            add(outside, f"l{number}", leaf, result, stacked)
    rule = f"{', '.join(inside)} -> {', '.join(outside)}"
    return rule, _used_sizes(rule, sizes)


def _used_sizes(rule: str, sizes: dict[str, int]) -> dict[str, int]:
    """Returns the sizes of factors that are not a whole axis of any array."""
    whole = set(rule.replace(",", " ").split())
    return {name: size for name, size in sizes.items() if name not in whole}


def _axes(name: str, leaf: Leaf, like, stacked: bool, devices: int, sizes) -> str:
    """Returns the names of the axes of an array of the leaf; adds to ``sizes``."""
    axes = [
        _factor(f"{name}a{axis}", axis, leaf, like, devices, sizes)
        for axis in range(len(leaf.shape))
    ]
    return " ".join([f"{name}s", *axes] if stacked else axes)


def _factor(
    name: str, axis: int, leaf: Leaf, like, devices: int, sizes: dict[str, int]
) -> str:
    """Returns an axis in the rule, split into units and the elements of each unit.

    Arrays that have different lengths along an axis, such as elements, words and
    scales, then get the same sharding. If the units might not divide evenly into
    shards, the partitioner would use a part of a mesh axis, which JAX cannot express.
    In that case, each array keeps its sharding.
    """
    length, stored = leaf.shape[axis], leaf.stored_shape(like)[axis]
    units, rest = divmod(length, leaf.unit(axis))
    if leaf.unit(axis) == 1:
        return name
    if rest or not units or units % devices or stored % units:
        return name if stored == length else f"{name}n{stored}"
    count = stored // units
    if count == 1:
        return name
    # The name contains the axis, because two axes of an array must not share a factor.
    within = f"a{axis}n{count}"
    sizes[name] = units
    sizes[within] = count
    return f"({name} {within})"


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


def is_on_explicit_axes(x: jax.Array) -> bool:
    """Return whether the type of an array contains its sharding."""
    return has_explicit_axes(jax.typeof(x).sharding.mesh)


def placed_beside(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Reshard an array like the most divided of some arrays, on explicit axes."""
    if not is_on_explicit_axes(x):
        return x
    here, others = jax.typeof(x).sharding, [o for o in others if o.ndim == x.ndim]
    specs = [here.spec, *(jax.typeof(other).sharding.spec for other in others)]
    spec = _most_divided(specs, here.mesh)
    return x if spec is here.spec else moved([x], [spec], here.mesh)[0]


def _most_divided(specs: Sequence[P], mesh: Mesh | AbstractMesh) -> P:
    """Returns the first PartitionSpec with the most shards, or with the most names.

    Types differ in names even if an axis of the mesh has only one device.
    """
    names = lambda spec: sum(axes_of(spec, len(spec)), ())
    return max(specs, key=lambda x: (count_of(mesh, names(x)), len(names(x))))


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
