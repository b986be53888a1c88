"""The shardings of parameters that the user passes as ``param_shardings``.

While a step is traced under ``jax.jit``, the sharding of an array on automatic axes is
unknown. XLA:TPU cannot partition kernels, so they run on the shards that these
shardings describe. :class:`.engine.Lowbit` and
:func:`lowbit_optax.state_shardings` call these functions.
"""

import typing
from collections.abc import Callable

import jax
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from lowbit_optax._step import context, trees
from pallas_kernels.fused_update.shards import axes_of, count_of

ParamShardings = typing.Any | Callable[[typing.Any], typing.Any] | None
"""A tree of shardings with the structure of the parameters or a prefix of it, or a
function from parameters to such a tree.
"""


def leaf_shardings(given: ParamShardings, params) -> list[NamedSharding | None]:
    """Return the sharding of each leaf of the parameters, or None if it is unknown.

    Args:
      given: see :data:`ParamShardings`. If the step updates one layer, ``given`` still
        describes whole stacks.
      params: tree of parameters, or of one layer of them.
    """
    names, leaves, treedef = trees.named_leaves(params)
    layer = context.current().layer
    # In an analyzed step, the parameters are one layer of unknown stacks.
    if given is None or context.current().is_analysed:
        return [None] * len(leaves)
    layers = frozenset() if layer is None else layer.names
    whole = treedef.unflatten(
        jax.ShapeDtypeStruct((layer.count, *leaf.shape), leaf.dtype)
        if layer is not None and name in layers
        else leaf
        for name, leaf in zip(names, leaves, strict=True)
    )
    what = "lowbit: param_shardings"
    shardings = given(whole) if callable(given) else given
    found: list[NamedSharding | None] = []
    each = named_shardings(what, shardings, whole, allows_none=True)
    for name, leaf, sharding in zip(names, leaves, each, strict=True):
        if name in layers:
            sharding = of_a_layer(sharding)
        for axis, shards in uneven_axes(leaf.shape, sharding).items():
            raise ValueError(
                f"{what}: axis {axis} of params{name} must divide into {shards} "
                f"shards, got shape {list(leaf.shape)}"
            )
        found.append(sharding)
    return found


def named_shardings(
    what: str, shardings, params, mesh: Mesh | None = None, *, allows_none: bool = False
) -> list[NamedSharding | None]:
    """Return the NamedSharding of each leaf of the parameters.

    Args:
      what: the name of the shardings, for errors.
      shardings: tree of NamedShardings and PartitionSpecs, which may be a prefix tree.
      params: tree of parameters.
      mesh: the mesh for PartitionSpecs; if None, the mesh of ``jax.set_mesh``.
      allows_none: if True, the result contains None for None and for a sharding on
        one device.
    """
    found: list[NamedSharding | None] = []
    each = trees.leaves_of_prefix(what, shardings, params)
    for (path, leaf), sharding in zip(trees.by_path(params).items(), each, strict=True):
        name, rank = f"params{path}", len(leaf.shape)
        if trees.is_quantized(sharding):
            # jax.tree.map over a quantized weight returns one sharding per array.
            sharding = jax.tree.leaves(sharding)[0]
        if isinstance(sharding, PartitionSpec):
            sharding = NamedSharding(mesh_or_ambient(what, mesh, name), sharding)
        if allows_none and (
            sharding is None or isinstance(sharding, SingleDeviceSharding)
        ):
            found.append(None)
            continue
        if not isinstance(sharding, NamedSharding):
            raise TypeError(
                f"{what}: sharding of {name} must be a NamedSharding or a "
                f"PartitionSpec, got {sharding!r}"
            )
        if len(sharding.spec) > rank:
            raise ValueError(
                f"{what}: sharding of {name} must have at most {rank} axes, got "
                f"{sharding.spec} with {len(sharding.spec)}"
            )
        found.append(sharding)
    return found


def mesh_or_ambient(what: str, mesh, name: str) -> Mesh | AbstractMesh:
    """Return ``mesh``, or the mesh of ``jax.set_mesh`` if ``mesh`` is None."""
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"{what}: the PartitionSpec of {name} needs a mesh. Pass NamedShardings, "
            "or call the function under jax.set_mesh"
        )
    return mesh


def of_a_layer(sharding: NamedSharding | None) -> NamedSharding | None:
    """Return the sharding of a layer, or None if layers are on different devices."""
    if sharding is None or any(sharding.spec[:1]):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def uneven_axes(
    shape: tuple[int, ...], sharding: NamedSharding | None
) -> dict[int, int]:
    """Return a dict from each axis that does not divide evenly to its shard count."""
    if sharding is None:
        return {}
    axes = enumerate(axes_of(sharding.spec, len(shape)))
    counts = {axis: count_of(sharding.mesh, names) for axis, names in axes if names}
    return {axis: count for axis, count in counts.items() if shape[axis] % count}
