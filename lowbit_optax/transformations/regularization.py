"""``regularize`` differentiates a penalty on the weights in float32."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._arguments import check_type
from lowbit_optax._step import trees


def regularize(
    penalty: Callable[[typing.Any], jax.Array],
) -> optax.GradientTransformationExtraArgs:
    """Add the gradient of a penalty on the parameters to the gradients of the loss.

        g_t = grads + d penalty(W_{t-1}) / dW

    Inside ``lowbit``, W are the float32 masters and gradients are float32, so the
    penalty keeps small values that float16 or bfloat16 would lose. For
    QuantizedTensors, W are the dequantized values. Outside of ``lowbit``, W are the
    parameters.

    Put it first in the chain if clipping and moments should see the penalty. Put a loss
    scale around ``lowbit``, which unscales gradients before the penalty is added. For
    decoupled weight decay, use ``optax.add_decayed_weights``. A penalty that is a sum
    over elements is computed inside the kernels.

    Args:
      penalty: a function from a tree of float32 masters to a scalar, which may select
        leaves. Integers, booleans and PRNG keys are constants.

    Returns:
      An optax transformation without state, for ``optax.chain``.

    Raises:
      TypeError: if ``penalty`` is not callable, or, in ``update``, if it does not
        return a float scalar.
      ValueError: if ``update`` is called without params.

    References:
      OpenSeq2Seq, "Mixed Precision Training", mp_regularizer_wrapper.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> l1 = lambda params: 2.0**-20 * jnp.sum(jnp.abs(params))
    >>> inner = optax.chain(regularize(l1), optax.sgd(1.0))
    >>> tx = lowbit_optax.lowbit(inner, weights=lowbit_optax.extra_bits())
    >>> w = jnp.ones((64, 64), jnp.bfloat16)
    >>> w, state = lowbit_optax.step(tx, w, tx.init(w), jnp.zeros_like(w))
    >>> print(1 - lowbit_optax.master_weights(w, state)[0, 0] == 2.0**-20)
    True
    """
    accepted = "a function of the parameters"
    check_type("regularize: penalty", penalty, Callable, accepted)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError("regularize: update needs params as its third argument")
        return _added(updates, _gradients(penalty, params)), state

    init = lambda params: optax.EmptyState()
    return optax.GradientTransformationExtraArgs(init, update)


def _gradients(penalty: Callable, params):
    """Return the gradients of the penalty, and None for constant leaves."""
    leaves, treedef = jax.tree.flatten(params)
    variables = {i: x for i, x in enumerate(leaves) if trees.is_inexact(x)}

    def of_variables(variables):
        together = (variables.get(i, x) for i, x in enumerate(leaves))
        value = penalty(treedef.unflatten(together))
        is_float = jnp.issubdtype(jnp.result_type(value), jnp.floating)
        if jnp.shape(value) or not is_float:
            raise TypeError(
                "regularize: the penalty must return a float scalar, got "
                f"{jax.typeof(value)}"
            )
        return value

    # The gradient of JAX is the conjugate of the direction in which a penalty grows.
    gradients = jax.tree.map(jnp.conj, jax.grad(of_variables)(variables))
    return treedef.unflatten(gradients.get(i) for i in range(len(leaves)))


def _added(updates, gradients):
    """Return updates plus gradients in the dtypes of the updates."""
    add = lambda x, g: x if g is None else x + g.astype(x.dtype)
    return jax.tree.map(add, updates, gradients, is_leaf=lambda x: x is None)
