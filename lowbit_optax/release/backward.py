"""A scan whose backward loop hands each layer's gradients to a rule and forgets them.

    forward:  as lax.scan, keeping what the body's derivative needs
    backward: for every layer, the last first: the body's transposed derivative,
              then  carried = rule.update(layer, carried, gradients)

It is a ``custom_vjp``. What the rule carries through the loop (stacks of parameters and
of optimizer state, updated in place) comes out as the cotangent of the rule's *handle*,
an input that the forward pass does not read.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from lowbit_optax._jaxprs.program import Scan


class Rule(typing.Protocol):
    """What happens to the gradients of a scan's layers."""

    def begin(self, handle) -> typing.Any:
        """What the backward loop carries, from the handle's arrays."""

    def layer(self, index: jax.Array, carried) -> dict[int, jax.Array]:
        """A layer of the released xs, by position.

        It is read from what is carried where that is to be overwritten: another
        reference to the stack would make XLA copy it.
        """

    def update(self, index: jax.Array, carried, grads: dict[int, jax.Array]):
        """What is carried after a layer's gradients, by position among the xs."""

    def end(self, carried) -> typing.Any:
        """The handle's cotangents."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which operands and results of a scan are what; operands by their number.

    Args:
      released: xs that the rule reads and may overwrite.
      slots: those that the rule gets the gradients of.
      virtual: slots whose values nothing reads; their operands may be None.
      wanted: other operands that need cotangents, the inexact carry among them.
      read: inexact ys that something reads, by number of result.
    """

    released: tuple[int, ...]
    slots: tuple[int, ...]
    virtual: tuple[int, ...]
    wanted: tuple[int, ...]
    read: tuple[int, ...]


def released_scan(
    scan: Scan, roles: Roles, rule: Rule, handle, operands: Sequence
) -> list[jax.Array]:
    """A scan's results, differentiable in the rule's handle and the wanted operands.

    Args:
      scan: its parts.
      roles: of its operands and results.
      rule: for the gradients of the slots.
      handle: a tree of floating-point arrays.
      operands: constants, carry and xs.

    Returns:
      The last carry and the ys.
    """
    layers = _Layers(scan, roles)
    # What the derivative of a layer consists of is known once it has been traced.
    derivative: list[_Derivative] = []

    @jax.custom_vjp
    def run(handle, operands):
        del handle
        return layers.forward(operands)[0]

    def forward(handle, operands):
        results, saved = layers.forward(operands, derivative)
        kept = [None if n in roles.released else x for n, x in enumerate(operands)]
        return results, (handle, kept, saved)

    def backward(residuals, cotangents):
        handle, operands, saved = residuals
        return layers.backward(
            rule, handle, operands, saved, cotangents, derivative[-1]
        )

    run.defvjp(forward, backward)
    return run(handle, list(operands))


class _Derivative(typing.NamedTuple):
    """A layer's transposed derivative as a tree without its arrays.

    Args:
      tree: with which it is put together again.
      origins: by leaf, the operand that it is; None for one that was saved.
    """

    tree: jax.tree_util.PyTreeDef
    origins: list[int | None]

    def whole(self, inputs: Sequence, saved: Sequence):
        """The derivative in one layer, from the body's inputs and what was saved."""
        saved = iter(saved)
        leaves = [next(saved) if n is None else inputs[n] for n in self.origins]
        return jax.tree.unflatten(self.tree, leaves)


@dataclasses.dataclass(frozen=True)
class _Layers:
    scan: Scan
    roles: Roles

    @property
    def first_x(self) -> int:
        return self.scan.constants + self.scan.carry

    @property
    def inexact_carry(self) -> list[int]:
        """Numbers of results that are the carry's parts that are not integers."""
        avals = self.scan.body.out_avals[: self.scan.carry]
        return [n for n, aval in enumerate(avals) if _is_inexact(aval)]

    @property
    def outputs(self) -> list[int]:
        """Numbers of the results that are differentiated."""
        return [*self.inexact_carry, *self.roles.read]

    @property
    def primals(self) -> list[int]:
        """Numbers of the operands that are differentiated."""
        return [*self.roles.wanted, *self.roles.slots]

    def forward(self, operands, derivative: list | None = None):
        """The scan's results, and stacks of what the layers' derivatives need.

        Args:
          operands: of the scan.
          derivative: filled with the layers' derivative; None if none is wanted.
        """
        body = core.jaxpr_as_fun(self.scan.body)

        def step(carry, xs):
            inputs = self._inputs(operands, carry, xs)
            if derivative is None:
                results, saved = body(*inputs), []
            else:
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
        def function(*primals):
            given = list(inputs)
            for n, x in zip(self.primals, primals, strict=True):
                given[n] = x
            results = body(*given)
            return [results[n] for n in self.outputs], results

        _, transposed, results = jax.vjp(
            function, *(inputs[n] for n in self.primals), has_aux=True
        )
        leaves, tree = jax.tree.flatten(transposed)
        numbers = {id(x): n for n, x in enumerate(inputs)}
        origins = [numbers.get(id(leaf)) for leaf in leaves]
        # A carry has another value in every layer: it is saved like the rest.
        in_carry = range(self.scan.constants, self.first_x)
        origins = [None if n in in_carry else n for n in origins]
        derivative[:] = [_Derivative(tree, origins)]
        saved = [x for x, n in zip(leaves, origins, strict=True) if n is None]
        return results, saved

    def backward(
        self, rule: Rule, handle, operands, saved, cotangents, derivative: _Derivative
    ):
        """Cotangents of the handle and of the operands."""
        scan, roles = self.scan, self.roles
        constants = [n for n in roles.wanted if n < scan.constants]
        carry = [n for n in roles.wanted if scan.constants <= n < self.first_x]
        scanned = [n for n in roles.wanted if n >= self.first_x]

        def step(loop, xs):
            ct_carry, ct_constants, carried = loop
            index, saved, ct_ys, xs = xs
            inputs = self._inputs(operands, [None] * scan.carry, xs)
            for n, x in rule.layer(index, carried).items():
                inputs[n] = x
            found = derivative.whole(inputs, saved)([*ct_carry, *ct_ys])
            found = dict(zip(self.primals, found, strict=True))
            ct_constants = [
                total + found[n]
                for total, n in zip(ct_constants, constants, strict=True)
            ]
            grads = {n: found[n] for n in roles.slots}
            carried = rule.update(index, carried, grads)
            loop = [found[n] for n in carry], ct_constants, carried
            return loop, [found[n] for n in scanned]

        zeros = [jnp.zeros_like(operands[n]) for n in constants]
        (ct_carry, ct_constants, carried), ct_xs = lax.scan(
            step,
            ([cotangents[n] for n in self.inexact_carry], zeros, rule.begin(handle)),
            (
                jnp.arange(scan.length, dtype=jnp.int32),
                saved,
                [cotangents[n] for n in roles.read],
                self._stacks(operands),
            ),
            length=scan.length,
            reverse=not scan.reverse,
            unroll=scan.unroll,
        )
        found = dict(zip(constants, ct_constants, strict=True))
        found |= zip(carry, ct_carry, strict=True)
        found |= zip(scanned, ct_xs, strict=True)
        return rule.end(carried), [found.get(n) for n in range(len(operands))]

    def _stacks(self, operands) -> list:
        """What the loop runs over; None where nothing reads it."""
        numbers = range(self.first_x, len(operands))
        return [None if n in self.roles.virtual else operands[n] for n in numbers]

    def _inputs(self, operands, carry, xs) -> list:
        """The body's inputs in one layer."""
        inputs = [*operands[: self.scan.constants], *carry, *xs]
        for n in self.roles.virtual:
            aval = self.scan.body.in_avals[n]
            inputs[n] = jnp.zeros(aval.shape, aval.dtype)
        return inputs


def _is_inexact(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
