"""Two ``jax.custom_vjp`` wrappers whose backward rules run the optimizer.

::

    released   (params, activations) pass through; their cotangents come back, and
               the rule returns new parameters as the cotangents of the old ones
    scan       lax.scan over layers, whose backward loop updates each layer

JAX differentiates everything else.
"""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._step import context, trees
from lowbit_optax._step.layers import Layer
from lowbit_optax.release.float_state import FloatState, as_floats, as_state
from lowbit_optax.release.host_memory import is_on_host

Update = Callable[[typing.Any, typing.Any, typing.Any], tuple]


def released(update: Update, params, state: FloatState, activations):
    """Return parameters and activations unchanged; update when differentiated.

    Everything that reads ``params`` must read the returned ones, and the layer must
    read the returned activations. When the backward rule runs, the gradient is complete
    and no remaining computation needs the old parameters. The rule calls ``update`` and
    returns new values instead of cotangents:

        d loss / d params = new params,    d loss / d state = new state

    Barriers keep the compiler from postponing the update, so that one gradient is
    alive at a time.

    Args:
      update: a function ``(params, state, gradients) -> (params, state)``, such as
        ``functools.partial(lowbit_optax.step, tx)``.
      params: a tree of floating-point arrays.
      state: :func:`as_floats` of the optimizer's state for these parameters.
      activations: a tree of the arrays that the layer reads. If no gradient flows
        through any result, ``update`` is not called, and the cotangents are zeros.

    Returns:
      ``(params, activations)``.

    >>> import functools, jax, jax.numpy as jnp, lowbit_optax
    >>> from lowbit_optax import release
    >>> tx = lowbit_optax.kahan_adamw(0.1)
    >>> update = functools.partial(lowbit_optax.step, tx)
    >>> params = [jnp.eye(4, dtype=jnp.bfloat16) for _ in range(2)]
    >>> def loss_fn(params, states, x):
    ...     for w, state in zip(params, states):
    ...         w, x = release.released(update, w, state, x)
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x.astype(jnp.float32) ** 2)
    >>> states = [release.as_floats(tx.init(w)) for w in params]
    >>> step = jax.jit(jax.value_and_grad(loss_fn, (0, 1)), donate_argnums=(0, 1))
    >>> loss, (params, states) = step(params, states, jnp.ones((2, 4), jnp.bfloat16))
    >>> release.as_state(states[0]).count
    Array(1, dtype=uint32)
    """

    @jax.custom_vjp
    def identity(params, state, activations):
        del state
        return params, activations

    def forward(params, state, activations):
        # XLA would keep every gradient until the end without this barrier.
        return (params, tied(activations)), (params, state)

    def backward(saved, cotangents):
        params, state = saved
        # Cotangents of earlier layers read the old parameters. They have to be
        # complete before the parameters are overwritten.
        gradients, later = tied(cotangents)
        old = params, as_state(state)
        new = update(*old, gradients)
        check_kept("(params, state)", old, new)
        (new_params, new_state), later = tied((new, later))
        return new_params, as_floats(new_state), later

    identity.defvjp(forward, backward)
    return identity(params, state, activations)


def scan(
    body: Callable,
    update: Update,
    init,
    layers,
    state: FloatState,
    xs=None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
):
    """``jax.lax.scan`` over layers, whose backward loop updates each layer.

    The backward loop carries the stacked parameters and their state. For each layer it
    computes the gradients, calls ``update``, and overwrites the old layer with the
    new one. As in :func:`released`, the new values are the cotangents of ``layers``
    and ``state``.

    Args:
      body: a function ``(carry, layer, x) -> (carry, y)``. Wrap it in
        ``jax.checkpoint`` to recompute a layer's activations in the backward loop.
      update: a function ``(layer, state, gradients) -> (layer, state)``, such as
        ``functools.partial(lowbit_optax.step, tx)``.
      init: the first carry.
      layers: a tree of floating-point arrays, stacked along their first axis. Nothing
        else may read them.
      state: :func:`as_floats` of the layers' states, each stacked likewise, as by
        ``jax.vmap(tx.init)(layers)``.
      xs: other stacked arrays, or None.
      length, reverse, unroll: as in ``jax.lax.scan``.

    Returns:
      ``(carry, ys)``, as ``jax.lax.scan`` does.

    >>> import functools, jax, jax.numpy as jnp, lowbit_optax
    >>> from lowbit_optax import release
    >>> tx = lowbit_optax.kahan_adamw(0.1)
    >>> update = functools.partial(lowbit_optax.step, tx)
    >>> layers = jnp.stack([jnp.eye(4, dtype=jnp.bfloat16)] * 3)
    >>> def loss_fn(layers, states, x):
    ...     body = lambda x, w, _: (jnp.tanh(x @ w), None)
    ...     x, _ = release.scan(body, update, x, layers, states)
    ...     return jnp.mean(x.astype(jnp.float32) ** 2)
    >>> states = release.as_floats(jax.vmap(tx.init)(layers))
    >>> step = jax.jit(jax.value_and_grad(loss_fn, (0, 1)), donate_argnums=(0, 1))
    >>> loss, (layers, states) = step(layers, states, jnp.ones((2, 4), jnp.bfloat16))
    >>> release.as_state(states).count
    Array([1, 1, 1], dtype=uint32)
    """
    names, arrays, structure = trees.named_leaves(layers)
    count = len(arrays[0])
    one = jax.tree.map(lambda x: jax.eval_shape(lambda: x[0]), (layers, xs))
    converted, closed_over = jax.closure_convert(body, init, *one)

    def with_shared(shared, carry, layer, codes, x):
        del codes
        return converted(carry, structure.unflatten(layer), x, *shared)

    def update_layer(layer, state, gradients, token, index):
        step = lambda old, state: update(old, state, structure.unflatten(gradients))
        with context.one_layer(Layer(index, count, frozenset(names))):
            old = structure.unflatten(layer), state[1]
            new, rest = alone(index, step, *old)
        check_kept("(layer, state)", old, (new, rest))
        return jax.tree.leaves(new), ((), rest), token

    with_codes = FloatState(((), state.floats), state.dtypes)
    how = {"length": length, "reverse": reverse, "unroll": unroll}
    values = closed_over, init, arrays, with_codes, xs, ()
    return released_loop(with_shared, update_layer, *values, (), how)[:2]


def released_loop(
    body: Callable,
    update: Callable,
    shared,
    init,
    layers: list,
    state: FloatState,
    xs,
    token,
    stand_ins,
    how: dict,
):
    """A scan that updates each layer in its backward loop; see :func:`scan`.

    Args:
      body: ``(shared, carry, layer, codes, x) -> (carry, y)``.
      update: ``(layer, (codes, state), gradients, token, index)`` to new ``(layer,
        (codes, state), token)``. An array that it returns unchanged is not
        written.
      shared: arrays that every layer reads.
      init, layers, xs: as in :func:`scan`.
      state: of ``(codes, state)``. Codes are arrays of quantised layers.
      token: is returned unchanged. In the backward loop ``update`` gets its cotangent
        and returns a new one, which the update of the next layer gets.
      stand_ins: shapes of zeros that are appended to ``layers``, for the gradients of
        quantised layers. ``update`` does not get these zeros, only their gradients.
      how: length, reverse and unroll, as in ``jax.lax.scan``.

    Returns:
      ``(carry, ys, token)``.
    """
    read_back = _ReadBack()

    def forward(shared, init, layers, state, xs, token):
        codes, _ = as_state(state)

        def step(carry, inputs):
            layer, codes, x = inputs
            zeros = [jnp.zeros(like.shape, like.dtype) for like in stand_ins]
            function = lambda *args: body(*args[:3], codes, *args[3:])
            out, pull = jax.vjp(function, shared, carry, [*layer, *zeros], x)
            known = jax.tree.leaves((shared, layer, codes, x))
            return out[0], (out[1], read_back.save(pull, out, known))

        carry, (ys, saved) = lax.scan(step, init, (layers, codes, xs), **how)
        return (carry, ys, token), (shared, layers, state, xs, saved)

    def backward(residuals, cotangents):
        shared, layers, state, xs, saved = residuals
        stacks = layers, as_state(state)
        count = len(jax.tree.leaves(stacks)[0])
        ct_carry, ct_ys, token = _without_integers(cotangents)

        def at(index, stacks, early):
            # Copies from host memory begin while the gradients are computed.
            return jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(
                    x, early if is_on_host(x) else index, keepdims=False
                ),
                stacks,
            )

        def step(loop, inputs):
            ct_carry, ct_shared, token, stacks = loop
            early, saved, ct_y, x = inputs
            layer, codes = at(early, (stacks[0], stacks[1][0]), early)
            known = jax.tree.leaves((shared, layer, codes, x))
            found = _without_integers(read_back.pull(saved, known, (ct_carry, ct_y)))
            (more, ct_carry, gradients, ct_x), later = tied((found, early))
            # The layer is read a second time, so that gradients can use the memory of
            # the first copy.
            # XLA's CPU compiler, which drops barriers, would copy whole stacks instead.
            index = lax.platform_dependent(
                early, later, cpu=lambda x, _: x, default=lambda _, x: x
            )
            old = at(index, stacks, early)
            *new, token = update(*old, gradients, token, index)
            put = functools.partial(_put, index)
            stacks = jax.tree.map(put, stacks, old, tuple(new))
            ct_shared = jax.tree.map(jnp.add, ct_shared, more)
            return (ct_carry, ct_shared, token, stacks), ct_x

        zeros = jax.tree.map(jnp.zeros_like, _without_integers(shared))
        (ct_carry, ct_shared, token, (layers, new_state)), ct_xs = lax.scan(
            step,
            (ct_carry, zeros, token, stacks),
            (jnp.arange(count, dtype=jnp.int32), saved, ct_ys, xs),
            **how | {"reverse": not how["reverse"]},
        )
        ct_shared, ct_carry = _like((shared, init), (ct_shared, ct_carry))
        ct_xs = _like(xs, ct_xs)
        return ct_shared, ct_carry, layers, as_floats(new_state), ct_xs, token

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(shared, init, layers, state, xs, token)


def alone(index: jax.Array, update: Callable, *old):
    """Run ``update(*old)`` apart from the reads and writes of stacks around it.

    XLA would fuse these reads and writes with the update. On a GPU, some threads of the
    fusion write a layer's packed words in place while others still read them, and the
    weights become wrong. On GPUs and TPUs, a barrier keeps the reads apart. XLA's CPU
    compiler drops barriers, and would copy whole stacks in every iteration. On CPUs, a
    conditional keeps the reads apart. ``index`` is the number of a layer, which must
    not be negative.
    """

    def branched(index, old):
        return lax.cond(index >= 0, lambda: update(*old), lambda: old)

    direct = lambda _, old: update(*tied(old))
    return lax.platform_dependent(index, old, cpu=branched, default=direct)


def tied(tree):
    """Return the same arrays, and allow no use of one before all have been computed.

    Within ``shard_map``, arrays that vary over the same devices are tied, because JAX
    before 0.12 returns arrays from a barrier that all vary alike.

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


def check_kept(name: str, old, new) -> None:
    """Raise if an update changed the structure of a tree, or a shape or a dtype in it.

    Raises:
      TypeError: naming the path.
    """
    with_path, structure = jax.tree_util.tree_flatten_with_path(old)
    if jax.tree.structure(new) != structure:
        found = jax.tree.structure(new)
        raise TypeError(
            f"release: the update must keep the structure of {name}, {structure}; it "
            f"returns {found}"
        )
    for (path, x), y in zip(with_path, jax.tree.leaves(new), strict=True):
        was, made = jax.typeof(x), jax.typeof(y)
        if (was.shape, was.dtype) != (made.shape, made.dtype):
            raise TypeError(
                f"release: the update makes {made.str_short()} of "
                f"{name}{jax.tree_util.keystr(path)}, which is {was.str_short()}; "
                "an update must keep shapes and dtypes"
            )


class _ReadBack:
    """Finds arrays that a layer's backward pass needs and that exist anyway.

    The backward loop reads these again. The others the forward loop saves in stacks.
    """

    def save(self, pull, out, known: list) -> list:
        """The arrays of the function ``pull`` that the forward loop has to save."""
        leaves, self._structure = jax.tree.flatten(pull)
        self._out = jax.tree.map(jax.typeof, out)
        numbers = lambda x: (n for n, each in enumerate(known) if each is x)
        self._origins = [next(numbers(leaf), None) for leaf in leaves]
        pairs = zip(leaves, self._origins, strict=True)
        return [x for x, number in pairs if number is None]

    def pull(self, saved: list, known: list, cotangents):
        """The function's results, from the arrays that the backward loop has."""
        rest = iter(saved)
        leaves = [next(rest) if n is None else known[n] for n in self._origins]
        return self._structure.unflatten(leaves)(_like(self._out, cotangents))


def _without_integers(tree):
    """A tree with None for integers, which have no derivative, and for their zeros."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: x if is_float(x) else None, tree)


def _like(primals, cotangents):
    """Cotangents of these primals, with JAX's zeros where there is None."""
    zero = lambda x: np.zeros(jnp.shape(x), jax.dtypes.float0)
    return jax.tree.map(
        lambda x, ct: zero(x) if ct is None else ct, primals, cotangents
    )


def _put(index, stack, old, new):
    """The stack with a new layer, if it is another one than before."""
    if new is old:
        return stack
    return lax.dynamic_update_index_in_dim(stack, new, index, 0)
