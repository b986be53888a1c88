"""A traced loss as a list of steps, in which scans are found.

The loss is traced once, to a jaxpr. Functions under ``jit`` that hold a scan (or all of
them) are written out, so that every scan is a step of one list, and a parameter is
followed through them. The loss is then evaluated from this list: some steps in another
way (:mod:`lowbit_optax.release.backward`, :mod:`lowbit_optax.precision.rounded`), all
else as it was traced.
"""

import collections
import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
from jax.extend import core
from jax.extend.core import primitives


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """What ``lax.scan`` was called with, in flat lists.

    Args:
      body: the jaxpr of ``(constants, carry, x) -> (carry, y)``.
      length, reverse, unroll: as in ``lax.scan``.
      constants, carry, xs: how many of each; ``ys`` likewise.
    """

    body: core.ClosedJaxpr
    length: int
    reverse: bool
    unroll: int | bool
    constants: int
    carry: int
    xs: int
    ys: int

    @staticmethod
    def of(eqn) -> "Scan":
        """The parts of a scan's equation."""
        body = closed_jaxpr(eqn.params["jaxpr"])
        inner = body.jaxpr
        # What is scanned over has one axis more outside of the body than inside it.
        rank = lambda atom: len(atom.aval.shape)
        more = lambda outer, within: sum(
            rank(a) != rank(b) for a, b in zip(outer, within, strict=True)
        )
        xs = more(eqn.invars, inner.invars)
        ys = more(eqn.outvars, inner.outvars)
        carry = len(eqn.outvars) - ys
        return Scan(
            body,
            eqn.params["length"],
            eqn.params["reverse"],
            eqn.params["unroll"],
            len(eqn.invars) - carry - xs,
            carry,
            xs,
            ys,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One equation; inputs and outputs are numbers of values.

    Args:
      eqn: the jaxpr's equation.
      inputs, outputs: numbers of the values it reads and makes.
      scan: its parts, if it is a scan.
    """

    eqn: typing.Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scan: Scan | None = None

    @property
    def scanned(self) -> tuple[int, ...]:
        """The values that a scan runs over."""
        return self.inputs[len(self.inputs) - self.scan.xs :]


class Part(typing.NamedTuple):
    """Consecutive steps of a program.

    Args:
      steps: in order.
      reads: numbers of the values from before that they need; of the first part all
        inputs.
      writes: numbers of the values that what follows needs of them.
    """

    steps: list[Step]
    reads: list[int]
    writes: list[int]


class LossProgram:
    """A traced function's steps.

    Args:
      closed: its jaxpr.
      write_out_all: whether all functions under ``jit`` are written out, also those
        without a scan.

    Attributes:
      inputs, outputs: numbers of values.
      steps: in order.
      uses: by value, how often a step or the outputs read it.
    """

    def __init__(self, closed: core.ClosedJaxpr, *, write_out_all: bool = False):
        self._write_out_all = write_out_all
        self._constants: dict[int, typing.Any] = {}
        self._avals: list[typing.Any] = []
        self.steps: list[Step] = []
        self.inputs = [self._value(var.aval) for var in closed.jaxpr.invars]
        self.outputs = self._write_out(closed, self.inputs)
        self.uses = collections.Counter(self.outputs)
        for step in self.steps:
            self.uses.update(step.inputs)

    @property
    def scans(self) -> list[Step]:
        return [step for step in self.steps if step.scan is not None]

    def aval(self, number: int):
        """Shape and dtype of a value."""
        return self._avals[number]

    def users(self, number: int) -> list[str]:
        """Names of what reads a value, for messages."""
        names = [s.eqn.primitive.name for s in self.steps if number in s.inputs]
        return names + ["the result"] * (number in self.outputs)

    def depends_on(self, inputs: Sequence[int], also: Sequence[Step]) -> set[int]:
        """The values made of these inputs, or of what these steps make."""
        found = set(inputs)
        for step in self.steps:
            if step in also or found.intersection(step.inputs):
                found.update(step.outputs)
        return found

    def evaluate(
        self,
        arguments: Sequence,
        instead: dict[int, Callable[[list], list]],
        changed: Callable[[int, jax.Array], jax.Array] = lambda _, value: value,
    ) -> list:
        """The outputs.

        Args:
          arguments: of the inputs.
          instead: for steps, by id, what computes their outputs from their inputs.
          changed: what becomes of a value, given its number, before it is used.
        """
        values = {
            number: changed(number, value)
            for number, value in zip(self.inputs, arguments, strict=True)
        }
        self.run(self.steps, values, instead, changed)
        return self.results(values)

    def run(
        self,
        steps: Sequence[Step],
        values: dict,
        instead: dict[int, Callable[[list], list]],
        changed: Callable[[int, jax.Array], jax.Array] = lambda _, value: value,
    ) -> None:
        """Compute steps from the values known so far, and add their outputs to them."""
        read = lambda n: self._constants[n] if n in self._constants else values[n]
        for step in steps:
            given = [read(n) for n in step.inputs]
            if id(step) in instead:
                results = instead[id(step)](given)
            else:
                results = bind(step.eqn, given)
            for number, result in zip(step.outputs, results, strict=True):
                values[number] = changed(number, result)

    def results(self, values: dict) -> list:
        """The outputs, where the values that they are have been computed."""
        return [
            self._constants[n] if n in self._constants else values[n]
            for n in self.outputs
        ]

    def parts(self) -> list[Part]:
        """The steps in consecutive parts, every second one a single scan."""
        groups: list[list[Step]] = [[]]
        for step in self.steps:
            if step.scan is None:
                groups[-1].append(step)
            else:
                groups += [[step], []]
        found = []
        needed = set(self.outputs)
        for group in reversed(groups):
            made = {n for step in group for n in step.outputs}
            read = {n for step in group for n in step.inputs}
            is_first = group is groups[0]
            made |= set(self.inputs) if is_first else set()
            writes = sorted(made & needed)
            needed = (needed | read) - made - set(self._constants)
            reads = (
                self.inputs
                if is_first
                else sorted(read - made - self._constants.keys())
            )
            found.append(Part(group, list(reads), writes))
        return found[::-1]

    def _value(self, aval) -> int:
        self._avals.append(aval)
        return len(self._avals) - 1

    def _write_out(self, closed: core.ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            known[var] = self._value(var.aval)
            self._constants[known[var]] = constant

        def read(atom) -> int:
            if not isinstance(atom, core.Literal):
                return known[atom]
            number = self._value(atom.aval)
            self._constants[number] = atom.val
            return number

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            if eqn.primitive is primitives.jit_p and (
                self._write_out_all or _has_scan(eqn.params["jaxpr"])
            ):
                results = self._write_out(closed_jaxpr(eqn.params["jaxpr"]), operands)
            else:
                scan = Scan.of(eqn) if eqn.primitive is primitives.scan_p else None
                results = [self._value(var.aval) for var in eqn.outvars]
                self.steps.append(Step(eqn, tuple(operands), tuple(results), scan))
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def bind(eqn, given: Sequence) -> list:
    """The results of an equation for these operands."""
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*given, **params)
    return results if eqn.primitive.multiple_results else [results]


def closed_jaxpr(jaxpr) -> core.ClosedJaxpr:
    """A jaxpr of an equation's parameters, with the constants that it has."""
    is_closed = isinstance(jaxpr, core.ClosedJaxpr)
    return jaxpr if is_closed else core.ClosedJaxpr(jaxpr, ())


def _has_scan(jaxpr) -> bool:
    return any(
        eqn.primitive is primitives.scan_p
        or (eqn.primitive is primitives.jit_p and _has_scan(eqn.params["jaxpr"]))
        for eqn in closed_jaxpr(jaxpr).jaxpr.eqns
    )


def trace(function: Callable, *args) -> tuple[LossProgram, typing.Any]:
    """The program of a function, and the shapes of its result as a tree."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return LossProgram(closed), shapes
