"""Functions whose backward rules run the optimizer: ``released`` and ``ReleasedLoop``.

Their backward rules return new parameters and optimizer state instead of cotangents.
JAX has cotangents only for floats, so a :class:`FloatState` stores integers as floats.

``released`` is an identity around parameters that are updated as a whole. The backward
loop of a ``ReleasedLoop`` carries the stacked parameters and their state. It reads one
layer, computes its gradients, calls the update, and writes the new layer over the old
one. Barriers keep XLA from moving and fusing parts of a released step.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from lowbit_optax._step import context, trees
from lowbit_optax._step.seeds import Layer
from lowbit_optax.states.host_memory import is_on_host

_FLOATS = {1: jnp.float8_e4m3fn, 2: jnp.float16, 4: jnp.float32, 8: jnp.float64}
"""For each size in bytes, a float dtype that XLA copies without changing NaNs.

XLA may copy bfloat16 and float8_e5m2 as wider floats on a CPU, which changes NaNs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FloatState:
    """A state whose integers are stored as floats with the same bits.

    Args:
      floats: a tree with the structure of the state.
      dtypes: the dtype of each leaf of the state, or a random key's implementation.
    """

    floats: typing.Any
    dtypes: tuple = dataclasses.field(metadata={"static": True})


def as_floats(state) -> FloatState:
    """Convert optimizer state to floats, so that ``jax.grad`` accepts it.

    JAX has no cotangents for integers, so each integer becomes a float with the same
    bits. Booleans and integers with fewer than 8 bits become int8 first, and random
    keys become their data. Floats do not change.

    Args:
      state: a tree of arrays.

    Returns:
      A pytree, which :func:`as_state` converts back.

    >>> import jax.numpy as jnp
    >>> found = as_floats({"count": jnp.int32(3), "mu": jnp.ones(2)})
    >>> found.floats["count"].dtype
    dtype('float32')
    >>> as_state(found)["count"]
    Array(3, dtype=int32)
    """
    dtypes = (
        jax.random.key_impl(x) if _is_key(x) else x.dtype
        for x in jax.tree.leaves(state)
    )
    return FloatState(jax.tree.map(_to_float, state), tuple(dtypes))


def as_state(floats: FloatState):
    """Convert floats from :func:`as_floats` back to the state.

    Args:
      floats: the result of :func:`as_floats`, or a gradient with respect to it.
    """
    leaves, structure = jax.tree.flatten(floats.floats)
    pairs = zip(leaves, floats.dtypes, strict=True)
    return structure.unflatten(_from_float(x, dtype) for x, dtype in pairs)


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _to_float(x):
    if _is_key(x):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if x.dtype == jnp.bool_ or jnp.iinfo(x.dtype).bits < 8:
        x = x.astype(jnp.int8)
    return lax.bitcast_convert_type(x, _FLOATS[x.dtype.itemsize])


def _from_float(x, dtype):
    if not isinstance(dtype, np.dtype):
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        return jax.random.wrap_key_data(bits, impl=dtype)
    if x.dtype == dtype:
        return x
    if dtype == jnp.bool_ or jnp.iinfo(dtype).bits < 8:
        return lax.bitcast_convert_type(x, jnp.int8).astype(dtype)
    return lax.bitcast_convert_type(x, dtype)


Update = Callable[[typing.Any, typing.Any, typing.Any], tuple]
"""``((params, state), gradients, token) -> ((params, state), token)``."""


def released(update: Update, values, state: FloatState, token, activations):
    """Return the inputs unchanged, and update parameters in the backward pass.

    When the backward rule of this function runs, the gradient is complete, and the old
    parameters are no longer needed. The rule calls ``update`` and returns new values
    instead of the cotangents of ``state``. Barriers keep the compiler from postponing
    the update, so that only one gradient exists at a time.

    Args:
      update: the update.
      values: a tree of the arrays that have gradients.
      state: the parameters and their optimizer state.
      token: a tree of floats. The update receives its cotangent, and returns a new one.
      activations: a tree of the arrays that the layer reads. If no gradient flows
        through the results, ``update`` is not called, and the cotangents are zeros.

    Returns:
      ``(values, token, activations)``.
    """

    @jax.custom_vjp
    def identity(values, state, token, activations):
        del state
        return values, token, activations

    def forward(values, state, token, activations):
        # Without this barrier, XLA would keep every gradient until the end.
        return (values, token, tied(activations)), state

    def backward(state, cotangents):
        # Cotangents of earlier layers depend on the old parameters, and must be
        # computed before the parameters are overwritten.
        gradients, token, later = tied(cotangents)
        new = update(as_state(state), gradients, token)
        (new_state, token), later = tied((new, later))
        return None, as_floats(new_state), token, later

    identity.defvjp(forward, backward)
    return identity(values, state, token, activations)


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasedLoop:
    """A scan that updates each layer in its backward loop; see :func:`.scan`.

    Args:
      body: a function ``(shared, carry, layer, stand_ins, x) -> (carry, y)``.
      update: the update of a layer, whose index is in the step's context. Arrays that
        the function returns unchanged are not written.
      names: the paths of the stacked parameters.
      how: length, reverse and unroll, as in ``jax.lax.scan``.
      stand_ins: for each path of quantized parameters, the shape of zeros that the loop
        passes to the body. Their gradient is the gradient with respect to these zeros.
    """

    body: Callable
    update: Update
    names: Iterable[str]
    how: dict[str, typing.Any]
    stand_ins: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(
        default_factory=dict
    )

    def __call__(self, *operands) -> tuple:
        """Run the loop, and return ``(carry, ys, token)``.

        The backward pass returns the cotangents of the operands. The operands are:

        - ``shared``: arrays that every layer reads.
        - ``init``: the first carry.
        - ``state``: the FloatState of ``(params, state)``, both stacked along their
          first axis. ``params`` are by path.
        - ``xs``: other stacked arrays, or None.
        - ``token``: a tree that the loop returns unchanged. In the backward loop, each
          update receives its cotangent, and returns a new one for the next layer.
        """
        read_back = _ReadBack()
        forward = functools.partial(self._forward, read_back)
        run = jax.custom_vjp(lambda *args: forward(*args)[0])
        run.defvjp(forward, functools.partial(self._backward, read_back))
        return run(*operands)

    def _forward(self, read_back: "_ReadBack", shared, init, state, xs, token):
        """Return the results, and the arrays that the backward pass needs."""
        zero = lambda like: jnp.zeros(like.shape, like.dtype)

        def step(carry, inputs):
            layer, x = inputs
            zeros = jax.tree.map(zero, self.stand_ins)
            codes = {name: layer[name] for name in zeros}
            plain = {name: layer[name] for name in layer if name not in zeros}
            function = lambda shared, carry, plain, zeros, x: self.body(
                shared, carry, plain | codes, zeros, x
            )
            out, pull = jax.vjp(function, shared, carry, plain, zeros, x)
            known = jax.tree.leaves((shared, layer, x))
            return out[0], (out[1], read_back.save(pull, out, known))

        stacks = as_state(state)[0], xs
        carry, (ys, saved) = lax.scan(step, init, stacks, **self.how)
        return (carry, ys, token), (shared, state, xs, saved)

    def _backward(self, read_back: "_ReadBack", residuals, cotangents):
        """Return the operands' cotangents; for the state, the new values."""
        shared, state, xs, saved = residuals
        stacks = as_state(state)
        count = len(jax.tree.leaves(stacks)[0])
        ct_carry, ct_ys, token = _without_integers(cotangents)

        def step(loop, inputs):
            ct_carry, ct_shared, token, stacks = loop
            early, saved, ct_y, x = inputs
            known = jax.tree.leaves((shared, _layer_at(early, stacks[0], early), x))
            found = _without_integers(read_back.pull(saved, known, (ct_carry, ct_y)))
            (more, ct_carry, *gradients, ct_x), later = tied((found, early))
            # Read the layer again after the gradients, so that they can use the memory
            # of the first copy. On a CPU, XLA drops barriers and would copy whole
            # stacks.
            index = lax.platform_dependent(
                early, later, cpu=lambda x, _: x, default=lambda _, x: x
            )
            old = _layer_at(index, stacks, early)
            with context.changed(layer=Layer(index, count, frozenset(self.names))):
                new, token = self.update(old, gradients[0] | gradients[1], token)
            write = functools.partial(lax.dynamic_update_index_in_dim, axis=0)
            put = lambda stack, x, y: stack if y is x else write(stack, y, index)
            stacks = jax.tree.map(put, stacks, old, new)
            ct_shared = jax.tree.map(jnp.add, ct_shared, more)
            return (ct_carry, ct_shared, token, stacks), ct_x

        zeros = jax.tree.map(jnp.zeros_like, _without_integers(shared))
        (ct_carry, ct_shared, token, stacks), ct_xs = lax.scan(
            step,
            (ct_carry, zeros, token, stacks),
            (jnp.arange(count, dtype=jnp.int32), saved, ct_ys, xs),
            **self.how | {"reverse": not self.how["reverse"]},
        )
        primals = shared, read_back.out[0], xs
        ct_shared, ct_carry, ct_xs = _like(primals, (ct_shared, ct_carry, ct_xs))
        return ct_shared, ct_carry, as_floats(stacks), ct_xs, token


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
        y = y if trees.is_inexact(x) or x.dtype == y.dtype else y.astype(x.dtype)
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
