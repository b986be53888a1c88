"""Where the user says that parameters lie on a mesh.

While a step is traced under ``jax.jit``, arrays on automatic axes do not say where they
lie. XLA:TPU cannot partition kernels, so kernels run there on shards that the user has
named.
"""

import math
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

from lowbit_optax._step import trees
from lowbit_optax._step.layers import Layer

ParamShardings = typing.Any | Callable[[typing.Any], typing.Any] | None
"""A tree of shardings like the parameters, or a prefix of it; or a function from the
parameters to one."""


def leaf_shardings(
    given: ParamShardings, params, layer: Layer | None = None
) -> list[NamedSharding | None]:
    """The sharding of each leaf of the parameters; None where it is not known.

    Args:
      given: see :data:`ParamShardings`.
      params: tree of parameters.
      layer: which layer some of them are, of what the shardings are of.

    Raises:
      TypeError, ValueError: naming a leaf whose sharding does not fit.
    """
    names, leaves, treedef = trees.named_leaves(params)
    if given is None:
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
                f"{what}: axis {axis} of params{name}, of shape {list(leaf.shape)}, "
                f"does not divide into {shards} shards"
            )
        found.append(sharding)
    return found


def named_shardings(
    what: str, shardings, params, mesh: Mesh | None = None, *, allows_none: bool = False
) -> list[NamedSharding | None]:
    """The NamedSharding of each leaf of the parameters.

    Args:
      what: the shardings' name, for errors.
      shardings: tree of NamedShardings and PartitionSpecs, a prefix of ``params``.
      params: tree of parameters.
      mesh: of the PartitionSpecs; if None, the one in force.
      allows_none: whether None and one device's shardings are accepted, and are None.
    """
    names, leaves, _ = trees.named_leaves(params)
    found: list[NamedSharding | None] = []
    each = trees.leaves_of_prefix(what, shardings, params)
    for path, leaf, sharding in zip(names, leaves, each, strict=True):
        name, rank = f"params{path}", len(leaf.shape)
        if trees.is_quantized(sharding):
            # As jax.tree.map over a quantised weight makes them: one per array in it.
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
                f"{what}: the sharding of {name} is {sharding!r}; accepted "
                "are a NamedSharding and a PartitionSpec"
            )
        if len(sharding.spec) > rank:
            raise ValueError(
                f"{what}: {name} has {rank} axes, but {sharding.spec} "
                f"is of {len(sharding.spec)}"
            )
        found.append(sharding)
    return found


def mesh_or_ambient(what: str, mesh, name: str) -> Mesh | AbstractMesh:
    """The mesh, or the one in force; ``name`` is what needs it, for the error."""
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"{what}: no mesh for the PartitionSpec of {name}; give NamedShardings, or "
            "call it under jax.set_mesh"
        )
    return mesh


def of_a_layer(sharding: NamedSharding | None) -> NamedSharding | None:
    """The sharding of one layer of a stack; None if layers lie on different devices."""
    if sharding is None or any(sharding.spec[:1]):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def uneven_axes(
    shape: tuple[int, ...], sharding: NamedSharding | None
) -> dict[int, int]:
    """The numbers of shards into which axes do not divide, by axis."""
    uneven = {}
    for axis, entry in enumerate(sharding.spec if sharding is not None else ()):
        if sharding is None or entry is None or entry is PartitionSpec.UNCONSTRAINED:
            continue
        names = entry if isinstance(entry, tuple) else (entry,)
        shards = math.prod(sharding.mesh.shape[name] for name in names)
        if shape[axis] % shards:
            uneven[axis] = shards
    return uneven
