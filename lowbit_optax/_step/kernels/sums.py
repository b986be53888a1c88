"""``Sums``: sums over rows and columns that the kernels of leaves need.

A factored second moment is computed from sums over the rows and over the columns of the
squared gradient, which must be known before the leaf's kernel runs. A kernel of
:mod:`pallas_kernels.axis_sums` computes both in one pass over the gradient.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.elementwise import (
    NotElementwise,
    Program,
    Scalars,
    decode_scalar,
    encode_scalars,
    program_of,
)
from lowbit_optax._jaxprs.graph import Node, calls_between, constant
from lowbit_optax._step.inner_update import InnerUpdate
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
        return self.program.run([grad], scalars)[0]


class Sums(typing.NamedTuple):
    """The sums to compute before the kernels of a step.

    Args:
      leaves: ``(leaf, function, nodes)`` for each summed function of a gradient: the
        index of the leaf, the elementwise function, and the nodes with the sums over
        the last axis and over the axis before it.
      scalars: the scalars that their functions read.
    """

    leaves: Sequence[tuple[int, Callable, tuple[list[Node], list[Node]]]] = ()
    scalars: Sequence[Node] = ()

    def values(
        self, traced: InnerUpdate, implementation: Implementation
    ) -> dict[Node, jax.Array]:
        """Compute the sums, and return a dict keyed by node."""
        if not self.leaves:
            return {}
        scalars = list(traced.values(self.scalars).values())
        table = encode_scalars(scalars) if scalars else jnp.zeros(1, jnp.uint32)
        values = {}
        for leaf, function, nodes in self.leaves:
            grad = traced.step.leaves[leaf].grad
            found = _sums(function, implementation, grad, table)
            for same, x in zip(nodes, found, strict=True):
                values |= {node: x.reshape(node.aval.shape) for node in same}
        return values


def plan_sums(traced: InnerUpdate, outside: Mapping[int, Sequence[Node]]) -> Sums:
    """Find the sums that the kernels of leaves need.

    Args:
      traced: the inner update.
      outside: the nodes that the kernel of each leaf needs, by index of the leaf.
    """
    guard = traced.step.guard.scalars
    scalars = Scalars(traced.graph, map(constant, guard))
    leaves = [
        (i, _Summed(program, bool(guard)), nodes)
        for i, needed in outside.items()
        for program, nodes in _summed(traced.nodes.grads[i], needed, scalars).items()
        if all(nodes)
    ]
    return Sums(leaves, scalars.nodes)


def _summed(
    grad: Node, needed: Sequence[Node], scalars: Scalars
) -> dict[Program, tuple[list[Node], list[Node]]]:
    """Return the functions of a gradient that are summed over one of the last two axes.

    The result maps a function to the sums over the last axis, and over the axis before.
    """
    found: dict[Program, tuple[list[Node], list[Node]]] = {}
    rank = len(grad.aval.shape)
    axes = {(rank - 1,): 0, (rank - 2,): 1}
    for call in calls_between(needed, [grad]):
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
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(function: Callable, implementation: Implementation, grad, table) -> tuple:
    """Compute sums. Traced once for equal shapes and functions."""
    return tuple(axis_sums(function, grad, table, implementation))
