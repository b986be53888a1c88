"""Shards of leaves: on meshes of explicit axes, and in ``jax.shard_map``."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._step import trees
from pallas_kernels.layout import layout_of


def check_shards(name: str, leaf, bits: int, block_size: int | None = None) -> None:
    """Raise unless a leaf's shards on explicit axes are whole words and blocks.

    On automatic axes XLA moves what is cut; on explicit ones JAX raises an error of a
    reshape deep inside, which names no leaf.

    Args:
      name: path of the parameter.
      leaf: the parameter; anything but an array of JAX passes.
      bits: of its fields.
      block_size: of its blocks; None if nothing is per block.
    """
    if not isinstance(leaf, jax.Array):
        return
    sharding = jax.typeof(leaf).sharding
    layout = layout_of(leaf.shape)
    packed = f"{bits}-bit fields"
    if block_size is not None:
        packed += f" in blocks of {block_size}"
    for axis, entry in enumerate(sharding.spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        shards = math.prod(sharding.mesh.shape.get(name, 1) for name in names)
        unit = layout.unit(axis, (bits,), block_size)
        length = leaf.shape[axis] // shards
        if shards > 1 and length % unit:
            raise ValueError(
                f"params{name}, {trees.describe(leaf)} on explicit axes as "
                f"{sharding.spec}, has shards of {length} along axis {axis}; accepted "
                f"are multiples of {unit}, for {packed}. "
                "Shard it along another axis or over fewer devices, make the mesh's "
                "axes automatic, or give lowbit a larger min_size"
            )


def axes_of_shards(leaf) -> tuple[str, ...]:
    """The mesh axes of the user's ``jax.shard_map`` over which a leaf's shards differ.

    By the types of its arrays; none with ``check_vma=False``, which has no such types.
    """
    mesh = jax.sharding.get_abstract_mesh()
    arrays = [x for x in jax.tree.leaves(leaf) if isinstance(x, jax.Array)]
    varying = {name for x in arrays for name in jax.typeof(x).manual_axis_type.varying}
    return tuple(n for n in mesh.manual_axes if n in varying and mesh.shape[n] > 1)


def number_of_shard(axes: tuple[str, ...]) -> jax.Array:
    """Which of the shards along these axes this is, as a uint32 scalar."""
    return lax.axis_index(axes).astype(jnp.uint32)
