"""Where the optimizer state lies on a mesh: each array beside its parameter."""

import functools
import math
import typing
from collections.abc import Callable

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowbit_optax._step import trees
from lowbit_optax.formats import quantized_tensor
from lowbit_optax.states.state_leaves import KeyPath, StateLeaf, state_leaves

Uneven = typing.Literal["error", "replicate"]

_MOST_DOUBLINGS = 12

# The most elements of an axis of which the shards of a packed array may have to be
# multiples: the rows of a block of 2048 in a folded axis, with some to spare.
_LARGEST_UNIT = 4096


def state_shardings(
    tx: optax.GradientTransformation,
    params: optax.Params,
    shardings,
    *,
    mesh: Mesh | None = None,
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
        PartitionSpecs. One sharding stands for all leaves below it.
      mesh: of the PartitionSpecs; if None, that of ``jax.set_mesh``.
      uneven: what to do where an array of the state does not divide into its
        parameter's shards, as the scales of a few rows may not: raise an
        ``"error"``, or ``"replicate"`` it along that axis. That is for small leaves:
        every device then stores all of it, and each step gathers it, which compiled for
        eight H200s moved 40 to 109 bytes per parameter of a shard in place of 12, with
        7 to 18 temporary bytes and 6 to 10 collectives.

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
    >>> shardings.residual.words["w"].spec, shardings.count.spec
    (P('data',), P())
    """
    if uneven not in ("error", "replicate"):
        raise ValueError(
            f"state_shardings: uneven is {uneven!r}, not 'error' or 'replicate'"
        )
    advice = functools.partial(_advice, tx, params)
    placed = _by_parameter(params, shardings, mesh, advice)
    if mesh is None:
        mesh = next((sharding.mesh for _, sharding in placed.values()), None)
    replicated = NamedSharding(_mesh_or_ambient(mesh, "parameters"), PartitionSpec())
    state = jax.eval_shape(tx.init, trees.abstract(params))

    def sharding_of(part: StateLeaf) -> NamedSharding:
        if part.owner is None:
            return replicated
        shape, sharding = placed[part.owner]
        if part.leaf.shape == shape:
            return sharding
        if len(part.leaf.shape) != len(shape):
            return replicated
        if part.is_residual or part.is_codes or part.is_scales:
            own = functools.partial(advice, part.owner)
            return _packed(part, shape, sharding, uneven, own)
        return _on_equal_axes(part.leaf.shape, shape, sharding)

    return jax.tree.unflatten(
        jax.tree.structure(state),
        [sharding_of(part) for part in state_leaves(params, state)],
    )


def _by_parameter(params, shardings, mesh: Mesh | None, advice: Callable[..., str]):
    """Shape and NamedSharding of every parameter, by path; checked."""
    with_path, treedef = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=quantized_tensor.is_quantized
    )
    spread = _spread(params, treedef, shardings)
    found = {}
    for (path, leaf), given in zip(with_path, spread, strict=True):
        name = _name(path)
        shape = tuple(leaf.shape)
        sharding = _named_sharding(name, given, mesh)
        if len(sharding.spec) > len(shape):
            raise ValueError(
                f"state_shardings: {name} has {len(shape)} axes, but {sharding.spec} "
                f"is of {len(sharding.spec)}"
            )
        for axis, shards in enumerate(_shards(sharding, len(shape))):
            if shape[axis] % shards:
                raise ValueError(
                    f"state_shardings: axis {axis} of {name}, of shape {list(shape)}, "
                    f"does not divide into {shards} shards ({sharding.spec}). "
                    f"{advice(path, axis, shards)}"
                )
        found[path] = shape, sharding
    return found


def _spread(params, treedef, shardings) -> list:
    """A sharding for every parameter, from a tree that may be a prefix."""
    is_leaf = lambda x: x is None or quantized_tensor.is_quantized(x)

    def below(sharding, part):
        if quantized_tensor.is_quantized(sharding):
            # As jax.tree.map over a QuantizedTensor makes them: one per array in it.
            sharding = sharding.codes
        return jax.tree.map(
            lambda _: sharding, part, is_leaf=quantized_tensor.is_quantized
        )

    try:
        spread = jax.tree.map(below, shardings, params, is_leaf=is_leaf)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "state_shardings: shardings must have the structure of params, or of a "
            f"prefix of it: {error}"
        ) from error
    return treedef.flatten_up_to(spread)


def _named_sharding(name: str, given, mesh: Mesh | None) -> NamedSharding:
    if isinstance(given, NamedSharding):
        return given
    if isinstance(given, PartitionSpec):
        return NamedSharding(_mesh_or_ambient(mesh, name), given)
    raise TypeError(
        f"state_shardings: the sharding of {name} is {given!r}; accepted are a "
        "NamedSharding and a PartitionSpec"
    )


def _mesh_or_ambient(mesh, name: str):
    if mesh is None:
        mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            f"state_shardings: no mesh for the PartitionSpec of {name}; give mesh=, or "
            "call it under jax.set_mesh"
        )
    return mesh


def _packed(
    part: StateLeaf,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    uneven: Uneven,
    advice: Callable[[int, int], str],
) -> NamedSharding:
    """The parameter's own PartitionSpec, for an array that packs or summarises it."""
    entries = _entries(sharding, len(shape))
    for axis, shards in enumerate(_shards(sharding, len(shape))):
        if not part.leaf.shape[axis] % shards:
            continue
        if uneven == "error":
            raise ValueError(
                f"state_shardings: axis {axis} of state"
                f"{jax.tree_util.keystr(part.path)}, {trees.describe(part.leaf)}, does "
                f"not divide into the {shards} shards of {_name(part.owner)}, of shape "
                f"{list(shape)} ({sharding.spec}). {advice(axis, shards)}; or, for "
                "a small leaf, call state_shardings with uneven='replicate', which "
                "keeps this array whole along the axis and gathers it in each step"
            )
        entries[axis] = None
    return _with_spec(sharding, entries)


def _advice(tx, params, owner: KeyPath, axis: int, shards: int) -> str:
    """What to do where an axis of a parameter, or of its state, does not divide.

    Which sizes do is found by trying, with shapes, as formats differ in it.
    """
    with_path, treedef = jax.tree_util.tree_flatten_with_path(
        trees.abstract(params), is_leaf=quantized_tensor.is_quantized
    )
    leaves = dict(with_path)
    old = leaves[owner]

    def fits(length: int) -> bool:
        leaves[owner] = _with_length(old, axis, length)
        tried = treedef.unflatten(leaves.values())
        state = jax.eval_shape(tx.init, tried)
        return all(
            part.leaf.shape[axis] % shards == 0
            for part in state_leaves(tried, state)
            if part.owner == owner and len(part.leaf.shape) == len(old.shape)
        )

    candidates = (shards << doublings for doublings in range(_MOST_DOUBLINGS))
    # Of the multiples of a number that is too small, the first beyond a whole number of
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
    if not quantized_tensor.is_quantized(leaf):
        return like
    static = leaf.bits, leaf.block_size, leaf.axis
    quantize = functools.partial(quantized_tensor.quantize, *static, random=None)
    return jax.eval_shape(quantize, like)


def _name(owner: KeyPath | None) -> str:
    return f"params{jax.tree_util.keystr(owner or ())}"


def _on_equal_axes(
    state_shape: tuple[int, ...], shape: tuple[int, ...], sharding: NamedSharding
) -> NamedSharding:
    entries = _entries(sharding, len(shape))
    return _with_spec(
        sharding,
        [
            entry if here == there else None
            for entry, here, there in zip(entries, state_shape, shape, strict=True)
        ],
    )


def _entries(sharding: NamedSharding, rank: int) -> list:
    """The PartitionSpec with an entry for every axis."""
    return [*sharding.spec, *[None] * (rank - len(sharding.spec))]


def _shards(sharding: NamedSharding, rank: int) -> list[int]:
    """How many shards each axis has."""

    def count(entry) -> int:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            return 1
        names = entry if isinstance(entry, tuple) else (entry,)
        return math.prod(sharding.mesh.shape[name] for name in names)

    return [count(entry) for entry in _entries(sharding, rank)]


def _with_spec(sharding: NamedSharding, entries: list) -> NamedSharding:
    given = len(sharding.spec)
    # Of the given length, so that it is equal to the parameter's own where it can be.
    spec = PartitionSpec(*entries[:given])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
