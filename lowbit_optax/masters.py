"""Float32 masters out of a training state, and a training state out of masters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax import trees
from lowbit_optax.engine import LowbitState
from lowbit_optax.float_layouts import is_narrow
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.plain import NoResidual
from lowbit_optax.rounding import round_nearest, to_float32


def master_weights(params: optax.Params, state: optax.OptState) -> optax.Params:
    """The float32 weights that training is about, for evaluation or export.

    Args:
      params: tree of parameters.
      state: the optimizer state that goes with them; any state that contains those of
        :func:`lowbit_optax.lowbit`, so also a chain's, a partition's or MultiSteps'.

    Returns:
      A tree like ``params``: float32 where a weight format holds the leaf, unchanged
      elsewhere.

    Raises:
      ValueError: if ``state`` holds no lowbit state, or one of other parameters.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = jnp.ones(3, jnp.bfloat16)
    >>> tx = lowbit_optax.kahan_sgd(1.0)
    >>> grads = jnp.full(3, 2.0**-12)
    >>> params, state = lowbit_optax.step(tx, grads, tx.init(params), params)
    >>> params, master_weights(params, state)
    (Array([1, 1, 1], dtype=bfloat16),
     Array([0.99975586, 0.99975586, 0.99975586], dtype=float32))
    """
    names, leaves, treedef = trees.named_leaves(params)
    held = _held(names, leaves, state)
    return treedef.unflatten(
        [
            held[name][0].join(leaf, held[name][1]) if name in held else leaf
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
    state = tx.init(params)
    names, leaves, treedef = trees.named_leaves(params)
    masters = dict(zip(names, treedef.flatten_up_to(master), strict=True))
    held = _held(names, leaves, state)
    # Formats that store an unsigned residual need a parameter rounded toward zero.
    params = treedef.unflatten(
        [
            held[name][0].round(masters[name], leaf.dtype, _ToNearest())
            if name in held
            else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
    )
    by_name = dict(zip(names, treedef.flatten_up_to(params), strict=True))

    def replace(part):
        if not isinstance(part, LowbitState) or isinstance(part.residual, NoResidual):
            return part

        def residual(path, old):
            name = jax.tree_util.keystr(path)
            format_ = type(part.residual).format_of(by_name[name], old)
            return format_.residual(masters[name], by_name[name], _ToNearest())

        tree = jax.tree_util.tree_map_with_path(residual, part.residual[0])
        return part._replace(residual=type(part.residual)(tree))

    return params, jax.tree.map(replace, state, is_leaf=_is_lowbit)


class _ToNearest:
    """Random bits with which a stochastic split rounds to nearest."""

    def words(self, shape, stream=0):
        del stream
        return jnp.full(shape, 0x80000000, jnp.uint32)


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
            held[name] = (container.format_of(params[name], residual), residual)
    return held


def _is_lowbit(x) -> bool:
    return isinstance(x, LowbitState)
