"""``LeafSums``: sums over rows and columns that the kernel of a leaf needs.

A factored second moment is computed from sums over the rows and over the columns of the
squared gradient, which must be known before the leaf's kernel runs. A kernel of
:mod:`pallas_kernels.axis_sums` computes both in one pass over the gradient.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.elementwise import NotElementwise, Scalars, program_of
from lowbit_optax._jaxprs.graph import Node, calls_between
from lowbit_optax._jaxprs.leaf_program import Program, decode_scalar, encode_scalars
from lowbit_optax._step.step import Step
from pallas_kernels.axis_sums import axis_sums
from pallas_kernels.platforms import Implementation


@dataclasses.dataclass(frozen=True)
class _Summed:
    """The elementwise function of a gradient whose values are summed."""

    program: Program
    is_guarded: bool

    def __call__(self, grad: jax.Array, scalars: Sequence[jax.Array]) -> jax.Array:
        grad = grad.astype(jnp.float32)
        if self.is_guarded:
            grad = grad * decode_scalar(scalars[0], np.dtype(np.float32))
        return self.program.run([grad], scalars, lambda a, b, c: a * b + c)[0]


class LeafSums(typing.NamedTuple):
    """Sums of a function of a leaf's gradient.

    Args:
      leaf: index of the leaf.
      function: elementwise function of the gradient.
      over_last, over_rows: the nodes with the sums over the last axis, and over the
        axis before it.
    """

    leaf: int
    function: Callable
    over_last: list[Node]
    over_rows: list[Node]

    def values(
        self, step: Step, scalars: Sequence, implementation: Implementation
    ) -> dict[Node, jax.Array]:
        """Compute the sums, and return a dict keyed by node."""
        table = encode_scalars(scalars) if scalars else jnp.zeros(1, jnp.uint32)
        found = _sums(self.function, implementation, step.leaves[self.leaf].grad, table)
        pairs = zip((self.over_last, self.over_rows), found, strict=True)
        return {
            node: x.reshape(node.aval.shape) for nodes, x in pairs for node in nodes
        }


def sums_of_leaf(
    leaf: int, grad: Node, outside: Sequence[Node], scalars: Scalars, is_guarded: bool
) -> list[LeafSums]:
    """Find functions of a leaf's gradient that are summed over both of the last axes.

    Args:
      leaf: index of the leaf.
      grad: its gradient.
      outside: the nodes that its kernel needs.
      scalars: the table to which the scalars of the functions are added.
      is_guarded: whether the first scalar of the table is a factor for gradients.
    """
    found: dict[Program, tuple[list[Node], list[Node]]] = {}
    rank = len(grad.aval.shape)
    axes = {(rank - 1,): 0, (rank - 2,): 1}
    for call in calls_between(outside, [grad]):
        place = axes.get(tuple(call.params.get("axes", ())))
        if call.primitive is not p.reduce_sum_p or place is None:
            continue
        if call.inputs[0].aval.shape != grad.aval.shape:
            continue
        try:
            program = program_of(call.inputs, [grad], scalars)
        except NotElementwise:
            continue
        found.setdefault(program, ([], []))[place].append(call.outputs[0])
    return [
        LeafSums(leaf, _Summed(program, is_guarded), *nodes)
        for program, nodes in found.items()
        if all(nodes)
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(function: Callable, implementation: Implementation, grad, table) -> tuple:
    """Compute sums. Traced once for equal shapes and functions."""
    return tuple(axis_sums(function, grad, table, implementation))
