"""A loss that is computed once and then gone back through, as often as needed."""

import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from lowbit_optax._jaxprs.graph import Node, run, value_of
from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax.release.backward import GradientConsumer, released_scan
from lowbit_optax.release.ordering import tied
from lowbit_optax.release.residuals import differentiate
from lowbit_optax.release.stretches import ReleasedScan, Stretch, is_active


class BackwardPass(typing.Protocol):
    """What is done with gradients in a backward pass."""

    def consumer(self, released: ReleasedScan) -> GradientConsumer:
        """Of the gradients in a scan's loop."""
        ...

    def after_loop(self, released: ReleasedScan, carried) -> None:
        """Takes what the consumer carried out of the loop."""
        ...

    def take(self, stretch: Stretch, grads: dict[str, jax.Array]) -> typing.Any:
        """Uses the gradients of the stretch's leaves, by path.

        Returns:
          The arrays that it made, which take the gradients' place.
        """
        ...

    def tied(self, arrays) -> None:
        """Takes the same arrays from behind the barrier."""
        ...


Cotangents = dict[Node, jax.Array]


class Reverse(typing.NamedTuple):
    """A loss that has been computed.

    Args:
      outputs: of its program.
      stretches: of its calls.
      pulls: of each stretch a function that takes the cotangents of what it made, and
        adds those of what it read. That of a released scan also takes a consumer, and
        returns what it carried.
    """

    program: LossProgram
    outputs: list
    stretches: Sequence[Stretch]
    pulls: Sequence[Callable]

    def go_back(self, start: jax.Array, backward_pass: BackwardPass) -> Cotangents:
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
          The cotangents that are left, those of other leaves.
        """
        cotangents = {self.program.outputs[0]: start}
        for stretch, pull in zip(self.stretches[::-1], self.pulls[::-1], strict=True):
            if stretch.released is None:
                pull(cotangents)
            else:
                consumer = backward_pass.consumer(stretch.released)
                carried = pull(consumer, cotangents)
                backward_pass.after_loop(stretch.released, carried)
            if stretch.leaves:
                grads = {
                    leaf.name: cotangents.pop(leaf.gradient_value)
                    for leaf in stretch.leaves
                    if leaf.gradient_value is not None
                }
                grads, cotangents = _barrier(grads, cotangents)
                made = backward_pass.take(stretch, grads)
                made, cotangents = _barrier(made, cotangents)
                backward_pass.tied(made)
        return cotangents


def run_forward(
    program: LossProgram,
    stretches: Sequence[Stretch],
    active: set[Node],
    arguments: Sequence,
) -> Reverse:
    """Compute a loss, and keep what its derivative needs.

    Args:
      program: the loss.
      stretches: of all its calls.
      active: the values that have cotangents.
      arguments: of the program's inputs. None for those that nothing reads.
    """
    known = dict(zip(program.inputs, arguments, strict=True))
    read_later, pulled_later = _later(program, stretches, active)
    pulls = []
    for number, stretch in enumerate(stretches):
        if stretch.released is not None:
            pull = _run_scan(program, stretch.released, active, known)
        else:
            pull = _run_stretch(
                stretch, active, known, read_later[number], pulled_later[number]
            )
        pulls.append(pull)
    return Reverse(program, program.results(known), stretches, pulls)


def _later(program: LossProgram, stretches: Sequence[Stretch], active: set[Node]):
    """For each stretch what is read later, and what of it gets cotangents there."""
    read, pulled = set(program.outputs), active & {program.outputs[0]}
    found = []
    for stretch in reversed(stretches):
        found.append((set(read), set(pulled)))
        for call in stretch.calls:
            read.update(call.inputs)
            if is_active(call, active):
                pulled.update(active.intersection(call.inputs))
    return zip(*found[::-1], strict=True) if found else ((), ())


def _run_scan(
    program: LossProgram, released: ReleasedScan, active: set[Node], known: dict
) -> Callable[[GradientConsumer, Cotangents], typing.Any]:
    """Run a released scan; return its ``pull``."""
    call = released.step
    operands = [value_of(node, known) for node in call.inputs]
    done = released_scan(released.scan, released.roles(program, active), operands)
    known.update(zip(call.outputs, done.results, strict=True))

    def pull(consumer: GradientConsumer, cotangents: Cotangents):
        given = {
            number: cotangents.pop(node)
            for number, node in enumerate(call.outputs)
            if node in cotangents
        }
        carried, found = done.backward(consumer, given)
        for number, cotangent in found.items():
            node = call.inputs[number]
            if node in active:
                before = cotangents.get(node)
                cotangents[node] = cotangent if before is None else before + cotangent
        return carried

    return pull


def _run_stretch(
    stretch: Stretch,
    active: set[Node],
    known: dict[Node, typing.Any],
    read_later: set[Node],
    pulled_later: set[Node],
) -> Callable[[Cotangents], None]:
    """Run other calls; return their ``pull``.

    A value that is read both here and later is an output too. The sum of its
    cotangents then begins with those from later, as in ``jax.grad``, and so has the
    same bits.
    """
    made = list(dict.fromkeys(x for call in stretch.calls for x in call.outputs))
    reads = dict.fromkeys(x for call in stretch.calls for x in call.inputs)
    reads = [x for x in reads if x in known]
    primals = [x for x in reads if x in active and _is_pulled(x, stretch, active)]
    outputs = [x for x in (*primals, *made) if x in pulled_later]
    others = [x for x in made if x in read_later and x not in outputs]

    if not primals:
        run(stretch.calls, known)
        return lambda cotangents: None
    constants = [x for x in reads if x not in primals]

    def function(values, given):
        local: dict[Node, typing.Any] = dict(zip(constants, given, strict=True))
        local.update(zip(primals, values, strict=True))
        run(stretch.calls, local)
        return [local[x] for x in outputs], [local[x] for x in others]

    done = differentiate(
        function,
        [known[x] for x in primals],
        [known[x] for x in constants],
        [x.call is None for x in (*primals, *constants)],
    )
    known.update(zip(others, done.others, strict=True))
    known.update(zip(outputs, done.results, strict=True))
    zeros = [functools.partial(jnp.zeros_like, x) for x in done.results]

    def pull(cotangents: Cotangents) -> None:
        given = [
            cotangents.pop(node) if node in cotangents else zero()
            for node, zero in zip(outputs, zeros, strict=True)
        ]
        cotangents.update(zip(primals, done.transposed(given), strict=True))

    return pull


def _is_pulled(node: Node, stretch: Stretch, active: set[Node]) -> bool:
    return any(node in c.inputs and is_active(c, active) for c in stretch.calls)


def _barrier(arrays, cotangents: Cotangents) -> tuple[typing.Any, Cotangents]:
    nodes = list(cotangents)
    arrays, values = tied((arrays, list(cotangents.values())))
    return arrays, dict(zip(nodes, values, strict=True))
