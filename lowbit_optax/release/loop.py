"""A scan over layers whose backward loop updates each layer.

The backward loop carries the stacked parameters and their state. It reads one layer,
computes its gradients, calls the update, and writes the new layer over the old one.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._step import context
from lowbit_optax._step.layers import Layer
from lowbit_optax.release.barriers import tied
from lowbit_optax.release.float_state import as_floats, as_state
from lowbit_optax.states.host_memory import is_on_host


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasedLoop:
    """A scan that updates each layer in its backward loop; see :func:`.scan`.

    Args:
      body: a function ``(shared, carry, (layer, stand_ins), codes, x) -> (carry, y)``.
      update: a function ``(layer, (codes, state), (gradients, gradients of stand_ins),
        token) -> (layer, (codes, state), token)``. The layer's index is in the step's
        context. Arrays that the function returns unchanged are not written.
      names: the paths of the stacked parameters.
      how: length, reverse and unroll, as in ``jax.lax.scan``.
      stand_ins: shapes of zeros that the loop passes to the body. The gradient of a
        quantised array is the gradient with respect to these zeros.
    """

    body: Callable
    update: Callable
    names: Iterable[str]
    how: dict[str, typing.Any]
    stand_ins: typing.Any = ()

    def __call__(self, *operands) -> tuple:
        """Run the loop, and return ``(carry, ys, token)``.

        The backward pass returns the cotangents of the operands. The operands are:

        - ``shared``: arrays that every layer reads.
        - ``init``: the first carry.
        - ``layers``: a tree of arrays that are stacked along their first axis.
        - ``state``: the FloatState of ``(codes, state)``, where codes are the arrays of
          quantised layers.
        - ``xs``: other stacked arrays, or None.
        - ``token``: a tree that the loop returns unchanged. In the backward loop, each
          update receives its cotangent, and returns a new one for the next layer.
        """
        read_back = _ReadBack()
        forward = functools.partial(self._forward, read_back)
        run = jax.custom_vjp(lambda *args: forward(*args)[0])
        run.defvjp(forward, functools.partial(self._backward, read_back))
        return run(*operands)

    def _forward(self, read_back: "_ReadBack", shared, init, layers, state, xs, token):
        """Return the results, and the arrays that the backward pass needs."""
        zero = lambda like: jnp.zeros(like.shape, like.dtype)

        def step(carry, inputs):
            layer, codes, x = inputs
            zeros = jax.tree.map(zero, self.stand_ins)
            function = lambda *args: self.body(*args[:3], codes, *args[3:])
            out, pull = jax.vjp(function, shared, carry, (layer, zeros), x)
            known = jax.tree.leaves((shared, layer, codes, x))
            return out[0], (out[1], read_back.save(pull, out, known))

        stacks = layers, as_state(state)[0], xs
        carry, (ys, saved) = lax.scan(step, init, stacks, **self.how)
        return (carry, ys, token), (shared, layers, state, xs, saved)

    def _backward(self, read_back: "_ReadBack", residuals, cotangents):
        """Return the operands' cotangents; for layers and state, the new values."""
        shared, layers, state, xs, saved = residuals
        stacks = layers, as_state(state)
        count = len(jax.tree.leaves(stacks)[0])
        ct_carry, ct_ys, token = _without_integers(cotangents)

        def step(loop, inputs):
            ct_carry, ct_shared, token, stacks = loop
            early, saved, ct_y, x = inputs
            layer, codes = _layer_at(early, (stacks[0], stacks[1][0]), early)
            known = jax.tree.leaves((shared, layer, codes, x))
            found = _without_integers(read_back.pull(saved, known, (ct_carry, ct_y)))
            (more, ct_carry, gradients, ct_x), later = tied((found, early))
            # Read the layer again after the gradients, so that they can use the memory
            # of the first copy. On a CPU, XLA drops barriers and would copy whole
            # stacks.
            index = lax.platform_dependent(
                early, later, cpu=lambda x, _: x, default=lambda _, x: x
            )
            old = _layer_at(index, stacks, early)
            with context.changed(layer=Layer(index, count, frozenset(self.names))):
                *new, token = self.update(*old, gradients, token)
            put = functools.partial(_put, index)
            stacks = jax.tree.map(put, stacks, old, tuple(new))
            ct_shared = jax.tree.map(jnp.add, ct_shared, more)
            return (ct_carry, ct_shared, token, stacks), ct_x

        zeros = jax.tree.map(jnp.zeros_like, _without_integers(shared))
        (ct_carry, ct_shared, token, (layers, new_state)), ct_xs = lax.scan(
            step,
            (ct_carry, zeros, token, stacks),
            (jnp.arange(count, dtype=jnp.int32), saved, ct_ys, xs),
            **self.how | {"reverse": not self.how["reverse"]},
        )
        primals = shared, read_back.out[0], xs
        ct_shared, ct_carry, ct_xs = _like(primals, (ct_shared, ct_carry, ct_xs))
        return ct_shared, ct_carry, layers, as_floats(new_state), ct_xs, token


class _ReadBack:
    """Finds the arrays that the backward loop can read again, such as weights.

    The forward loop saves only the remaining arrays, in stacks. After ``save``, ``out``
    contains the types of ``(carry, y)``.
    """

    def save(self, pull, out, known: list) -> list:
        """Return the arrays of ``pull`` that the forward loop must save."""
        leaves, self._structure = jax.tree.flatten(pull)
        self.out = jax.tree.map(jax.typeof, out)
        numbers = lambda x: (n for n, each in enumerate(known) if each is x)
        self._origins = [next(numbers(leaf), None) for leaf in leaves]
        pairs = zip(leaves, self._origins, strict=True)
        return [x for x, number in pairs if number is None]

    def pull(self, saved: list, known: list, cotangents):
        """Call the function that ``save`` received, with saved and known arrays."""
        rest = iter(saved)
        leaves = [next(rest) if n is None else known[n] for n in self._origins]
        return self._structure.unflatten(leaves)(_like(self.out, cotangents))


def _without_integers(tree):
    """Replace integer arrays, which have no derivative, with None."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: x if is_float(x) else None, tree)


def _like(primals, cotangents):
    """Replace each None in ``cotangents`` with the float0 zeros that JAX expects."""
    zero = lambda x: np.zeros(jnp.shape(x), jax.dtypes.float0)
    either = lambda x, ct: zero(x) if ct is None else ct
    return jax.tree.map(either, primals, cotangents)


def _layer_at(index, stacks, early):
    """Read one layer from each stack.

    ``early`` equals ``index`` and is available before the gradients are, so that copies
    from host memory can start early.
    """
    number = lambda x: early if is_on_host(x) else index
    read = lambda x: lax.dynamic_index_in_dim(x, number(x), keepdims=False)
    return jax.tree.map(read, stacks)


def _put(index, stack, old, new):
    """Write a new layer to the stack, unless the update returned the old one."""
    if new is old:
        return stack
    return lax.dynamic_update_index_in_dim(stack, new, index, 0)
