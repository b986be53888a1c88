"""A loss that is computed once and then gone back through, as often as needed.

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
import jax.numpy as jnp
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import Node, called_jaxpr, calls_between, run, value_of
from lowbit_optax._jaxprs.kept_values import smallest_kept
from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax.release.ordering import tied
from lowbit_optax.release.plan import ReleasePlan
from lowbit_optax.release.scans import BackwardPass, Cotangents, ReleasedScan
from lowbit_optax.release.stretches import Stretch, is_active
from lowbit_optax.release.traced_loss import TracedLoss

_MOVES = frozenset(
    {
        p.broadcast_in_dim_p, p.concatenate_p, p.iota_p, p.reshape_p, p.rev_p,
        p.slice_p, p.squeeze_p, p.transpose_p,
    }
)  # fmt: skip

_BY_NAME = frozenset({"atan2", "erf", "one_minus_square", "rem", "round"})
"""Elementwise primitives that kernels do not compute, or that not every JAX has."""


class Reverse(typing.NamedTuple):
    """A loss that has been computed.

    Args:
      program: the loss.
      outputs: of its program.
      pulls: of each stretch a function that takes the cotangents of what it made, and
        adds those of what it read. It returns what the backward pass made in a loop.
    """

    program: LossProgram
    outputs: list
    pulls: Sequence[tuple[Stretch, Callable[[Cotangents, BackwardPass], list]]]

    def go_back(
        self, start: jax.Array, backward_pass: BackwardPass
    ) -> tuple[list, Cotangents]:
        """Go through the stretches from the last to the first.

        Each stretch's leaves are updated before the next stretch is begun. Two barriers
        make XLA keep this order. The first lets the update begin when the cotangents
        that go on are there, which are computed with the old parameters. The second
        lets the next stretch begin when the update is there. Else a scheduler would
        be free to keep all gradients until the end.

        Args:
          start: the cotangent of the loss.
          backward_pass: gets the gradients.

        Returns:
          The backward pass's results, and the cotangents of other leaves.
        """
        results = []
        cotangents = {self.program.outputs[0]: start}
        for stretch, pull in reversed(self.pulls):
            results += pull(cotangents, backward_pass)
            if stretch.leaves:
                grads = {
                    leaf.name: cotangents.pop(leaf.gradient_value)
                    for leaf in stretch.leaves
                    if leaf.gradient_value is not None
                }
                grads, cotangents = _barrier(grads, cotangents)
                result = backward_pass.take(stretch, grads)
                result, cotangents = _barrier(result, cotangents)
                results.append(result)
        return results, cotangents


def _barrier(arrays, cotangents: Cotangents) -> tuple[typing.Any, Cotangents]:
    nodes = list(cotangents)
    arrays, values = tied((arrays, list(cotangents.values())))
    return arrays, dict(zip(nodes, values, strict=True))


def run_forward(loss: TracedLoss, plan: ReleasePlan) -> Reverse:
    """Compute a loss, and keep what its derivative needs."""
    program, stretches, active = loss.program, plan.stretches, plan.active
    known = dict(zip(program.inputs, loss.arguments, strict=True))
    pulls = []
    for stretch, later in zip(
        stretches, _later(program, stretches, active), strict=True
    ):
        if stretch.in_loop:
            pull = ReleasedScan(program, stretch, active, known).pull
        else:
            pull = _run_stretch(stretch, active, known, *later)
        pulls.append((stretch, pull))
    return Reverse(program, program.results(known), pulls)


def _later(
    program: LossProgram, stretches: Sequence[Stretch], active: set[Node]
) -> list[tuple[set[Node], set[Node]]]:
    """For each stretch what is read later, and what of it gets cotangents there."""
    read, pulled = set(program.outputs), active & {program.outputs[0]}
    found = []
    for stretch in reversed(stretches):
        found.append((set(read), set(pulled)))
        for call in stretch.calls:
            read.update(call.inputs)
            if is_active(call, active):
                pulled.update(active.intersection(call.inputs))
    return found[::-1]


def _run_stretch(
    stretch: Stretch,
    active: set[Node],
    known: dict[Node, typing.Any],
    read_later: set[Node],
    pulled_later: set[Node],
) -> Callable[[Cotangents, BackwardPass], list]:
    """Run other calls; return their ``pull``.

    A value that is read both here and later is an output too. The sum of its
    cotangents then begins with those from later, as in ``jax.grad``, and so has the
    same bits.
    """
    calls = stretch.calls
    made = list(dict.fromkeys(x for call in calls for x in call.outputs))
    reads = dict.fromkeys(x for call in calls for x in call.inputs)
    reads = [x for x in reads if x in known]
    pulled = {x for call in calls if is_active(call, active) for x in call.inputs}
    primals = [x for x in reads if x in active and x in pulled]
    if not primals:
        run(calls, known)
        return lambda cotangents, backward_pass: []
    constants = [x for x in reads if x not in primals]
    outputs = [x for x in (*primals, *made) if x in pulled_later]
    others = [x for x in made if x in read_later and x not in outputs]

    def function(values, fixed):
        local: dict[Node, typing.Any] = dict(zip(constants, fixed, strict=True))
        local.update(zip(primals, values, strict=True))
        run(calls, local)
        return [local[x] for x in outputs], [local[x] for x in others]

    results, other_results, transposed = differentiate(
        function,
        [known[x] for x in primals],
        [known[x] for x in constants],
        [x.call is None for x in (*primals, *constants)],
    )
    known.update(zip(others, other_results, strict=True))
    known.update(zip(outputs, results, strict=True))

    def pull(cotangents: Cotangents, backward_pass: BackwardPass) -> list:
        del backward_pass
        arguments = [
            cotangents.pop(node) if node in cotangents else jnp.zeros_like(result)
            for node, result in zip(outputs, results, strict=True)
        ]
        cotangents.update(zip(primals, transposed(arguments), strict=True))
        return []

    return pull


def differentiate(
    function: Callable,
    primals: Sequence[jax.Array],
    constants: Sequence,
    always_there: Sequence[bool],
) -> tuple[list, list, Callable[[list], list]]:
    """Compute a function and what its derivative needs.

    Args:
      function: of primals and constants, to ``(results, others)``, two lists of arrays.
      primals: in which it is differentiated.
      constants: its other arrays.
      always_there: for each of the primals and constants, whether it exists throughout
        the backward pass anyway, as parameters and batches do.

    Returns:
      The results, the others, and a function from the results' cotangents to a list of
      those of the primals.
    """

    def forward(primals, constants):
        results, transposed, others = jax.vjp(
            lambda primals: function(primals, constants), primals, has_aux=True
        )
        return results, others, transposed

    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(primals, constants)
    program = LossProgram(closed, inline_all=True)
    inputs = dict(zip(program.inputs, (*primals, *constants), strict=True))
    known = dict(inputs)
    run(program.calls, known)
    first, second = len(shapes[0]), len(shapes[0]) + len(shapes[1])
    residuals = program.outputs[second:]
    free = {x for x, is_free in zip(inputs, always_there, strict=True) if is_free}
    there = lambda x: 0 if x in free else math.prod(x.aval.shape) * _item_size(x)
    kept = smallest_kept(residuals, _is_cheap, there)
    again = calls_between(residuals, [*kept, *inputs])
    kept = [x for x in kept if x not in inputs]
    outputs = [value_of(x, known) for x in program.outputs[:second]]
    results, saved = tied((outputs[:first], [known[x] for x in kept]))
    values = inputs | dict(zip(kept, saved, strict=True))
    needed = dict.fromkeys([*residuals, *(x for call in again for x in call.inputs)])
    read = [x for x in needed if x in values]

    def transposed(cotangents):
        # Else XLA would see that the same was computed before, and keep that.
        fresh, cotangents = tied(([values[x] for x in read], cotangents))
        known = values | dict(zip(read, fresh, strict=True))
        run(again, known)
        leaves = [value_of(x, known) for x in residuals]
        (found,) = jax.tree.unflatten(jax.tree.structure(shapes[2]), leaves)(cotangents)
        return found

    return results, outputs[first:], transposed


def _is_cheap(call) -> bool:
    """Whether a call, or an equation, is elementwise or moves elements."""
    if call.primitive in (p.custom_jvp_call_p, p.jit_p):
        return all(map(_is_cheap, called_jaxpr(call.params).jaxpr.eqns))
    is_elementwise = elementwise.is_elementwise(call.primitive)
    return is_elementwise or call.primitive in _MOVES or call.primitive.name in _BY_NAME


def _item_size(node: Node) -> int:
    # Random keys have a dtype of their own, of a few words.
    return getattr(node.aval.dtype, "itemsize", 8)
