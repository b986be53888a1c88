"""Functions whose backward rules run the optimizer: ``released`` and ``ReleasedLoop``.

``released`` is an identity around parameters that are updated as a whole. The backward
loop of a ``ReleasedLoop`` carries the stacked parameters and their state. It reads one
layer, computes its gradients, calls the update, and writes the new layer over the old
one. Barriers keep XLA from moving and fusing parts of a released step.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from lowbit_optax._step import context, trees
from lowbit_optax._step.layers import Layer
from lowbit_optax.release.float_state import FloatState, as_floats, as_state
from lowbit_optax.states.host_memory import is_on_host

Update = Callable[[typing.Any, typing.Any, typing.Any], tuple]


def released(update: Update, params, state: FloatState, activations):
    """Return the inputs unchanged, and update parameters in the backward pass.

    When the backward rule of this function runs, the gradient is complete, and the old
    parameters are no longer needed. The rule calls ``update`` and returns new values
    instead of cotangents:

        d loss / d params = new params,    d loss / d state = new state

    Barriers keep the compiler from postponing the update, so that only one gradient
    exists at a time.

    Args:
      update: a function ``(params, state, gradients) -> (params, state)``.
      params: a tree of floating-point arrays.
      state: the optimizer state of these parameters.
      activations: a tree of the arrays that the layer reads. If no gradient flows
        through the results, ``update`` is not called, and the cotangents are zeros.

    Returns:
      ``(params, activations)``.
    """

    @jax.custom_vjp
    def identity(params, state, activations):
        del state
        return params, activations

    def forward(params, state, activations):
        # Without this barrier, XLA would keep every gradient until the end.
        return (params, tied(activations)), (params, state)

    def backward(saved, cotangents):
        params, state = saved
        # Cotangents of earlier layers depend on the old parameters, and must be
        # computed before the parameters are overwritten.
        gradients, later = tied(cotangents)
        new = update(params, as_state(state), gradients)
        (new_params, new_state), later = tied((new, later))
        return new_params, as_floats(new_state), later

    identity.defvjp(forward, backward)
    return identity(params, state, activations)


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
            write = functools.partial(lax.dynamic_update_index_in_dim, axis=0)
            put = lambda stack, x, y: stack if y is x else write(stack, y, index)
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


def alone(update: Callable, *old):
    """Run the update of a layer so that XLA does not fuse it with accesses to stacks.

    If a GPU kernel fuses the update with the reads and writes of a stack, some threads
    write a layer's packed words in place while others still read them, and the weights
    become wrong. On GPUs and TPUs, a barrier prevents this fusion. The compiler for
    CPUs drops barriers and would copy whole stacks in every iteration, so a conditional
    prevents the fusion there. Outside of loops, this is ``update(*old)``.
    """
    layer = context.current().layer
    if layer is None:
        return update(*old)

    def branched(index, old):
        # The index is never negative, but the compiler cannot infer this.
        return lax.cond(index >= 0, lambda: update(*old), lambda: old)

    direct = lambda _, old: update(*tied(old))
    return lax.platform_dependent(layer.index, old, cpu=branched, default=direct)


def tied(tree):
    """Return the same arrays, which can be used only after all of them are computed.

    Within ``shard_map``, only arrays that vary over the same mesh axes are tied to each
    other. Before JAX 0.12, the results of a barrier all vary over the same axes.

    >>> tied({"a": jax.numpy.float32(1), "b": ()})
    {'a': Array(1., dtype=float32), 'b': ()}
    """
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[object, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.dtype != jax.dtypes.float0:
            varying = getattr(jax.typeof(leaf), "manual_axis_type", None)
            groups.setdefault(varying, []).append(number)
    for numbers in groups.values():
        arrays = lax.optimization_barrier([leaves[n] for n in numbers])
        for number, array in zip(numbers, arrays, strict=True):
            leaves[number] = array
    return structure.unflatten(leaves)


def kept(old, new):
    """Return a new state that has the dtypes of the old state.

    optax's moments of integers are integers before the first step. Then they are floats
    that remain zero, because integers have no gradient.

    Raises:
      TypeError: if the step changed the structure of the state, a shape, or the dtype
        of floats.
    """
    structure, state = jax.tree.structure(old), []
    if jax.tree.structure(new) != structure:
        raise TypeError(
            f"release: tx.update must keep the structure of its state, {structure}, "
            f"got {jax.tree.structure(new)}"
        )
    pairs = zip(jax.tree.leaves_with_path(old), jax.tree.leaves(new), strict=True)
    for (path, x), y in pairs:
        y = y if trees.is_inexact(x) else y.astype(x.dtype)
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise TypeError(
                "release: tx.update must keep shapes and dtypes of its state, but state"
                f"{jax.tree_util.keystr(path)} was {trees.describe(x)} and became "
                f"{trees.describe(y)}"
            )
        state.append(y)
    return structure.unflatten(state)


def check_reduced(step: Callable, *arguments) -> None:
    """Check that a step within ``shard_map`` sees gradients of the whole batch.

    JAX sums the gradients of replicated parameters, except with ``check_vma=False``.
    The step must then reduce gradients itself.

    Args:
      step: the function that updates parameters.
      *arguments: the arguments of ``step``, or their shapes.

    Raises:
      ValueError: if every device would use the gradient of its own shard of the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = {name for name in mesh.manual_axes if mesh.shape[name] > 1}
    if not axes or jax.typeof(lax.axis_index(tuple(axes))).manual_axis_type.varying:
        return
    missing = axes - _reduced_axes(jax.make_jaxpr(step)(*arguments).jaxpr)
    if missing:
        raise ValueError(
            "release: jax.shard_map must have check_vma=True, because JAX does not sum "
            f"the gradients of replicas over {sorted(missing)} with check_vma=False or "
            "in jax.pmap. Otherwise, reduce gradients in tx, such as optax.chain("
            "optax.stateless(lambda grads, _: jax.lax.pmean(grads, axes)), tx)"
        )


def _reduced_axes(jaxpr) -> set:
    """Return the names of mesh axes over which a jaxpr adds values."""
    found = set()
    for eqn in jaxpr.eqns:
        inner = core.jaxprs_in_params(eqn.params)
        found.update(eqn.params.get("axes") or (), *map(_reduced_axes, inner))
    return found
