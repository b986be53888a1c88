"""Float32 masters out of a training state, and a training state out of masters."""

import jax
import numpy as np
import optax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.rounding import round_nearest, to_float32
from lowbit_optax._step import context, trees
from lowbit_optax._step.engine import LowbitState, ToNearest
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.leaves import join_leaf
from lowbit_optax.formats.plain import NoResidual
from lowbit_optax.lpmm import dequantize


def master_weights(params: optax.Params, state: optax.OptState) -> optax.Params:
    """The float32 weights that training is about, for evaluation or export.

    Args:
      params: tree of parameters.
      state: the optimizer state that goes with them; any state that contains those of
        :func:`lowbit_optax.lowbit`, so also a chain's, a partition's or MultiSteps'.

    Returns:
      A tree like ``params``: float32 where a weight format holds the leaf and in the
      places of QuantizedTensors, unchanged elsewhere.

    Raises:
      ValueError: if ``state`` holds no lowbit state, or one of other parameters.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = jnp.ones(3, jnp.bfloat16)
    >>> tx = lowbit_optax.kahan_sgd(1.0)
    >>> grads = jnp.full(3, 2.0**-12)
    >>> params, state = lowbit_optax.step(tx, params, tx.init(params), grads)
    >>> params, master_weights(params, state)
    (Array([1, 1, 1], dtype=bfloat16),
     Array([0.99975586, 0.99975586, 0.99975586], dtype=float32))
    """
    names, leaves, treedef = trees.named_leaves(dequantize(params))
    held = _held(names, leaves, state)
    return treedef.unflatten(
        [
            join_leaf(held[name][0], leaf, held[name][1]) if name in held else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
    )


def from_master(
    tx: optax.GradientTransformation, master: optax.Params, dtypes
) -> tuple[optax.Params, optax.OptState]:
    """Start training from float32 weights without losing their low bits.

    Args:
      tx: a transformation made by :func:`lowbit_optax.lowbit`, alone or inside optax's
        wrappers.
      master: tree of float32 weights.
      dtypes: the parameters' dtype, or a tree of dtypes that is a prefix of
        ``master``. Leaves that are not floating-point keep theirs.

    Returns:
      ``(params, state)``: ``tx.init``'s state, with the residuals of ``master``.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> tx = lowbit_optax.extra_bits_sgd(0.1)
    >>> params, state = from_master(tx, {"w": jnp.float32(0.1)}, jnp.bfloat16)
    >>> params["w"], master_weights(params, state)["w"]
    (Array(0.100098, dtype=bfloat16), Array(0.1, dtype=float32))
    """
    is_none = lambda x: x is None
    spread = jax.tree.map(
        lambda dtype, part: jax.tree.map(lambda _: np.dtype(dtype), part),
        dtypes,
        master,
        is_leaf=is_none,
    )
    params = jax.tree.map(_rounded, master, spread)
    names, leaves, treedef = trees.named_leaves(params)
    masters = dict(zip(names, treedef.flatten_up_to(master), strict=True))
    held = _held(names, leaves, jax.eval_shape(tx.init, params))
    # Formats that store an unsigned residual need a parameter rounded toward zero.
    params = treedef.unflatten(
        [
            held[name][0].round(to_float32(masters[name]), leaf.dtype, ToNearest())
            if name in held
            else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
    )
    with context.initial_masters({name: to_float32(masters[name]) for name in held}):
        return params, tx.init(params)


def _rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    if not trees.is_float(x):
        return x
    return round_nearest(to_float32(x), dtype) if is_narrow(dtype) else x.astype(dtype)


def _held(names, leaves, state) -> dict[str, tuple[WeightFormat, jax.Array | None]]:
    """Format and residual of every leaf that a lowbit state in ``state`` holds."""
    states = [
        part
        for part in jax.tree.leaves(state, is_leaf=_is_lowbit)
        if isinstance(part, LowbitState)
    ]
    if not states:
        raise ValueError(
            "no LowbitState in this optimizer state; was it made by a lowbit_optax "
            "transformation?"
        )
    params = dict(zip(names, leaves, strict=True))
    held = {
        name: (NoResidual.format_of(leaf, None), None)
        for name, leaf in params.items()
        if is_narrow(getattr(leaf, "dtype", np.dtype(bool)))
    }
    for part in states:
        container = type(part.residual)
        if container is NoResidual:
            continue
        for name, residual in zip(
            *trees.named_leaves(part.residual[0])[:2], strict=True
        ):
            if name not in held:
                raise ValueError(
                    f"the state has a residual for params{name}, which is "
                    f"{getattr(params.get(name), 'dtype', 'not there')}; do params and "
                    "state belong together?"
                )
            format_ = container.format_of(params[name], residual)
            want = jax.eval_shape(format_.init, _abstract(params[name]))
            if (residual.shape, residual.dtype) != (want.shape, want.dtype):
                raise ValueError(
                    f"the residual of params{name} is {residual.dtype}"
                    f"{list(residual.shape)}, which does not fit its "
                    f"{params[name].dtype}{list(params[name].shape)}; do params and "
                    "state belong together?"
                )
            held[name] = (format_, residual)
    return held


def _abstract(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _is_lowbit(x) -> bool:
    return isinstance(x, LowbitState)
