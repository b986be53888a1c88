"""Arrays that XLA computes before a kernel runs, and that the kernel reads.

The update of a leaf may be elementwise except for a few arrays. Muon's update needs a
matrix product with the shape of the leaf. A factored second moment needs sums along
rows and columns, which have length 1 along some axes of the leaf. A kernel reads such
arrays like the leaf's own arrays, and broadcasts axes of length 1 in registers.
"""

from collections.abc import Collection, Sequence

import jax.numpy as jnp

from lowbit_optax._jaxprs.elementwise import is_inside
from lowbit_optax._jaxprs.graph import EXPENSIVE, Node

_MOVES = {"reshape", "reshard", "sharding_constraint", "slice", "squeeze", "transpose"}
_WRITTEN = _MOVES | {"shard_map"} | {x.name for x in EXPENSIVE}
"""The names of primitives whose results a kernel may read if they fit its leaf.

XLA writes these results to memory anyway. It would fuse other results, such as random
numbers, with the update, and reading them takes longer than XLA's whole update.
"""


def arrays_from_outside(outputs: Sequence[Node], own: Collection[Node]) -> list[Node]:
    """Return the arrays that a kernel must read in addition to the leaf's own arrays.

    Args:
      outputs: results with the shape of the leaf.
      own: the leaf's own arrays, which the result does not contain.

    Returns:
      Arrays that a kernel can read. If the results also depend on other arrays, no
      program of elementwise operations can compute them.
    """
    shape = outputs[0].aval.shape
    found, seen, waiting = [], set(own), list(outputs)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.call is not None and is_inside(node.call, shape):
            waiting += node.call.inputs
        elif _is_readable(node, shape):
            found.append(node)
    return found


def _is_readable(node: Node, shape: tuple[int, ...]) -> bool:
    """Return whether a kernel can read a node, and whether that is worthwhile."""
    dtype = node.aval.dtype
    if not jnp.issubdtype(dtype, jnp.number) or dtype.itemsize > 4:
        return False
    if node.aval.shape == shape:
        return node.call is None or node.call.primitive.name in _WRITTEN
    # An array of equal rank has length 1 or the length of the leaf along each axis.
    return len(node.aval.shape) == len(shape)
