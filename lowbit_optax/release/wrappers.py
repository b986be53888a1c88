"""Two ``jax.custom_vjp`` wrappers whose backward rules run the optimizer.

::

    released   (params, activations) pass through; their cotangents come back, and
               the rule returns new parameters as the cotangents of the old ones
    scan       lax.scan over layers, whose backward loop updates each layer

JAX differentiates everything else.
"""

import typing
from collections.abc import Callable

import jax

from lowbit_optax._step import trees
from lowbit_optax.release.barriers import alone, tied
from lowbit_optax.release.float_state import FloatState, as_floats, as_state
from lowbit_optax.release.loop import Operands, ReleasedLoop

Update = Callable[[typing.Any, typing.Any, typing.Any], tuple]


def released(update: Update, params, state: FloatState, activations):
    """Return the inputs unchanged, and update parameters in the backward pass.

    Use the returned parameters wherever the loss needs them, and pass the returned
    activations to the layer. When the backward rule of this function runs, the gradient
    is complete, and the old parameters are no longer needed. The rule calls ``update``
    and returns new values instead of cotangents:

        d loss / d params = new params,    d loss / d state = new state

    Barriers keep the compiler from postponing the update, so that only one gradient
    exists at a time.

    Args:
      update: a function ``(params, state, gradients) -> (params, state)``, such as
        ``functools.partial(lowbit_optax.step, tx)``.
      params: a tree of floating-point arrays.
      state: the optimizer state of these parameters, converted with :func:`as_floats`.
      activations: a tree of the arrays that the layer reads. If no gradient flows
        through the results, ``update`` is not called, and the cotangents are zeros.

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
        # Without this barrier, XLA would keep every gradient until the end.
        return (params, tied(activations)), (params, state)

    def backward(saved, cotangents):
        params, state = saved
        # Cotangents of earlier layers depend on the old parameters, and must be
        # computed before the parameters are overwritten.
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
    """Run ``jax.lax.scan`` over layers, and update each layer in the backward loop.

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
      layers: a tree of floating-point arrays, stacked along their first axis. No other
        part of the loss may read them.
      state: the states of the layers, stacked along their first axis, and converted
        with :func:`as_floats`, such as ``as_floats(jax.vmap(tx.init)(layers))``.
      xs: other stacked arrays, or None.
      length, reverse, unroll: as in ``jax.lax.scan``.

    Returns:
      ``(carry, ys)``, like ``jax.lax.scan``.

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
    one = jax.tree.map(lambda x: jax.eval_shape(lambda: x[0]), (layers, xs))
    converted, closed_over = jax.closure_convert(body, init, *one)

    def with_shared(shared, carry, layer, codes, x):
        del codes
        return converted(carry, structure.unflatten(layer), x, *shared)

    def update_layer(layer, state, gradients, token):
        step = lambda old, state: update(old, state, structure.unflatten(gradients))
        old = structure.unflatten(layer), state[1]
        new, rest = alone(step, *old)
        check_kept("(layer, state)", old, (new, rest))
        return jax.tree.leaves(new), ((), rest), token

    with_codes = FloatState(((), state.floats), state.dtypes)
    how = {"length": length, "reverse": reverse, "unroll": unroll}
    loop = ReleasedLoop(with_shared, update_layer, names, how)
    return loop(Operands(closed_over, init, arrays, with_codes, xs))[:2]


def check_kept(name: str, old, new) -> None:
    """Check that an update kept a tree's structure, shapes and dtypes.

    Raises:
      TypeError: if it did not. The message names the leaf.
    """
    with_path, structure = jax.tree_util.tree_flatten_with_path(old)
    if jax.tree.structure(new) != structure:
        found = jax.tree.structure(new)
        raise TypeError(
            f"release: update must return {name} with its structure, {structure}, got "
            f"{found}"
        )
    for (path, x), y in zip(with_path, jax.tree.leaves(new), strict=True):
        was, made = jax.typeof(x), jax.typeof(y)
        if (was.shape, was.dtype) != (made.shape, made.dtype):
            raise TypeError(
                "release: update must keep shapes and dtypes, but "
                f"{name}{jax.tree_util.keystr(path)} was {was.str_short()} and became "
                f"{made.str_short()}"
            )
