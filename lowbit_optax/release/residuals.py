"""What the derivative of a stretch keeps from the forward pass, and what it recomputes.

JAX keeps every value that a derivative reads: of ``y = tanh(x)`` both ``y`` and
``1 - y``. XLA is free to compute such a value again from another, and may choose one
that takes more memory: from the partial sums of a matrix product it gets ``y`` and
``1 - y`` in one kernel each, and so keeps the sums. Here the choice is made before: the
least memory from which cheap operations give all the others. What is kept goes through
an optimization barrier, so that it is this that XLA keeps.
"""

import math
import typing
from collections.abc import Callable, Sequence

import jax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import (
    Call,
    Node,
    called_jaxpr,
    calls_between,
    run,
    value_of,
)
from lowbit_optax._jaxprs.kept_values import smallest_kept
from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax.release.ordering import tied

_MOVES = frozenset(
    {
        p.broadcast_in_dim_p, p.concatenate_p, p.iota_p, p.reshape_p, p.rev_p,
        p.slice_p, p.squeeze_p, p.transpose_p,
    }
)  # fmt: skip

_BY_NAME = frozenset({"atan2", "erf", "one_minus_square", "rem", "round"})
"""Elementwise primitives that kernels do not compute, or that not every JAX has."""


class Differentiated(typing.NamedTuple):
    """A function that has been computed.

    Args:
      results, others: what it returned.
      transposed: from cotangents of the results to a list of those of the primals.
    """

    results: list
    others: list
    transposed: Callable[[list], list]


def differentiate(
    function: Callable,
    primals: Sequence[jax.Array],
    constants: Sequence,
    always_there: Sequence[bool],
) -> Differentiated:
    """Compute a function and what its derivative needs.

    Args:
      function: of primals and constants, to ``(results, others)``, two lists of arrays.
      primals: in which it is differentiated.
      constants: its other arrays.
      always_there: for each of the primals and constants, whether it exists throughout
        the backward pass anyway, as parameters and batches do.
    """
    structures = []

    def forward(primals, constants):
        results, transposed, others = jax.vjp(
            lambda primals: function(primals, constants), primals, has_aux=True
        )
        leaves, structure = jax.tree.flatten(transposed)
        structures.append((structure, len(results), len(others)))
        return [*results, *others, *leaves]

    closed = jax.make_jaxpr(forward)(primals, constants)
    program = LossProgram(closed, inline_all=True)
    ((structure, count, others),) = structures
    inputs = dict(zip(program.inputs, (*primals, *constants), strict=True))
    known = dict(inputs)
    run(program.calls, known)
    residuals = program.outputs[count + others :]
    free = {x for x, is_free in zip(inputs, always_there, strict=True) if is_free}
    there = lambda x: 0 if x in free else math.prod(x.aval.shape) * _item_size(x)
    kept = smallest_kept(residuals, _is_cheap, there)
    again = calls_between(residuals, [*kept, *inputs])
    results, saved = tied(
        (
            [value_of(x, known) for x in program.outputs[:count]],
            [known[x] for x in kept if x not in inputs],
        )
    )
    values = inputs | dict(
        zip((x for x in kept if x not in inputs), saved, strict=True)
    )

    needed = dict.fromkeys([*residuals, *(x for call in again for x in call.inputs)])
    read = [x for x in needed if x in values]

    def transposed(cotangents):
        # Else XLA would see that the same was computed before, and keep that.
        fresh, cotangents = tied(([values[x] for x in read], cotangents))
        known = values | dict(zip(read, fresh, strict=True))
        run(again, known)
        leaves = [value_of(x, known) for x in residuals]
        (found,) = jax.tree.unflatten(structure, leaves)(cotangents)
        return found

    rest = [value_of(x, known) for x in program.outputs[count : count + others]]
    return Differentiated(results, rest, transposed)


def _is_cheap(call: Call) -> bool:
    return _takes_little(call.primitive, call.params)


def _takes_little(primitive, params) -> bool:
    if primitive in (p.custom_jvp_call_p, p.jit_p):
        equations = called_jaxpr(params).jaxpr.eqns
        return all(_takes_little(x.primitive, x.params) for x in equations)
    is_elementwise = elementwise.is_elementwise(primitive)
    return is_elementwise or primitive in _MOVES or primitive.name in _BY_NAME


def _item_size(node: Node) -> int:
    # Random keys have a dtype of their own, of a few words.
    return getattr(node.aval.dtype, "itemsize", 8)
