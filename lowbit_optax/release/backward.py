"""A scan whose backward loop hands each layer's gradients to a consumer.

::

    forward:  as lax.scan, and keep what the derivative of each layer needs
    backward: for every layer, the last one first:
                  grads = the body's transposed derivative in this layer
                  carried = consumer.update(layer, carried, grads)

So only one layer's gradients exist at a time.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from lowbit_optax._jaxprs.program import Scan, without_barriers_on
from lowbit_optax._step.layers import ByIdentity
from lowbit_optax.release.ordering import cotangents_first


class GradientConsumer(typing.Protocol):
    """What a backward loop does with the gradients of a scan's layers.

    Dictionaries map numbers of the scan's operands to arrays of one layer.
    """

    def begin(self) -> typing.Any:
        """What the backward loop carries at first."""
        ...

    def layer(self, index: jax.Array, carried) -> dict[int, jax.Array]:
        """One layer of the released xs.

        Where the stack is to be overwritten, the layer is read from what is carried:
        another reference to the stack would make XLA copy it.
        """
        ...

    def update(
        self, index: jax.Array, carried, grads: dict[int, jax.Array]
    ) -> typing.Any:
        """What is carried after the gradients of a layer."""
        ...


@dataclasses.dataclass(frozen=True)
class OperandRoles:
    """What the operands and results of a scan are in the backward pass.

    Args:
      released: numbers of the xs that the consumer reads and may overwrite.
      gradients: of those whose gradients the consumer gets.
      unread: of those among ``gradients`` whose values nothing reads, because they
        stand in for quantised weights. Their operands may be None.
      cotangents: of the other operands that need cotangents, among them the carry's
        inexact parts.
      used_ys: numbers of the results that are inexact ys which something reads.
    """

    released: tuple[int, ...]
    gradients: tuple[int, ...]
    unread: tuple[int, ...]
    cotangents: tuple[int, ...]
    used_ys: tuple[int, ...]


class ReleasedPass(typing.NamedTuple):
    """A scan that has been run forward.

    Args:
      results: the last carry and the ys.
      backward: from a consumer and the cotangents of some results, by number, to what
        the consumer carried out of the loop, and the cotangents of the operands, by
        number. It may be called several times.
    """

    results: list[jax.Array]
    backward: Callable[[GradientConsumer, Mapping[int, jax.Array]], tuple]


def released_scan(scan: Scan, roles: OperandRoles, operands: Sequence) -> ReleasedPass:
    """Run a scan, and keep what its backward loop needs.

    Args:
      scan: its parts.
      roles: of its operands and results.
      operands: constants, carry and xs.
    """
    passes = _Passes(scan, roles)
    # The structure of a layer's derivative is known once the layer has been traced.
    derivative: list[_Derivative] = []
    results, saved = passes.forward(operands, derivative)
    kept = [None if n in roles.released else x for n, x in enumerate(operands)]

    def backward(consumer: GradientConsumer, cotangents: Mapping[int, jax.Array]):
        given = {
            n: cotangents[n] if n in cotangents else jnp.zeros_like(results[n])
            for n in passes.outputs
        }
        return passes.backward(consumer, kept, saved, given, derivative[-1])

    return ReleasedPass(results, backward)


class _Derivative(typing.NamedTuple):
    """The transposed derivative of a layer, a tree, without its arrays.

    Args:
      treedef: of the tree.
      operands: for each of its arrays, the number of the scan's operand that it is;
        None for one that was saved.
    """

    treedef: typing.Any
    operands: list[int | None]

    def in_layer(self, inputs: Sequence, saved: Sequence):
        """The derivative in one layer, from the body's inputs and what was saved."""
        remaining = iter(saved)
        leaves = [next(remaining) if n is None else inputs[n] for n in self.operands]
        return jax.tree.unflatten(self.treedef, leaves)


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The forward and the backward pass of a scan."""

    scan: Scan
    roles: OperandRoles

    @property
    def first_x(self) -> int:
        return self.scan.constants + self.scan.carry

    @property
    def inexact_carry(self) -> list[int]:
        """Numbers of the results that are inexact parts of the carry."""
        avals = self.scan.body.out_avals[: self.scan.carry]
        return [n for n, aval in enumerate(avals) if _is_inexact(aval)]

    @property
    def outputs(self) -> list[int]:
        """Numbers of the results that are differentiated."""
        return [*self.inexact_carry, *self.roles.used_ys]

    @property
    def primals(self) -> list[int]:
        """Numbers of the operands in which they are differentiated."""
        return [*self.roles.cotangents, *self.roles.gradients]

    def forward(self, operands, derivative: list):
        """The scan's results, and stacks of what the layers' derivatives need.

        Args:
          operands: of the scan.
          derivative: an empty list, which gets the layers' derivative.
        """
        # The codes of a quantised layer are dequantised out of their stack.
        codes = set(self.roles.released) - set(self.roles.gradients)
        body = core.jaxpr_as_fun(without_barriers_on(self.scan.body, codes))

        def step(carry, xs):
            inputs = self._inputs(operands, carry, xs)
            results, saved = self._linearised(body, inputs, derivative)
            return results[: self.scan.carry], (results[self.scan.carry :], saved)

        carry, (ys, saved) = lax.scan(
            step,
            list(operands[self.scan.constants : self.first_x]),
            self._stacks(operands),
            length=self.scan.length,
            reverse=self.scan.reverse,
            unroll=self.scan.unroll,
        )
        return [*carry, *ys], saved

    def _linearised(self, body, inputs: list, derivative: list):
        """The body's results, and the arrays of its derivative that have to be saved.

        Arrays that are operands of the scan are not saved: they are there already.
        """

        def function(*primals):
            given = list(inputs)
            for n, x in zip(self.primals, primals, strict=True):
                given[n] = x
            results = body(*given)
            return [results[n] for n in self.outputs], results

        _, transposed, results = jax.vjp(
            function, *(inputs[n] for n in self.primals), has_aux=True
        )
        leaves, treedef = jax.tree.flatten(transposed)
        # The carry has another value in every layer: it is saved like the rest.
        in_carry = range(self.scan.constants, self.first_x)
        numbers = ByIdentity(
            [(x, None if n in in_carry else n) for n, x in enumerate(inputs)]
        )
        origins = [numbers.get(leaf) for leaf in leaves]
        derivative[:] = [_Derivative(treedef, origins)]
        saved = [x for x, n in zip(leaves, origins, strict=True) if n is None]
        return results, saved

    def backward(
        self,
        consumer: GradientConsumer,
        operands,
        saved,
        cotangents: Mapping[int, jax.Array],
        derivative: _Derivative,
    ):
        """What the consumer carried out, and cotangents of operands by number."""
        scan, roles = self.scan, self.roles
        constants = [n for n in roles.cotangents if n < scan.constants]
        carry = [n for n in roles.cotangents if scan.constants <= n < self.first_x]
        scanned = [n for n in roles.cotangents if n >= self.first_x]

        def step(loop, xs):
            ct_carry, ct_constants, carried = loop
            index, saved, ct_ys, xs = xs
            inputs = self._inputs(operands, [None] * scan.carry, xs)
            for n, x in consumer.layer(index, carried).items():
                inputs[n] = x
            found = cotangents_first(
                derivative.in_layer(inputs, saved),
                [*ct_carry, *ct_ys],
                range(len(roles.cotangents), len(self.primals)),
            )
            found = dict(zip(self.primals, found, strict=True))
            ct_constants = [
                total + found[n]
                for total, n in zip(ct_constants, constants, strict=True)
            ]
            grads = {n: found[n] for n in roles.gradients}
            carried = consumer.update(index, carried, grads)
            loop = [found[n] for n in carry], ct_constants, carried
            return loop, [found[n] for n in scanned]

        zeros = [jnp.zeros_like(operands[n]) for n in constants]
        (ct_carry, ct_constants, carried), ct_xs = lax.scan(
            step,
            (
                [cotangents[n] for n in self.inexact_carry],
                zeros,
                consumer.begin(),
            ),
            (
                jnp.arange(scan.length, dtype=jnp.int32),
                saved,
                [cotangents[n] for n in roles.used_ys],
                self._stacks(operands),
            ),
            length=scan.length,
            reverse=not scan.reverse,
            unroll=scan.unroll,
        )
        found = dict(zip(constants, ct_constants, strict=True))
        found |= zip(carry, ct_carry, strict=True)
        found |= zip(scanned, ct_xs, strict=True)
        return carried, found

    def _stacks(self, operands) -> list:
        """What the loop runs over; None where nothing reads it."""
        numbers = range(self.first_x, len(operands))
        return [None if n in self.roles.unread else operands[n] for n in numbers]

    def _inputs(self, operands, carry, xs) -> list:
        """The body's inputs in one layer."""
        inputs = [*operands[: self.scan.constants], *carry, *xs]
        for n in self.roles.unread:
            aval: typing.Any = self.scan.body.in_avals[n]
            inputs[n] = jnp.zeros(aval.shape, aval.dtype)
        return inputs


def _is_inexact(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
