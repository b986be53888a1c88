"""``lowbit``: any optax transformation on low-precision parameters.

How a step works is in :mod:`lowbit_optax._step.engine`.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import apply_leaf
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.moments import Moments
from lowbit_optax.formats import block_quantized, extra_bits
from lowbit_optax.formats.base import MomentFormat, WeightFormat


class LowbitTransformation(optax.GradientTransformationExtraArgs):
    """What :func:`lowbit` returns: ``init`` and ``update``, and what made them.

    Args:
      init, update: as in optax.
      config: the :class:`Lowbit` behind them, for :func:`step` and for reports.
    """

    config: Lowbit

    def __new__(cls, init, update, config):
        self = super().__new__(cls, init, update)
        self.config = config
        return self


def lowbit(
    inner: optax.GradientTransformation,
    *,
    weights: WeightFormat | None = None,
    moments: Moments = None,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> LowbitTransformation:
    """Run an optax transformation in float32 on parameters kept in fewer bits.

    The inner transformation sees float32 masters and float32 gradients, so weight
    decay and schedules work as in float32 training. Leaves in bfloat16, float16 and
    float8 are held by ``weights``; float32 and other leaves pass through.

    Put other transformations inside (``lowbit(optax.chain(clip, adamw))``): what comes
    after ``lowbit`` in a chain would change the updates that land exactly. Wrappers
    that demand updates in the gradients' dtype, such as ``optax.apply_if_finite``, go
    inside as well. Non-finite gradients do what they do in the inner transformation.

    Args:
      inner: any optax transformation.
      weights: format of the parameters; ``extra_bits(16)``, float32's bits, if None.
      moments: format of the moments: one for all, or a mapping from state field
        (``mu``, ``nu``, ``trace``) to format; what is left out stays float32.
      seed: of stochastic rounding, 0 if None.
      min_size: leaves with fewer elements keep a float32 master instead of packed bits;
        4096 if None.
      implementation: ``"xla"``; ``"pallas"``, one fused kernel a leaf, an error where
        that cannot be, interpreted (slowly) on other platforms than CUDA; or None, the
        kernels on CUDA for the leaves that can have one, and XLA elsewhere.

    Returns:
      A transformation whose ``update`` needs ``params`` and returns float32 updates
      for the held leaves.

    Raises:
      TypeError, ValueError: for arguments that are not as above.

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> tx = lowbit(optax.adamw(1e-3), weights=lowbit_optax.kahan())
    >>> state = tx.init(params)
    >>> grads = {"w": jnp.full((64, 64), 0.1, jnp.bfloat16)}
    >>> updates, state = tx.update(grads, state, params)
    >>> optax.apply_updates(params, updates)["w"].dtype
    dtype(bfloat16)
    """
    weights = extra_bits(8) if weights is None else weights
    if not isinstance(weights, WeightFormat):
        raise TypeError(
            f"lowbit: weights is {weights!r}, not a weight format such as "
            "lowbit_optax.kahan() or lowbit_optax.extra_bits(8)"
        )
    moments = _stub(moments)
    formats = moments.values() if isinstance(moments, Mapping) else [moments]
    for format_ in formats:
        if not isinstance(format_, MomentFormat) and moments is not None:
            raise TypeError(
                f"lowbit: moments has {format_!r}, not a moment format such as "
                "lowbit_optax.cast(jnp.bfloat16)"
            )
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(
            f"lowbit: implementation is {implementation!r}, not None, 'xla' or 'pallas'"
        )
    config = Lowbit(
        optax.with_extra_args_support(inner),
        weights,
        moments,
        _static_int("seed", seed, 0),
        _static_int("min_size", min_size, 4096),
        implementation,
    )
    return LowbitTransformation(config.init, config.update, config)


def step(
    tx: optax.GradientTransformation,
    params: optax.Params,
    state: optax.OptState,
    grads: optax.Updates,
    **extra_args,
) -> tuple[optax.Params, optax.OptState]:
    """One optimizer step, params to params: the fast path past ``apply_updates``.

    For a transformation made by :func:`lowbit` (the aliases included) no difference of
    parameters is formed. Any other transformation is updated and applied as usual.

    Args:
      tx: an optax transformation.
      params: tree of parameters.
      state: ``tx``'s state.
      grads: tree of gradients, any float dtype.
      **extra_args: for ``tx.update``.

    Returns:
      ``(params, state)``.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = jnp.ones(4, jnp.bfloat16)
    >>> tx = lowbit_optax.kahan_sgd(0.5)
    >>> params, state = step(tx, params, tx.init(params), jnp.ones(4))
    >>> params
    Array([0.5, 0.5, 0.5, 0.5], dtype=bfloat16)
    """
    if isinstance(tx, LowbitTransformation):
        return tx.config.step(grads, state, params, **extra_args)
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(grads, state, params, **extra_args)
    return apply_updates(params, updates), state


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """``optax.apply_updates`` that also takes float8 and strict dtype promotion.

    Args:
      params: tree of parameters; None leaves stay None.
      updates: tree of the same structure.

    Returns:
      ``params + updates``, rounded to nearest in each parameter's dtype.

    >>> import jax.numpy as jnp
    >>> apply_updates(jnp.float8_e4m3fn(1.0), jnp.float32(0.3))
    Array(1.25, dtype=float8_e4m3fn)
    """

    def apply(param, update):
        if param is None or not is_narrow(jnp.asarray(param).dtype):
            return optax.apply_updates(param, update)
        return apply_leaf(param, update)

    return jax.tree.map(apply, params, updates, is_leaf=lambda x: x is None)


def _stub(moments):
    if moments is None:
        return block_quantized(8)
    if isinstance(moments, Mapping):
        return {k: v for k, v in moments.items() if v != "float32"}
    return None if isinstance(moments, str) and moments == "float32" else moments


def _static_int(name: str, value, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"lowbit: {name} is {value!r}, and must be a static int; under "
            "optax.inject_hyperparams name it in static_args"
        )
    if not 0 <= value < 2**32:
        raise ValueError(f"lowbit: {name} is {value}; accepted are 0 to 2**32 - 1")
    return value
