"""``ema_of_params``: a low-bit exponential moving average of the weights."""

import math
import typing

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._arguments import check_number
from lowbit_optax._step import trees
from lowbit_optax.formats import extra_bits
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.transformations.lowbit import lowbit
from lowbit_optax.transformations.options import Options, takes_options


class EmaOfParamsState(typing.NamedTuple):
    """State of :func:`ema_of_params`, in ``LowbitState.inner_state``.

    Args:
      count: int32 scalar, the number of averaged steps.
    """

    # optax uses this name, which is also a method of tuples.
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]


@takes_options
def ema_of_params(
    decay: float,
    *,
    debias: bool = True,
    weights: WeightFormat | None = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """Keep an exponential moving average of the weights in a weight format.

        e_t = e_{t-1} + r_t (w_t - e_{t-1}),  r_t = (1 - decay) / (1 - decay^t)

    With ``debias=False``, ``r_t = 1 - decay``. The average is a separate
    transformation: its parameters are the averages e, and you pass the weights w
    instead of gradients::

        average, ema_state = lowbit_optax.step(ema, average, ema_state, weights)

    Therefore, ``from_master``, ``master_weights``, ``convert``, ``state_shardings``,
    ``memory_report``, donation and kernels also support averages. ``average`` has the
    dtypes of the parameters, so you can evaluate the model with it. A plain bfloat16
    average would not move: with a decay of 0.9999, a step is 1e-4 of ``w - e``, and
    bfloat16 loses steps below half a unit in the last place of e.

    Args:
      decay: the decay rate, at least 0 and below 1.
      debias: if True, the first average passed to ``init`` has no weight, as in
        optax's ``ema(debias=True)``. If False, it keeps the weight ``decay^t``.
      weights: format for the average. If None,
        ``extra_bits(8, sum_rounding="stochastic")``, which adds 1 byte per parameter.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`. The default
        seed differs from the default seed of optimizers.

    Returns:
      An optax transformation. Pass the first average to ``init``, such as a copy of the
      parameters. Instead of gradients, pass weights in any float dtype to ``step`` or
      ``update``: ``master_weights(params, state)``, or the parameters, which adds their
      rounding errors to the average. Leaves that are not floating-point do not change.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> ema = ema_of_params(0.9999, debias=False)
    >>> average = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> state = ema.init(average)
    >>> weights = {"w": jnp.full((64, 64), 1.5)}
    >>> average, state = lowbit_optax.step(ema, average, state, weights)
    >>> moved = lowbit_optax.master_weights(average, state)["w"].mean() - 1
    >>> round(float(moved), 5)  # 1e-4 of 0.5; bfloat16 stays at 1
    5e-05
    """
    accepted = "a number from 0 to below 1"
    check_number("ema_of_params", "decay", decay, lambda x: 0 <= x < 1, accepted)
    if weights is None:
        weights = extra_bits(8, sum_rounding="stochastic")
    if options.get("seed") is None:
        # The optimizer may start from the same parameters, with 0 as its seed.
        options["seed"] = 0x656D61
    inner = _towards_gradients(decay, debias)
    return lowbit(inner, weights=weights, moments="float32", **options)


def _towards_gradients(decay: float, debias: bool) -> optax.GradientTransformation:
    """Returns a transformation that moves parameters towards the gradients."""
    # Python computes in float64. In float32, 1 - 0.9999 has a relative error of 2e-4.
    rate, log_decay = 1 - decay, math.log(decay) if decay else -math.inf

    def init(params):
        del params
        return EmaOfParamsState(jnp.zeros([], jnp.int32))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("ema_of_params: update needs params, the averages")
        count = jnp.asarray(optax.safe_increment(state.count))
        r = jnp.float32(rate)
        if debias:
            r = r / -jnp.expm1(count.astype(jnp.float32) * jnp.float32(log_decay))

        def towards(weight, average):
            if not trees.is_inexact(average):
                return jnp.zeros_like(average)
            return r.astype(average.dtype) * (weight.astype(average.dtype) - average)

        return jax.tree.map(towards, updates, params), EmaOfParamsState(count)

    return optax.GradientTransformation(init, update)
