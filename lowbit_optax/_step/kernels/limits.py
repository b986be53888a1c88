"""Functions that check whether the fused kernels support a leaf and its results.

:func:`.plan.plan_kernels` calls these functions, which raise NotElementwise.
"""

import math

import jax
import jax.numpy as jnp

from lowbit_optax._jaxprs.elementwise import NotElementwise
from lowbit_optax._jaxprs.graph import Node
from lowbit_optax._step import trees
from lowbit_optax._step.kernels.rows import WeightRows
from lowbit_optax._step.leaf import StoredLeaf
from lowbit_optax.formats.block_scaled_tensor import BlockScaledTensor
from pallas_kernels.fused_update import MAX_ELEMENTS, Leaf, has_tiling
from pallas_kernels.layout import layout_of

MIN_PACKED_SIZE = 4096
"""XLA updates packed leaves with fewer elements."""

_LEAST_OF_LAYER = 2**16
"""For smaller layers, a loop over kernels takes longer than XLA's update."""


def needs_loop(shape: tuple[int, ...]) -> bool:
    """Return whether a leaf has more elements than a kernel can count."""
    return math.prod(shape) > MAX_ELEMENTS


def has_layers(leaf: StoredLeaf) -> bool:
    """Return whether a leaf can be updated layer by layer along its first axis.

    Each word and block must be inside one layer, and no known sharding may distribute
    the layers over devices.
    """
    shape = leaf.param.shape
    if len(shape) < 3 or not _LEAST_OF_LAYER <= math.prod(shape[1:]) <= MAX_ELEMENTS:
        return False
    if layout_of(shape).axis != layout_of(shape[1:]).axis:
        return False
    specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(leaf.param)]
    if leaf.sharding is not None:
        specs.append(leaf.sharding.spec)
    return all(not spec or spec[0] is None for spec in specs)


def is_small(leaf, weight: WeightRows) -> bool:
    """Return whether a parameter is a scalar or too small for a kernel."""
    fewest = MIN_PACKED_SIZE if weight.is_packed else 1
    return not leaf.shape or math.prod(leaf.shape) < fewest


def check_leaf(stored: StoredLeaf) -> None:
    """Raise NotElementwise unless a kernel supports a parameter."""
    leaf = stored.param
    if isinstance(leaf, BlockScaledTensor):
        raise NotElementwise("kernels do not support block-scaled float8")
    if trees.is_quantized(leaf) and leaf.layout != layout_of(leaf.shape):
        raise NotElementwise(
            "it is a QuantizedTensor with rows along an axis that kernels do not "
            "support"
        )
    if not trees.is_float(leaf) or leaf.dtype.itemsize > 4:
        raise NotElementwise(f"kernels do not support {leaf.dtype}")
    if needs_loop(leaf.shape) and not has_layers(stored):
        raise NotElementwise(
            f"it has more than {MAX_ELEMENTS} elements, and no layers along its first "
            "axis to update one by one"
        )


def check_fields(arrays: Leaf) -> None:
    """Raise NotElementwise unless a GPU kernel supports these words and blocks."""
    packed, sizes = list(arrays.packed), list(arrays.block_sizes)
    if not has_tiling(packed, sizes):
        raise NotElementwise(
            f"its fields of {packed} bits and blocks of {sizes} do not fit together"
        )


def check_result(node: Node, shape: tuple[int, ...]) -> None:
    """Raise NotElementwise unless a kernel can write a result of this shape."""
    if node.aval.shape != shape:
        raise NotElementwise(f"a result has shape {list(node.aval.shape)}")
    if node.aval.dtype == jnp.bool_ or node.aval.dtype.itemsize > 4:
        raise NotElementwise(f"a moment has the dtype {node.aval.dtype}")
