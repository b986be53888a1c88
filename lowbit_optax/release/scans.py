"""A scan whose backward loop hands each layer's gradients to the backward pass.

::

    forward:  as lax.scan, and keep what the derivative of each layer needs
    backward: for every layer, the last one first:
                  grads = the body's transposed derivative in this layer
                  carried = backward_pass.update(stretch, layer, carried, grads)

So only one layer's gradients exist at a time.
"""

import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from lowbit_optax._jaxprs.graph import Node, value_of
from lowbit_optax._jaxprs.program import LossProgram, without_barriers_on
from lowbit_optax._step.layers import ByIdentity
from lowbit_optax.release.ordering import cotangents_first
from lowbit_optax.release.stretches import Stretch, is_inexact

Cotangents = dict[Node, jax.Array]


class BackwardPass(typing.Protocol):
    """What is done with gradients in a backward pass."""

    def begin(self, stretch: Stretch) -> typing.Any:
        """What a scan's loop carries at first. At last it is the loop's result."""
        ...

    def params(self, stretch: Stretch, carried) -> dict[str, typing.Any]:
        """By path the stacks that the loop updates, of which layers are read.

        Where a stack is to be overwritten, it is the one that is carried: another
        reference to it would make XLA copy it.
        """
        ...

    def update(
        self, stretch: Stretch, index: jax.Array, carried, grads: dict[str, jax.Array]
    ) -> typing.Any:
        """What the loop carries after the gradients of a layer, by path."""
        ...

    def take(self, stretch: Stretch, grads: dict[str, jax.Array]) -> typing.Any:
        """The result of the gradients of a stretch's leaves, by path.

        It is made of arrays, which take the gradients' place.
        """
        ...


class ReleasedScan:
    """A scan that is run forward, and whose backward loop can be run several times.

    Args:
      program: the loss.
      stretch: the scan.
      active: the values that have cotangents.
      known: values by node, to which the scan's results are added.
    """

    def __init__(
        self,
        program: LossProgram,
        stretch: Stretch,
        active: set[Node],
        known: dict[Node, typing.Any],
    ):
        self._stretch, self._active = stretch, active
        self._call = call = stretch.scan_call
        self._scan = scan = call.scan
        inputs, outputs = call.inputs, call.outputs
        self._first_x = scan.constants + scan.carry
        # Numbers of the results that are differentiated.
        self._carry = [n for n in range(scan.carry) if is_inexact(outputs[n])]
        self._ys = [
            n
            for n in range(scan.carry, len(outputs))
            if program.uses[outputs[n]] and is_inexact(outputs[n])
        ]
        # Numbers of the operands: the parameters' arrays; those whose gradients the
        # backward pass gets; those that nothing reads, because they stand in for
        # quantised weights; all others that have cotangents.
        leaves = stretch.in_loop
        self._arrays = [inputs.index(v) for leaf in leaves for v in leaf.array_values]
        self._gradients = {
            leaf.name: inputs.index(leaf.gradient_value)
            for leaf in leaves
            if leaf.gradient_value is not None
        }
        self._unread = set(self._gradients.values()).difference(self._arrays)
        released = self._unread.union(self._arrays)
        # From the second layer on, the carry depends on the released parameters.
        self._in_carry = range(scan.constants, self._first_x)
        self._cotangents = [
            n
            for n, value in enumerate(inputs)
            if n not in released
            and is_inexact(value)
            and (n in self._in_carry or value in active)
        ]
        self._primals = [*self._cotangents, *self._gradients.values()]
        self._operands = [value_of(node, known) for node in inputs]
        self._results = self._forward()
        known.update(zip(outputs, self._results, strict=True))

    def _forward(self) -> list[jax.Array]:
        """The scan's results. What the layers' derivatives need is saved."""
        scan = self._scan
        # The codes of a quantised layer are dequantised out of their stack.
        codes = set(self._arrays).difference(self._gradients.values())
        body = core.jaxpr_as_fun(without_barriers_on(scan.body, codes))

        def step(carry, xs):
            inputs = self._inputs(self._operands, carry, xs)
            results, saved = self._linearised(body, inputs)
            return results[: scan.carry], (results[scan.carry :], saved)

        carry, (ys, self._saved) = lax.scan(
            step,
            self._operands[scan.constants : self._first_x],
            self._stacks(self._operands),
            length=scan.length,
            reverse=scan.reverse,
            unroll=scan.unroll,
        )
        return [*carry, *ys]

    def _linearised(self, body: Callable, inputs: list):
        """The body's results, and the arrays of its derivative that have to be saved.

        Arrays that are operands of the scan are not saved: they are there already.
        """

        def function(*primals):
            arguments = list(inputs)
            for n, x in zip(self._primals, primals, strict=True):
                arguments[n] = x
            results = body(*arguments)
            return [results[n] for n in (*self._carry, *self._ys)], results

        _, transposed, results = jax.vjp(
            function, *(inputs[n] for n in self._primals), has_aux=True
        )
        leaves, self._derivative = jax.tree.flatten(transposed)
        # The carry has another value in every layer: it is saved like the rest.
        numbers = ByIdentity(
            [(x, None if n in self._in_carry else n) for n, x in enumerate(inputs)]
        )
        # For each array of the derivative the operand that it is, if it is one.
        self._origins = [numbers.get(leaf) for leaf in leaves]
        saved = zip(leaves, self._origins, strict=True)
        return results, [x for x, n in saved if n is None]

    def pull(self, cotangents: Cotangents, backward_pass: BackwardPass) -> list:
        """Take the results' cotangents, add the operands', and return what was made."""

        def cotangents_of(numbers):
            nodes = [self._call.outputs[n] for n in numbers]
            return [
                cotangents.pop(node)
                if node in cotangents
                else jnp.zeros_like(self._results[n])
                for node, n in zip(nodes, numbers, strict=True)
            ]

        result, found = self._backward(
            backward_pass, cotangents_of(self._carry), cotangents_of(self._ys)
        )
        for number, cotangent in found.items():
            node = self._call.inputs[number]
            if node in self._active:
                before = cotangents.get(node)
                cotangents[node] = cotangent if before is None else before + cotangent
        return [result]

    def _backward(self, backward_pass: BackwardPass, ct_carry: list, ct_ys: list):
        """The backward pass's result, and cotangents of operands by number."""
        scan, stretch = self._scan, self._stretch
        constants = [n for n in self._cotangents if n < scan.constants]
        carry = [n for n in self._cotangents if n in self._in_carry]
        scanned = [n for n in self._cotangents if n >= self._first_x]
        operands: list[typing.Any] = list(self._operands)
        for n in self._arrays:
            operands[n] = None

        def step(loop, xs):
            ct_carry, ct_constants, carried = loop
            index, saved, ct_ys, xs = xs
            inputs = self._inputs(operands, [None] * scan.carry, xs)
            params = backward_pass.params(stretch, carried)
            stacks = jax.tree.leaves([params[leaf.name] for leaf in stretch.in_loop])
            for n, stack in zip(self._arrays, stacks, strict=True):
                inputs[n] = lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
            found = self._transposed(inputs, saved, [*ct_carry, *ct_ys])
            ct_constants = [
                total + found[n]
                for total, n in zip(ct_constants, constants, strict=True)
            ]
            grads = {name: found[n] for name, n in self._gradients.items()}
            carried = backward_pass.update(stretch, index, carried, grads)
            loop = [found[n] for n in carry], ct_constants, carried
            return loop, [found[n] for n in scanned]

        zeros = [jnp.zeros_like(operands[n]) for n in constants]
        index = jnp.arange(scan.length, dtype=jnp.int32)
        (ct_carry, ct_constants, carried), ct_xs = lax.scan(
            step,
            (ct_carry, zeros, backward_pass.begin(stretch)),
            (index, self._saved, ct_ys, self._stacks(operands)),
            length=scan.length,
            reverse=not scan.reverse,
            unroll=scan.unroll,
        )
        found = [*ct_constants, *ct_carry, *ct_xs]
        return carried, dict(zip(self._cotangents, found, strict=True))

    def _transposed(self, inputs: list, saved: list, cotangents: list):
        """Cotangents of the body's inputs, by number."""
        remaining = iter(saved)
        leaves = [next(remaining) if n is None else inputs[n] for n in self._origins]
        found = cotangents_first(
            jax.tree.unflatten(self._derivative, leaves),
            cotangents,
            range(len(self._cotangents), len(self._primals)),
        )
        return dict(zip(self._primals, found, strict=True))

    def _stacks(self, operands: Sequence) -> list:
        """What the loop runs over; None where nothing reads it."""
        numbers = range(self._first_x, len(operands))
        return [None if n in self._unread else operands[n] for n in numbers]

    def _inputs(self, operands: Sequence, carry: Sequence, xs: Sequence) -> list:
        """The body's inputs in one layer."""
        inputs = [*operands[: self._scan.constants], *carry, *xs]
        for n in self._unread:
            aval: typing.Any = self._scan.body.in_avals[n]
            inputs[n] = jnp.zeros(aval.shape, aval.dtype)
        return inputs
