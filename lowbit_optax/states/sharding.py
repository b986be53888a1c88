"""Shard the optimizer state on a mesh, like its parameters or over more devices."""

import functools
import math
import typing
from collections.abc import Callable, Container, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lowbit_optax._arguments import check_choice, check_transformation, check_type
from lowbit_optax._step import context, trees
from lowbit_optax._step.param_shardings import (
    leaf_shardings,
    mesh_or_ambient,
    named_shardings,
    uneven_axes,
)
from lowbit_optax._types import PyTree, Transformation
from lowbit_optax.states.state_leaves import StateLeaf, state_leaves
from pallas_kernels.fused_update.shards import axes_of, count_of, has_explicit_axes
from pallas_kernels.layout import layout_of

Uneven = typing.Literal["error", "other_axis", "replicate"]

_MOST_DOUBLINGS = 12

_LEAST_DIVIDED = 2**16

# Along an axis, shards of packed arrays may have to be multiples of a unit. No unit is
# larger than this number: the rows of a block of 2048 in a folded axis, and a margin.
_LARGEST_UNIT = 4096


def state_shardings(
    tx: Transformation,
    params: PyTree,
    shardings: PyTree = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    over: str | Sequence[str] = (),
    uneven: Uneven = "error",
):
    """Return shardings of the state for ``jax.jit(tx.init, out_shardings=...)``.

    Without them, ``jax.jit(tx.init)`` puts the zeros of the state on one device.
    Moments, residuals, packed words and scales have the rank of their parameter and get
    its PartitionSpec. Other arrays are replicated: counts, hyperparameters, loss
    scales, and arrays of another rank, such as Adafactor's factored moments. If an
    array of the inner transformation has its parameter's rank but another shape, only
    the axes of equal size are sharded.

    Args:
      tx: an optax transformation, which may contain :func:`lowbit_optax.lowbit`
        anywhere.
      params: tree of arrays or ShapeDtypeStructs. A QuantizedTensor is one leaf.
      shardings: tree of NamedShardings or PartitionSpecs, like ``params`` or a prefix
        of it. One sharding applies to all leaves below it. If None, the
        ``param_shardings`` that were passed to ``tx``; with ``over``, parameters are
        replicated by default.
      mesh: mesh for PartitionSpecs; if None, the mesh of ``jax.set_mesh``.
      over: one or several axes of the mesh that shard the state in addition to the axes
        of its parameter (ZeRO-1), such as ``"data"``. A step then sums the gradients
        into these shards, and gathers the new parameters in their own dtype. The axes
        divide the rows of a matrix, otherwise its columns, and otherwise the layers of
        a stack. If no axis divides into whole words and blocks, the state of a leaf
        with fewer than 65,536 elements is sharded like its parameter, and a larger leaf
        raises an error unless ``uneven`` is ``"replicate"``.
      uneven: what to do if an array of the state, such as the scales of a few rows,
        does not divide into the shards of its parameter, one of:

        - ``"error"``: raise a ValueError.
        - ``"other_axis"``: shard all state of the parameter along another axis that
          divides. Each step exchanges the gradient, the old and the new parameter with
          the other devices, 6 bytes per parameter, and gathers nothing. Compiled for
          eight H200s, a step moves 24 instead of 12 bytes per parameter of a shard, and
          needs 4 temporary bytes.
        - ``"replicate"``: do not split the array along the axis. Use it only for small
          leaves, because every device stores the whole array, and each step gathers it.
          Compiled for eight H200s, a step moved 40 to 109 bytes per parameter of a
          shard, with 7 to 18 temporary bytes and 6 to 10 collectives.

    Returns:
      A tree of NamedShardings like ``tx.init(params)``.

    Raises:
      TypeError: if a sharding has another type.
      ValueError: if ``shardings`` does not match ``params``, if a mesh is missing, or
        if an array does not divide into its shards. The message names the leaf.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> params = {"w": jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16)}
    >>> tx = lowbit_optax.extra_bits_adamw(1e-3)
    >>> shardings = state_shardings(tx, params, jax.P("data"), mesh=mesh)
    >>> shardings.residual.tree["w"].spec, shardings.count.spec
    (P('data',), P())
    """
    check_transformation("state_shardings", "tx", tx)
    check_choice("state_shardings", "uneven", uneven, Uneven)
    if mesh is None and not jax.sharding.get_mesh().empty:
        mesh = jax.sharding.get_mesh()
    check_type("state_shardings: over", over, Sequence, "names of axes of the mesh")
    over = (over,) if isinstance(over, str) else tuple(dict.fromkeys(over))
    if shardings is None and over and not known_shardings(tx, params):
        shardings = PartitionSpec()
    if shardings is None:
        shardings = _shardings_of_params(tx, params, mesh)
    advice = functools.partial(_advice, tx, params)
    placed = _by_parameter(params, shardings, mesh, advice)
    if mesh is None:
        meshes = (x.mesh for _, x in placed.values() if isinstance(x.mesh, Mesh))
        mesh = next(meshes, None)
    around = mesh_or_ambient("state_shardings", mesh, "parameters")
    replicated = NamedSharding(around, PartitionSpec())
    state = jax.eval_shape(tx.init, trees.abstract(params))
    parts, units = list(state_leaves(params, state)), _units(tx, params)
    if over:
        placed = _divided(placed, parts, units, over, uneven, advice)
    # On automatic axes, a step exchanges the words and blocks that shards cut.
    explicit = [name for name, (_, x) in placed.items() if has_explicit_axes(x.mesh)]
    units = {name: units[name] for name in explicit if name in units}
    if uneven == "other_axis":
        placed |= _on_other_axes(placed, parts, units)

    def sharding_of(part: StateLeaf) -> NamedSharding:
        if part.owner is None:
            return replicated
        shape, sharding = placed[part.owner]
        if part.leaf.shape == shape:
            return sharding
        if len(part.leaf.shape) != len(shape):
            return replicated
        if part.kind is None:
            sizes = zip(part.leaf.shape, shape, strict=True)
            differ = [axis for axis, (here, there) in enumerate(sizes) if here != there]
            return _whole_along(differ, sharding)
        unit = units.get(part.owner, _ANY)
        does_not_divide = _cut_axes([shape, part.leaf.shape], sharding, unit)
        if does_not_divide and uneven != "replicate" and part.kind != "blank":
            axis, shards = next(iter(does_not_divide.items()))
            raise ValueError(
                f"state_shardings: axis {axis} of state"
                f"{jax.tree_util.keystr(part.path)}, {trees.describe(part.leaf)}, does "
                f"not divide into the {shards} shards of params{part.owner}, of shape "
                f"{list(shape)} ({sharding.spec}), in whole words and blocks. "
                f"{advice(part.owner, axis, shards, unit(axis))}; "
                "or pass uneven='other_axis', which shards the state along another "
                "axis, or 'replicate', which gathers this array in each step"
            )
        return _whole_along(does_not_divide, sharding)

    return jax.tree.unflatten(jax.tree.structure(state), map(sharding_of, parts))


def known_shardings(tx: Transformation, params: PyTree) -> dict[str, NamedSharding]:
    """Return the ``param_shardings`` of a transformation, by path of the parameter."""
    found: dict[str, NamedSharding | None] = {}

    def start(config, params):
        known = leaf_shardings(config.param_shardings, params)
        found.update(zip(trees.named_leaves(params)[0], known, strict=True))
        return config.start(params, {})

    context.init_with(start, tx, trees.abstract(params))
    return {name: x for name, x in found.items() if x is not None}


def _shardings_of_params(tx: Transformation, params: PyTree, mesh):
    """Return the ``param_shardings`` of a transformation, on ``mesh`` if given."""
    found = known_shardings(tx, params)
    names, _, treedef = trees.named_leaves(params)
    missing = next((name for name in names if name not in found), None)
    if missing is not None:
        raise ValueError(
            f"state_shardings: shardings must be given for params{missing}, or tx must "
            "have param_shardings"
        )
    shardings = [found[name] for name in names]
    if mesh is not None:
        shardings = [x if isinstance(x.mesh, Mesh) else x.spec for x in shardings]
    return treedef.unflatten(shardings)


_Placed = dict[str, tuple[tuple[int, ...], NamedSharding]]


Unit = Callable[[int], int]
"""A function from an axis to the number that must divide a shard's length."""


_ANY: Unit = lambda _: 1


def _units(tx: Transformation, params: PyTree) -> dict[str, Unit]:
    """Return the units of the words and blocks of parameters, by path."""
    found: dict[str, Unit] = {}

    def start(config, params):
        names, given, treedef = trees.named_leaves(params)
        leaves = config.leaves(names, given)
        plan = config.plan_of(leaves, treedef)
        for leaf in leaves:
            bits, block_size = plan.packed(leaf)
            if bits or block_size:
                unit = layout_of(leaf.param.shape).unit
                found[leaf.name] = functools.partial(
                    unit, bits=bits, block_size=block_size
                )
        return config.start(params, {})

    context.init_with(start, tx, trees.abstract(params))
    return found


def _divided(
    placed: _Placed,
    parts: Sequence[StateLeaf],
    units: dict[str, Unit],
    over: tuple[str, ...],
    uneven: Uneven,
    advice: Callable[..., str],
) -> _Placed:
    """Return the parameters with the shardings of their states, divided over more axes.

    For the arguments, see :func:`state_shardings`, :func:`_units` and :func:`_advice`.
    """
    result = {}
    for name, (shape, sharding) in placed.items():
        for axis in over:
            if axis not in sharding.mesh.axis_names:
                raise ValueError(
                    "state_shardings: each of over must be an axis of the mesh "
                    f"{sharding.mesh.axis_names}, got {axis!r}"
                )
        stored = _stored_shapes(parts, name, len(shape))
        unit = units.get(name, _ANY)
        divided = _over(sharding, [shape, *stored], over, unit)
        if (
            divided is None
            and uneven != "replicate"
            and math.prod(shape) >= _LEAST_DIVIDED
        ):
            shards = math.prod(sharding.mesh.shape[x] for x in over)
            axis = max(len(shape) - 2, 0)
            used = axes_of(sharding.spec, len(shape))
            more = (x for x in over if x not in sum(used, ()))
            count = count_of(sharding.mesh, (*used[axis], *more))
            raise ValueError(
                f"state_shardings: the state of params{name}, of shape {list(shape)}, "
                f"must divide into {shards} shards over {' and '.join(over)} along an "
                f"axis of the parameter. {advice(name, axis, count, unit(axis))}; or "
                "pass uneven='replicate', which keeps the sharding of the parameter"
            )
        result[name] = shape, sharding if divided is None else divided
    return result


def _over(
    sharding: NamedSharding,
    shapes: Sequence[tuple[int, ...]],
    over: tuple[str, ...],
    unit: Unit,
) -> NamedSharding | None:
    """Return a sharding that divides one axis over more axes of the mesh, or None.

    The first shape belongs to the parameter, and the other shapes to its state.
    """
    rank = len(shapes[0])
    used = axes_of(sharding.spec, rank)
    more = tuple(x for x in over if x not in sum(used, ()))
    if not more:
        return sharding
    rows = max(rank - 2, 0)
    for axis in sorted(range(rank), key=lambda axis: (axis - rows) % rank):
        entries = [names or None for names in used]
        entries[axis] = (*used[axis], *more)
        tried = sharding.update(spec=PartitionSpec(*entries))
        # Other axes may cut words, as they do without ``over``.
        is_uneven = any(uneven_axes(x, tried) for x in shapes)
        if not is_uneven and axis not in _cut_axes(shapes, tried, unit):
            return tried
    return None


def _cut_axes(
    shapes: Sequence[tuple[int, ...]], sharding: NamedSharding, unit: Unit
) -> dict[int, int]:
    """Return the axes along which shards are uneven or cut words or blocks.

    Args:
      shapes: the shape of a parameter, and those of words and blocks of its state.
      sharding: the sharding of all of them.
      unit: see :func:`_units`.

    Returns:
      A dict from these axes to the number of shards.
    """
    counts = enumerate(axes_of(sharding.spec, len(shapes[0])))
    shards = {axis: count_of(sharding.mesh, names) for axis, names in counts if names}
    return {
        axis: count
        for axis, count in shards.items()
        if count > 1 and shapes[0][axis] % (count * unit(axis))
    } | {axis: n for x in shapes for axis, n in uneven_axes(x, sharding).items()}


def _stored_shapes(parts: Sequence[StateLeaf], owner: str, rank: int):
    """Return the shapes of words, codes and scales of a parameter."""
    own = (x for x in parts if x.owner == owner and x.kind not in (None, "blank"))
    return [x.leaf.shape for x in own if len(x.leaf.shape) == rank]


def _on_other_axes(
    placed: _Placed, parts: Sequence[StateLeaf], units: dict[str, Unit]
) -> _Placed:
    """Return the parameters whose state needs other axes, with their new shardings."""
    moved = {}
    for owner, (shape, sharding) in placed.items():
        shapes = [shape, *_stored_shapes(parts, owner, len(shape))]
        unit = units.get(owner, _ANY)
        if _cut_axes(shapes, sharding, unit):
            moved[owner] = shape, _moved(sharding, shapes, unit)
    return moved


def _moved(
    sharding: NamedSharding, shapes: Sequence[tuple[int, ...]], unit: Unit
) -> NamedSharding:
    """Return ``sharding`` moved to axes that divide evenly in arrays of all ``shapes``.

    Kernels choose axes in the same way when they update shards. If no other axis
    divides, the axis does not change.
    """
    entries = [*sharding.spec, *[None] * (len(shapes[0]) - len(sharding.spec))]
    for axis in sorted(_cut_axes(shapes, sharding, unit)):
        for other in range(len(entries)):
            tried = list(entries)
            tried[axis], tried[other] = None, entries[axis]
            placed = sharding.update(spec=tried)
            divides = other not in _cut_axes(shapes, placed, unit)
            if entries[other] is None and divides:
                entries = tried
                break
    return sharding.update(spec=entries)


def _by_parameter(params, shardings, mesh, advice: Callable[..., str]):
    """Return a dict from each parameter's path to its shape and NamedSharding."""
    each = named_shardings("state_shardings", shardings, params, mesh)
    placed = {}
    for (path, leaf), sharding in zip(trees.by_path(params).items(), each, strict=True):
        name, shape = f"params{path}", tuple(leaf.shape)
        assert sharding is not None, "each is known"
        for axis, shards in uneven_axes(shape, sharding).items():
            raise ValueError(
                f"state_shardings: axis {axis} of {name}, of shape {list(shape)}, "
                f"does not divide into {shards} shards ({sharding.spec}). "
                f"{advice(path, axis, shards)}"
            )
        placed[path] = shape, sharding
    return placed


def _advice(tx, params, owner: str, axis: int, shards: int, unit: int = 1) -> str:
    """Return advice for an axis of a parameter or its state that does not divide.

    The sizes that divide depend on the format, so they are found by trying shapes. The
    length of each shard must be a multiple of ``unit``.
    """
    names, shapes, treedef = trees.named_leaves(trees.abstract(params))
    leaves = dict(zip(names, shapes, strict=True))
    old = leaves[owner]

    def fits(length: int) -> bool:
        if length % (shards * unit):
            return False
        try:
            leaves[owner] = _with_length(old, axis, length)
        except ValueError:  # no whole blocks
            return False
        tried = treedef.unflatten(leaves.values())
        state = context.init_with(context.without_masters, tx, tried)
        return all(
            part.leaf.shape[axis] % shards == 0
            for part in state_leaves(tried, state)
            if part.owner == owner and len(part.leaf.shape) == len(old.shape)
        )

    candidates = (shards << doublings for doublings in range(_MOST_DOUBLINGS))
    # x * (_LARGEST_UNIT + 1) divides into whole blocks only if x does, and it is so
    # large that the leaf is packed.
    multiple = next((x for x in candidates if fits(x * (_LARGEST_UNIT + 1))), None)
    if multiple is None:
        size = "another size"
    else:
        below = old.shape[axis] // multiple * multiple
        near = [x for x in (below, below + multiple) if x and fits(x)]
        size = f"a multiple of {multiple} for its size"
        size += f", such as {' or '.join(map(str, near))}" if near else ""
    return (
        f"Give axis {axis} of the parameter {size}; or shard it over fewer devices or "
        "along another axis"
    )


def _with_length(leaf, axis: int, length: int):
    """Return an abstract parameter with the size ``length`` along an axis."""
    shape = (*leaf.shape[:axis], length, *leaf.shape[axis + 1 :])
    like = jax.ShapeDtypeStruct(shape, leaf.dtype)
    if not trees.is_quantized(leaf):
        return like
    return jax.eval_shape(leaf.quantized, like)


def _whole_along(axes: Container[int], sharding: NamedSharding) -> NamedSharding:
    """Return ``sharding`` without the splits along these axes."""
    # Keep the length of the spec, so that it can be equal to the parameter's spec.
    spec = [None if i in axes else entry for i, entry in enumerate(sharding.spec)]
    return sharding.update(spec=spec)
