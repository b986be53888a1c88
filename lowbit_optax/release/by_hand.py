"""Training steps for losses that open their layers themselves.

The loss receives a :class:`Handle` instead of the parameters of each layer. Only
:func:`released` and :func:`scan` open it, so that no other operation reads parameters
that the backward pass overwrites.
"""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import get_opaque_trace_state

from lowbit_optax._arguments import check_transformation
from lowbit_optax._step import trees
from lowbit_optax._types import Function, OptState, Params, PyTree
from lowbit_optax.formats.quantized_tensor import NotAnArray
from lowbit_optax.loss_scaling.transformation import LossScaleState
from lowbit_optax.release import wrappers
from lowbit_optax.release.api import named_after
from lowbit_optax.release.plan import loss_scaled
from lowbit_optax.release.traced_loss import check_params, check_result
from lowbit_optax.release.wrappers import FloatState, as_floats, as_state
from lowbit_optax.transformations.step import step


def value_and_update_layers(
    loss_fn: Function, tx: optax.GradientTransformation, *, has_aux: bool = False
) -> Callable[
    typing.Concatenate[Params, OptState, ...], tuple[typing.Any, Params, OptState]
]:
    """Return a training step for a loss that opens its layers with :func:`released`.

    Use it instead of :func:`value_and_update` to decide yourself which parameters are
    updated together, and when. The parameters are a list or dictionary of layers, and
    each layer has a state of its own::

        layer, state = step(tx, layer, state, gradient of the layer)

    ``loss_fn`` receives handles instead of the layers. :func:`released` and
    :func:`scan` open a handle. Everything else that reads it raises an error, so that
    the loss cannot use parameters after the backward pass has overwritten them.

    Args:
      loss_fn: a function ``(params, *args, **kwargs) -> loss`` that returns a real
        scalar or ``(loss, aux)``.
      tx: an optax transformation, which updates each layer on its own.
      has_aux: if True, ``loss_fn`` returns ``(loss, aux)``.

    Returns:
      A function ``(params, opt_state, *args, **kwargs) -> (value, params, opt_state)``.
      The entries of ``params`` are layers, which may be trees of arrays. In
      ``opt_state``, ``tx.init(layer)`` replaces each layer, or for the stacked layers
      of :func:`scan`, ``jax.vmap(tx.init)(layer)``. Layers without a gradient, such as
      layers before a ``stop_gradient``, keep their parameters and state.

    Raises:
      ValueError: if ``tx`` has a loss scale; when the step is called, if ``opt_state``
        does not match ``params``, if a layer is opened inside a transformed function,
        such as the body of ``jax.checkpoint`` or ``jax.lax.scan``, or more than once.
      TypeError: if ``loss_fn`` uses a layer that is not open; see also
        :func:`value_and_update`.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> from lowbit_optax import release
    >>> def loss_fn(layers, x):
    ...     for layer in layers:
    ...         w, x = release.released(layer, x)
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x.astype(jnp.float32) ** 2)
    >>> tx = lowbit_optax.kahan_adamw(0.1)
    >>> layers = [jnp.eye(4, dtype=jnp.bfloat16) for _ in range(2)]
    >>> states = [tx.init(layer) for layer in layers]
    >>> train_step = jax.jit(
    ...     release.value_and_update_layers(loss_fn, tx), donate_argnums=(0, 1)
    ... )
    >>> x = jnp.ones((2, 4), jnp.bfloat16)
    >>> loss, layers, states = train_step(layers, states, x)
    >>> states[0].count
    Array(1, dtype=uint32)
    """
    check_transformation("release", "tx", tx)
    _check_unscaled(loss_scaled(tx) is not None)

    def with_update(params, opt_state, *args, **kwargs):
        _check_unscaled(bool(trees.all_of(LossScaleState, opt_state)))
        check_params(params, accepts_quantized=False)
        is_layer = lambda x: x is not params
        with_path, structure = jax.tree_util.tree_flatten_with_path(params, is_layer)
        names = [jax.tree_util.keystr(path) for path, _ in with_path]
        what = "release: opt_state, which has tx.init(layer) for each layer,"
        states = trees.parts_of(names, structure, opt_state, what)
        layers: list = [layer for _, layer in with_path]
        handles: list[Handle] = []

        def function(floats):
            handles.extend(map(functools.partial(Handle, tx), names, floats))
            result = loss_fn(structure.unflatten(handles), *args, **kwargs)
            check_result(result, has_aux)
            return result[0] if has_aux else result, result

        each = zip(names, layers, states, strict=True)
        floats = [as_floats(({name: layer}, state)) for name, layer, state in each]
        loss, pull, value = jax.vjp(function, floats, has_aux=True)
        (new,) = pull(jnp.ones_like(loss))
        # The cotangents of a layer without a gradient are zeros.
        for n, handle in enumerate(handles):
            if handle._is_updated:
                of_layer, states[n] = as_state(new[n])
                layers[n] = of_layer[names[n]]
        return value, structure.unflatten(layers), structure.unflatten(states)

    return named_after(loss_fn, with_update)


def _check_unscaled(is_scaled: bool) -> None:
    if is_scaled:
        raise ValueError(
            "release: value_and_update_layers does not support with_loss_scale; use "
            "value_and_update, which scales the loss"
        )


class Handle(NotAnArray):
    """The handle of a layer, which only :func:`released` and :func:`scan` open.

    Args:
      tx: the transformation that updates the layer.
      name: the path of the layer.
      floats: the parameters, keyed by the path of the layer, and their state.
    """

    def __init__(self, tx, name: str, floats: FloatState):
        self._tx, self._name, self._floats = tx, name, floats
        self._trace = get_opaque_trace_state()
        self._is_open = self._is_updated = False

    def _refusal(self, what: str) -> str:
        return (
            f"release: params{self._name} is a handle that {what}. Open it once in "
            "loss_fn with release.released or release.scan, outside of jax.jit, "
            "jax.checkpoint and other transformed functions, and use what they return"
        )

    def _update(self, old: tuple, gradients, token) -> tuple:
        self._is_updated = True
        params, state = old
        # Integers have no gradient.
        either = lambda x, grad: grad if trees.is_inexact(x) else jnp.zeros_like(x)
        gradients = jax.tree.map(either, params, gradients)
        update = functools.partial(step, self._tx)
        arguments = params[self._name], state, gradients[self._name]
        wrappers.check_reduced(update, *arguments)
        new, new_state = update(*arguments)
        return ({self._name: new}, wrappers.kept(state, new_state)), token

    def _open(self) -> FloatState:
        is_inside = get_opaque_trace_state() != self._trace
        if is_inside or self._is_open:
            how = "inside a transformed function" if is_inside else "twice"
            raise ValueError(self._refusal(f"was opened {how}"))
        self._is_open = True
        return self._floats


jax.tree_util.register_pytree_node(Handle, Handle._refuse, Handle._refuse)


def released(layer: PyTree, activations: PyTree) -> tuple[PyTree, PyTree]:
    """Open a layer, which the backward pass updates once its gradient is complete.

    Pass the activations that the layer reads, and use the returned ones. When the
    backward pass is past this call, the gradient of the layer is complete. The pass
    then updates the layer in place, and frees the gradient. Barriers keep the compiler
    from postponing the update.

    Args:
      layer: a handle from :func:`value_and_update_layers`. Arrays are returned
        unchanged, so that you can evaluate the loss with ordinary parameters.
      activations: a tree of arrays.

    Returns:
      ``(params, activations)``: the parameters of the layer, and equal activations.

    Raises:
      ValueError: see :func:`value_and_update_layers`.

    >>> import jax.numpy as jnp, optax
    >>> def loss_fn(params, x):
    ...     w, x = released(params["dense"], x)
    ...     return jnp.sum(x * w)
    >>> tx, params, x = optax.sgd(0.5), {"dense": jnp.ones(2)}, jnp.ones(2)
    >>> state = {"dense": tx.init(params["dense"])}
    >>> _, params, state = value_and_update_layers(loss_fn, tx)(params, state, x)
    >>> loss_fn(params, x)
    Array(1., dtype=float32)
    """
    if not isinstance(layer, Handle):
        jax.tree.leaves(layer)  # raises an error if it contains a handle
        return layer, activations

    floats = layer._open()
    params, _ = as_state(floats)
    opened = wrappers.released(layer._update, params, floats, (), activations)
    return opened[0][layer._name], opened[2]


def scan(
    body: Function,
    init: PyTree,
    layers: PyTree,
    xs: PyTree = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[PyTree, PyTree]:
    """Run ``jax.lax.scan`` over layers, and update each layer in the backward loop.

    The backward loop carries the stacked parameters and their state. For each layer it
    computes the gradients, updates the layer, and overwrites the old layer with the new
    one.

    Args:
      body: a function ``(carry, layer, x) -> (carry, y)``, which receives the arrays of
        one layer. Wrap it in ``jax.checkpoint`` to recompute a layer's activations in
        the backward loop.
      init: the first carry.
      layers: a handle from :func:`value_and_update_layers`, whose arrays are stacked
        along their first axis. Arrays are scanned over without updates.
      xs: other stacked arrays, or None.
      length, reverse, unroll: as in ``jax.lax.scan``.

    Returns:
      ``(carry, ys)``, like ``jax.lax.scan``.

    Raises:
      ValueError: if the state is not stacked; see also :func:`value_and_update_layers`.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> from lowbit_optax import release
    >>> def loss_fn(params, x):
    ...     body = lambda x, w, _: (jnp.tanh(x @ w), None)
    ...     x, _ = release.scan(body, x, params["layers"])
    ...     return jnp.mean(x.astype(jnp.float32) ** 2)
    >>> tx = lowbit_optax.kahan_adamw(0.1)
    >>> params = {"layers": jnp.stack([jnp.eye(4, dtype=jnp.bfloat16)] * 3)}
    >>> states = {"layers": jax.vmap(tx.init)(params["layers"])}
    >>> train_step = jax.jit(release.value_and_update_layers(loss_fn, tx))
    >>> x = jnp.ones((2, 4), jnp.bfloat16)
    >>> loss, params, states = train_step(params, states, x)
    >>> states["layers"].count
    Array([1, 1, 1], dtype=uint32)
    """
    how = {"length": length, "reverse": reverse, "unroll": unroll}
    if not isinstance(layers, Handle):
        run = lambda carry, inputs: body(carry, *inputs)
        return lax.scan(run, init, (layers, xs), **how)
    floats = layers._open()
    params, state = as_state(floats)
    params = params[layers._name]
    depths = {x.shape[:1] for x in jax.tree.leaves(state)}
    if depths - {x.shape[:1] for x in jax.tree.leaves(params)[:1]}:
        raise ValueError(
            f"release: the state of params{layers._name} must be stacked, like "
            "jax.vmap(tx.init)(layers), because release.scan updates each layer"
        )
    one = jax.tree.map(lambda x: jax.eval_shape(lambda: x[0]), (params, xs))
    converted, shared = jax.closure_convert(body, init, *one)

    def with_shared(shared, carry, layer, stand_ins, x):
        del stand_ins
        return converted(carry, layer[layers._name], x, *shared)

    def update(old, gradients, token):
        run = lambda *old: layers._update(old, gradients, ())[0]
        return wrappers.alone(run, *old), token

    loop = wrappers.ReleasedLoop(with_shared, update, trees.by_path(params), how)
    return loop(shared, init, floats, xs, ())[:2]
