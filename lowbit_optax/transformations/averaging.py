"""``ema_of_params``: an exponential moving average of the weights, in few bits."""

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
      count: int32 scalar, how many weights have been averaged.
    """

    # optax's name for it, which is also a tuple's method.
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]


@takes_options
def ema_of_params(
    decay: float,
    *,
    debias: bool = True,
    weights: WeightFormat | None = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """An exponential moving average of the weights, stored in a weight format.

        e_t = e_{t-1} + r_t (w_t - e_{t-1}),  r_t = (1 - decay) / (1 - decay^t)

    and ``r_t = 1 - decay`` with ``debias=False``. It is a transformation of its own,
    whose parameters are the averages e and whose gradients are the weights w:

        average, ema_state = lowbit_optax.step(ema, average, ema_state, weights)

    So everything that takes parameters and a state takes an average: ``from_master``,
    ``master_weights``, ``convert``, ``state_shardings``, ``memory_report``,
    donation and fused kernels. ``average`` has the parameters'
    dtypes: a model can be evaluated with it as it is. Plain bfloat16 would not move: at
    a decay of 0.9999 a step is 1e-4 of ``w - e``, and less than half a unit of the last
    bit of e is lost.

    Args:
      decay: at least 0 and below 1.
      debias: whether the average is that of the weights seen so far alone, as
        optax's ``ema(debias=True)`` returns it; the first average is then not in it.
        False keeps the first average in, with weight ``decay^t``.
      weights: format of the average; ``extra_bits(8, sum_rounding="stochastic")`` if
        None: 1 byte per parameter beside the average itself.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype`` of :func:`lowbit_optax.lowbit`. Without a
        seed, the average draws other noise than an optimizer of the same parameters.

    Returns:
      An optax transformation. ``init`` takes the first average, such as a copy of the
      parameters; ``step`` and ``update`` take weights of any float dtype in place of
      gradients: ``master_weights(params, state)``, or the parameters themselves, whose
      rounding errors are then averaged as well. Leaves that are not floating-point stay
      as they are.

    Raises:
      TypeError, ValueError: for arguments that are not as above.

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
        # Optimizer and average may start from the same parameters and the seed 0.
        options["seed"] = 0x656D61
    inner = _towards_gradients(decay, debias)
    return lowbit(inner, weights=weights, moments="float32", **options)


def _towards_gradients(decay: float, debias: bool) -> optax.GradientTransformation:
    """Updates that take the parameters a part of the way to the gradients."""
    # In Python: 1 - 0.9999 in float32 is off by 2e-4 of itself.
    rate, log_decay = 1 - decay, math.log(decay) if decay else -math.inf

    def init(params):
        del params
        return EmaOfParamsState(jnp.zeros([], jnp.int32))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("ema_of_params: update needs params, the averages so far")
        count = jnp.asarray(optax.safe_increment(state.count))
        r = jnp.float32(rate)
        if debias:
            r = r / -jnp.expm1(count.astype(jnp.float32) * jnp.float32(log_decay))

        def towards(weight, average):
            if not trees.is_float(average):
                return jnp.zeros_like(average)
            return r.astype(average.dtype) * (weight.astype(average.dtype) - average)

        return jax.tree.map(towards, updates, params), EmaOfParamsState(count)

    return optax.GradientTransformation(init, update)
