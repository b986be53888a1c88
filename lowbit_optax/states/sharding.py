"""Where the optimizer state lies on a mesh: each array beside its parameter."""

import functools
import typing
from collections.abc import Callable, Container, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lowbit_optax._arguments import check_choice
from lowbit_optax._step import context, trees
from lowbit_optax._step.param_shardings import (
    mesh_or_ambient,
    named_shardings,
    uneven_axes,
)
from lowbit_optax._types import PyTree, Transformation
from lowbit_optax.states.state_leaves import StateLeaf, state_leaves

Uneven = typing.Literal["error", "other_axis", "replicate"]

_MOST_DOUBLINGS = 12

# Shards of a packed array may have to be multiples of up to so many elements along an
# axis: the rows of a block of 2048 in a folded axis, with some to spare.
_LARGEST_UNIT = 4096


def state_shardings(
    tx: Transformation,
    params: PyTree,
    shardings=None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    uneven: Uneven = "error",
):
    """Shardings of the optimizer state, for ``jax.jit(tx.init, out_shardings=...)``.

    Without them ``jax.jit(tx.init)`` puts the state's zeros on one device. Moments,
    residuals, packed words and scales have their parameter's rank and get its
    PartitionSpec. Everything else is replicated: counts, hyperparameters, loss scales,
    and state of another rank, such as Adafactor's factored moments. Where the inner
    transformation keeps an array of the parameter's rank but of another shape, the axes
    that have the parameter's size are sharded as the parameter's.

    Args:
      tx: an optax transformation; those of :func:`lowbit_optax.lowbit` may be anywhere
        inside it.
      params: tree of arrays or ShapeDtypeStructs. A QuantizedTensor is one leaf.
      shardings: tree like ``params``, or a prefix of it, of NamedShardings or
        PartitionSpecs. One sharding stands for all leaves below it. If None, they are
        the ``param_shardings`` that ``tx`` was given.
      mesh: of the PartitionSpecs; if None, that of ``jax.set_mesh``.
      uneven: what to do where an array of the state does not divide into its
        parameter's shards, as the scales of a few rows may not. It is an
        ``"error"``, unless another axis is asked for: with ``"other_axis"`` the mesh's
        axis spreads all of the parameter's state over an axis that divides. Each step
        then exchanges the gradient, the old and the new parameter with the other
        devices, 6 bytes per parameter, and gathers nothing; compiled for eight H200s
        it moves 24 bytes in place of 12, with 4 temporary bytes.
        ``"replicate"`` keeps the array whole along the axis. That is for small leaves:
        every device then stores all of it, and each step gathers it, which compiled for
        eight H200s moved 40 to 109 bytes per parameter of a shard, with 7 to 18
        temporary bytes and 6 to 10 collectives.

    Returns:
      A tree of NamedShardings like ``tx.init(params)``.

    Raises:
      TypeError: if a sharding is of another kind.
      ValueError: if ``shardings`` does not match ``params``, if there is no mesh, or if
        an array does not divide into its shards. All errors name the leaf.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> params = {"w": jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16)}
    >>> tx = lowbit_optax.extra_bits_adamw(1e-3)
    >>> shardings = state_shardings(tx, params, jax.P("data"), mesh=mesh)
    >>> shardings.residual.tree["w"].spec, shardings.count.spec
    (P('data',), P())
    """
    check_choice("state_shardings", "uneven", uneven, Uneven)
    if mesh is None and not jax.sharding.get_mesh().empty:
        mesh = jax.sharding.get_mesh()
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
    parts = list(state_leaves(params, state))
    if uneven == "other_axis":
        placed |= _on_other_axes(placed, parts)

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
        does_not_divide = uneven_axes(part.leaf.shape, sharding)
        if does_not_divide and uneven != "replicate" and part.kind != "blank":
            axis, shards = next(iter(does_not_divide.items()))
            raise ValueError(
                f"state_shardings: axis {axis} of state"
                f"{jax.tree_util.keystr(part.path)}, {trees.describe(part.leaf)}, does "
                f"not divide into the {shards} shards of params{part.owner}, of shape "
                f"{list(shape)} ({sharding.spec}). {advice(part.owner, axis, shards)}; "
                "or call state_shardings with uneven='other_axis', which spreads the "
                "state over another axis, or, for a small leaf, with 'replicate', "
                "which keeps this array whole along the axis and gathers it in each "
                "step"
            )
        return _whole_along(does_not_divide, sharding)

    return jax.tree.unflatten(jax.tree.structure(state), map(sharding_of, parts))


def _shardings_of_params(tx: Transformation, params: PyTree, mesh):
    """The ``param_shardings`` of a transformation; PartitionSpecs are of the mesh."""
    found: dict[str, NamedSharding | None] = {}

    def start(config, params):
        known = config.leaf_shardings(params)
        found.update(zip(trees.named_leaves(params)[0], known, strict=True))
        return config.start(params, {})

    with context.changed(start=start):
        # JAX may have traced tx.init on these shapes before.
        jax.eval_shape(lambda params: tx.init(params), trees.abstract(params))
    names, _, treedef = trees.named_leaves(params)
    missing = next((name for name in names if found.get(name) is None), None)
    if missing is not None:
        raise ValueError(
            f"state_shardings: no sharding of params{missing}: give shardings, or make "
            "tx with param_shardings"
        )
    shardings = [x for x in map(found.get, names) if x is not None]
    if mesh is not None:
        shardings = [x if isinstance(x.mesh, Mesh) else x.spec for x in shardings]
    return treedef.unflatten(shardings)


_Placed = dict[str, tuple[tuple[int, ...], NamedSharding]]


def _on_other_axes(placed: _Placed, parts: Sequence[StateLeaf]) -> _Placed:
    """By path, the parameters whose state needs other axes, and where it then lies."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for part in parts:
        if part.owner is not None and part.kind not in (None, "blank"):
            shapes.setdefault(part.owner, []).append(part.leaf.shape)
    moved = {}
    for owner, stored in shapes.items():
        shape, sharding = placed[owner]
        stored = [x for x in stored if len(x) == len(shape)]
        if any(uneven_axes(x, sharding) for x in stored):
            moved[owner] = shape, _moved(sharding, [shape, *stored])
    return moved


def _moved(sharding: NamedSharding, shapes: Sequence[tuple[int, ...]]) -> NamedSharding:
    """The sharding along other axes where these arrays do not divide into its shards.

    Kernels choose in the same way where they update shards. Where no other axis
    divides, the axis stays.
    """
    entries = [*sharding.spec, *[None] * (len(shapes[0]) - len(sharding.spec))]
    uneven = {axis for x in shapes for axis in uneven_axes(x, sharding)}
    for axis in sorted(uneven):
        for other in range(len(entries)):
            tried = list(entries)
            tried[axis], tried[other] = None, entries[axis]
            placed = sharding.update(spec=tried)
            divides = not any(other in uneven_axes(x, placed) for x in shapes)
            if entries[other] is None and divides:
                entries = tried
                break
    return sharding.update(spec=entries)


def _by_parameter(params, shardings, mesh, advice: Callable[..., str]):
    """Shape and NamedSharding of every parameter, by path; checked."""
    names, leaves, _ = trees.named_leaves(params)
    each = named_shardings("state_shardings", shardings, params, mesh)
    placed = {}
    for path, leaf, sharding in zip(names, leaves, each, strict=True):
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


def _advice(tx, params, owner: str, axis: int, shards: int) -> str:
    """What to do where an axis of a parameter, or of its state, does not divide.

    Formats differ in the sizes that do, which are found by trying, on shapes.
    """
    names, shapes, treedef = trees.named_leaves(trees.abstract(params))
    leaves = dict(zip(names, shapes, strict=True))
    old = leaves[owner]

    def fits(length: int) -> bool:
        try:
            leaves[owner] = _with_length(old, axis, length)
        except ValueError:  # no whole blocks
            return False
        tried = treedef.unflatten(leaves.values())
        state = jax.eval_shape(tx.init, tried)
        return all(
            part.leaf.shape[axis] % shards == 0
            for part in state_leaves(tried, state)
            if part.owner == owner and len(part.leaf.shape) == len(old.shape)
        )

    candidates = (shards << doublings for doublings in range(_MOST_DOUBLINGS))
    # If a number is too small, then the first of its multiples beyond a whole number of
    # blocks on each shard does not fit. It is large, as small leaves are not packed.
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
    """The shapes of a parameter that has another size along an axis."""
    shape = (*leaf.shape[:axis], length, *leaf.shape[axis + 1 :])
    like = jax.ShapeDtypeStruct(shape, leaf.dtype)
    if not trees.is_quantized(leaf):
        return like
    return jax.eval_shape(leaf.quantized, like)


def _whole_along(axes: Container[int], sharding: NamedSharding) -> NamedSharding:
    """The sharding of an array that is not split along these axes."""
    # Of the given length, so that it is equal to the parameter's own where it can be.
    spec = [None if i in axes else entry for i, entry in enumerate(sharding.spec)]
    return sharding.update(spec=spec)
