"""A traced loss as a list of calls, in which scans are visible.

The loss is traced once, to a jaxpr. Functions under ``jit`` that contain a scan (or all
functions) are inlined, so that every scan is a call in one list, and parameters can be
followed through the functions. To evaluate the loss,
:mod:`lowbit_optax.release.released_step` and :mod:`lowbit_optax.precision.rounded`
replace some calls, and run all other calls unchanged.
"""

import collections
import functools
import typing
from collections.abc import Callable, Collection, Mapping, Sequence

from jax.extend.core import primitives

from lowbit_optax._jaxprs.graph import (
    Call,
    Node,
    as_closed_jaxpr,
    called_jaxpr,
    inline,
    run,
    value_of,
)
from pallas_kernels.operations import ClosedJaxpr


class ScanCall(Call):
    """A call of ``lax.scan``, whose operands are constants, a carry and stacks."""

    @property
    def body(self) -> ClosedJaxpr:
        """The jaxpr of ``(constants, carry, x) -> (carry, y)``."""
        return as_closed_jaxpr(self.params["jaxpr"])

    @property
    def options(self) -> dict[str, typing.Any]:
        """The length, reverse and unroll of ``lax.scan``."""
        return {name: self.params[name] for name in ("length", "reverse", "unroll")}

    @functools.cached_property
    def carry(self) -> int:
        """The number of values in the carry."""
        return _count_unstacked(self.outputs, self.body.jaxpr.outvars)

    @functools.cached_property
    def constants(self) -> int:
        """The number of constants."""
        return _count_unstacked(self.inputs, self.body.jaxpr.invars) - self.carry

    @property
    def scanned(self) -> tuple[Node, ...]:
        """The stacked inputs that the scan slices along their first axis."""
        return self.inputs[self.constants + self.carry :]


def _count_unstacked(outside: Sequence, inside: Sequence) -> int:
    """Return the number of values that a scan neither slices nor stacks."""
    rank = lambda atom: len(atom.aval.shape)
    return sum(rank(a) == rank(b) for a, b in zip(outside, inside, strict=True))


class Segment(typing.NamedTuple):
    """Consecutive calls of a program.

    Args:
      calls: list of calls in order.
      reads: earlier values that the calls need. The first segment reads all inputs.
      writes: results of the calls that later segments need.
      later: all values that later segments need.
    """

    calls: Sequence[Call]
    reads: list[Node]
    writes: list[Node]
    later: Collection[Node] = ()

    @property
    def is_scan(self) -> bool:
        """Whether the segment is one scan."""
        return len(self.calls) == 1 and isinstance(self.calls[0], ScanCall)


class LossProgram:
    """A traced function as a list of calls.

    Args:
      closed: jaxpr of the function.
      inline_all: if True, all functions under ``jit`` are inlined, including functions
        without a scan.
      parameters: number of parameters, which are the first inputs. Functions under
        ``jit`` that read several parameters are inlined.

    Attributes:
      inputs, outputs: flat lists of :class:`Node`.
      calls: list of calls in order.
      uses: for each value, the number of calls and outputs that read it.
      of_parameters: the parameters, and all values that depend only on parameters.
    """

    def __init__(
        self, closed: ClosedJaxpr, *, inline_all: bool = False, parameters: int = 0
    ):
        self._inline_all = inline_all
        self.calls: list[Call] = []
        self.inputs = [Node(var.aval) for var in closed.jaxpr.invars]
        self.of_parameters = set(self.inputs[:parameters])
        self.outputs = inline(closed, self.inputs, self._read_equation)
        self.uses = collections.Counter(self.outputs)
        for call in self.calls:
            self.uses.update(call.inputs)

    @property
    def scans(self) -> list[ScanCall]:
        return [call for call in self.calls if isinstance(call, ScanCall)]

    def users(self, value: Node) -> list[str]:
        """Return the names of the calls that read a value, for error messages."""
        names = [call.primitive.name for call in self.calls if value in call.inputs]
        return names + ["the result"] * (value in self.outputs)

    def evaluate(
        self,
        arguments: Sequence,
        instead: Mapping[Call, Callable[[list], Sequence]] = {},
    ) -> list:
        """Return the outputs of the function for the given arguments.

        ``instead`` is the same as in :func:`lowbit_optax._jaxprs.graph.run`.
        """
        known = dict(zip(self.inputs, arguments, strict=True))
        run(self.calls, known, instead)
        return self.results(known)

    def results(self, known: Mapping[Node, typing.Any]) -> list:
        """Return the values of the outputs, given the values of all computed nodes."""
        return [value_of(node, known) for node in self.outputs]

    def segments(self, groups: Sequence[Sequence[Call]] = ()) -> list[Segment]:
        """Divide the calls into consecutive segments.

        ``groups`` contains the calls of each segment. By default, each scan is a
        segment, and the calls between two scans form another segment.
        """
        found = []
        needed = set(self.outputs)
        for number, calls in reversed(list(enumerate(groups or self._by_scans()))):
            made = [node for call in calls for node in call.outputs]
            read = [node for call in calls for node in call.inputs]
            if number == 0:
                made = [*self.inputs, *made]
            later = frozenset(needed)
            # Dictionaries keep their order, so the program is the same in every run.
            writes = [node for node in dict.fromkeys(made) if node in later]
            needed = (needed | set(read)) - set(made)
            before = [n for n in dict.fromkeys(read) if n in needed]
            reads = [node for node in before if node.constant is None]
            reads = reads if number else self.inputs
            found.append(Segment(calls, reads, writes, later))
        return found[::-1]

    def _by_scans(self) -> list[list[Call]]:
        groups: list[list[Call]] = [[]]
        for call in self.calls:
            if isinstance(call, ScanCall):
                groups += [[call], []]
            else:
                groups[-1].append(call)
        return groups

    def _read_equation(self, eqn, operands: list[Node]) -> Sequence[Node]:
        read = [node for node in operands if node.constant is None]
        derived = [node for node in read if node in self.of_parameters]
        if eqn.primitive is primitives.jit_p and (
            self._inline_all or _jits_a_scan(eqn) or len(set(derived)) > 1
        ):
            return inline(called_jaxpr(eqn.params), operands, self._read_equation)
        kind = ScanCall if _is_scan(eqn) else Call
        made = eqn.primitive, eqn.params, tuple(operands), len(self.calls)
        call = kind(*made, [var.aval for var in eqn.outvars], eqn.ctx)
        self.calls.append(call)
        if read and len(derived) == len(read):
            self.of_parameters.update(call.outputs)
        return call.outputs


def without_barriers_on(closed: ClosedJaxpr, inputs: Collection[int]) -> ClosedJaxpr:
    """Return a function whose checkpoints read the given inputs without a barrier.

    A function under ``jax.checkpoint`` runs again for its derivative. Its operands
    first pass an optimization barrier, so that XLA does not merge the two runs. XLA
    writes the operands of a barrier to memory. If an operand is a slice of a stack, XLA
    therefore copies the slice, although the function could read it in the stack.

    Args:
      closed: jaxpr of the function. Only checkpoints at its top level change.
      inputs: indices of the function's inputs that need no barrier.
    """
    free = {id(closed.jaxpr.invars[n]) for n in inputs}

    def changed(equation):
        prevented = equation.params.get("prevent_cse", False)
        if isinstance(prevented, bool):
            prevented = (prevented,) * len(equation.invars)
        each = tuple(
            barrier and id(atom) not in free
            for barrier, atom in zip(prevented, equation.invars, strict=True)
        )
        if each == prevented:
            return equation
        return equation.replace(params={**equation.params, "prevent_cse": each})

    equations = list(map(changed, closed.jaxpr.eqns))
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)


def _is_scan(eqn) -> bool:
    return eqn.primitive is primitives.scan_p


def _jits_a_scan(eqn) -> bool:
    """Return whether a function under ``jit`` contains a scan, directly or nested."""
    return any(
        _is_scan(inner) or (inner.primitive is primitives.jit_p and _jits_a_scan(inner))
        for inner in called_jaxpr(eqn.params).jaxpr.eqns
    )
