"""AdamW with a factored second moment, in 3.6 or 2.6 bytes per parameter."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax import formats
from lowbit_optax._arguments import check_static_int
from lowbit_optax._step.state import blank, is_blank
from lowbit_optax.aliases.common import Mask, checked, corrected_momentum, without_none
from lowbit_optax.formats.moment_fields import register_moments
from lowbit_optax.transformations.lowbit import lowbit
from lowbit_optax.transformations.options import Options, takes_options


class FactoredAdamState(typing.NamedTuple):
    """The state of :func:`scale_by_factored_adam`.

    All fields except ``count`` are trees with the structure of the parameters. For a
    leaf of shape ``[..., m, n]`` whose second moment is factored, ``nu_row`` has the
    shape ``[..., m, 1]`` and ``nu_column`` the shape ``[..., 1, n]``.
    :func:`lowbit_optax.state_shardings` places them like the leaf, except that it does
    not split the axis of length 1. For other leaves, ``nu`` has the shape of the leaf.
    Small arrays of int16 zeros stand for arrays that are not needed.

    Args:
      count: int32 scalar, the number of steps.
      mu: the running average of the divided gradients.
      nu: the running average of the squared gradients.
      nu_row, nu_column: its means over the last axis, and over the axis before it.
    """

    count: typing.Any  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: typing.Any
    nu: typing.Any
    nu_row: typing.Any
    nu_column: typing.Any


register_moments(
    FactoredAdamState, averages=("mu", "nu"), second_moments=("nu",), normalized=("mu",)
)


@takes_options
def factored_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: typing.Any = None,
    weight_decay: float = 1e-4,
    mask: Mask = None,
    *,
    nesterov: bool = False,
    min_dim_size_to_factor: int | None = None,
    bits: int | None = None,
    mu_bits: int | None = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """AdamW in 3.57 bytes per parameter, with Adafactor's second moment for matrices.

    The second moment of a matrix is the product of its row means and its column means,
    which need almost no memory. The first moment averages the divided gradients n; see
    :func:`scale_by_factored_adam`. This is another optimizer than AdamW.

    The master weight W consists of a bfloat16 parameter and ``bits`` extra bits. Q
    rounds to 4-bit codes with a scale per block.

        n_t = g_t / (sqrt(v_t / (1 - b2^t) + eps_root) + eps)
        m_t = b1 Q(m_{t-1}) + (1 - b1) n_t
        W   = round(W - eta_t (m_t / (1 - b1^t) + d W))

    With ``bits=0``, weights are rounded to their dtype, and their rounding errors are
    added to m. bfloat16 weights need 2.57 bytes per parameter, and float8 weights 1.57.
    Weights from :func:`lowbit_optax.lpmm.quantize_params` need 1.57, 1.32 and 1.07 with
    8, 6 and 4 bits.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      b1, b2, eps, eps_root, mu_dtype, mask, nesterov: see ``optax.adamw``.
      weight_decay: the decoupled weight decay d.
      min_dim_size_to_factor: see :func:`scale_by_factored_adam`.
      bits: the number of extra bits per weight; 8 if None. Weights from
        ``quantize_params`` have no extra bits. Without ``bits=0``, they are rounded
        stochastically, and their errors are lost.
      mu_bits: the number of bits of m; 4 if None. A second moment that is not factored
        has 8 bits.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Shazeer and Stern 2018, section 3; Loshchilov and Hutter 2019.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> shape = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    >>> for bits in (8, 0):
    ...     tx = factored_adamw(1e-3, bits=bits)
    ...     print(f"{lowbit_optax.memory_report(tx, shape).bytes_per_param:.2f}")
    3.57
    2.57
    """
    moments = {
        "mu": formats.block_quantized(4 if mu_bits is None else mu_bits),
        "nu": formats.block_quantized(8),
    }
    arguments = learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask
    given = without_none(min_dim_size_to_factor=min_dim_size_to_factor)
    make = functools.partial(_factored_adamw, nesterov=nesterov, **given)
    inner = checked("factored_adamw", moments, make, *arguments)
    bits = 8 if bits is None else bits
    check_static_int("factored_adamw", "bits", bits, 0, 16)
    if bits == 0:
        weights = formats.stochastic_rounding(error_feedback="mu")
    else:
        weights = formats.extra_bits(bits)
    return lowbit(inner, weights=weights, moments=moments, **options)


def scale_by_factored_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: typing.Any = None,
    *,
    nesterov: bool = False,
    min_dim_size_to_factor: int = 128,
) -> optax.GradientTransformation:
    """Rescale gradients as Adam does, with Adafactor's second moment for matrices.

        r_t  = b2 r_{t-1} + (1 - b2) mean(g_t^2 over each row)
        c_t  = b2 c_{t-1} + (1 - b2) mean(g_t^2 over each column)
        v_ij = r_i c_j / mean(r)

        n_t  = g_t / (sqrt(v_t / (1 - b2^t) + eps_root) + eps)
        m_t  = b1 m_{t-1} + (1 - b1) n_t

    The product v has the row and column means of Adam's second moment, and equals it if
    that moment has rank 1. A leaf with more than two axes is a stack of matrices in its
    last two axes. All other leaves, such as vectors and small matrices, have Adam's
    second moment.

    The first moment m averages the divided gradients n, and m / (1 - b1^t) is the
    update. Adam averages the gradients, and divides the average. The updates are
    similar, because v changes slowly. The gradients of neighbors can differ by any
    factor, but the divided gradients have similar sizes, so 4 bits can store m.

    The momentum of ``optax.adafactor`` averages divided gradients too. Unlike in
    ``optax.adafactor``, ``b2`` is constant and corrected for its bias, ``eps`` is added
    to the root as in Adam, updates are neither clipped nor scaled by the parameters,
    and the axes are always the last two instead of the two longest.

    Args:
      b1, b2, eps, eps_root, mu_dtype, nesterov: see ``optax.scale_by_adam``.
      min_dim_size_to_factor: the second moment of a leaf is factored if its last two
        axes have at least this size. The default is the same as in
        ``optax.adafactor``. A stack of vectors with that many layers would be factored
        too.

    Returns:
      An optax transformation. It can be used without :func:`lowbit_optax.lowbit`.

    Raises:
      ValueError: if ``min_dim_size_to_factor`` is less than 2.

    References:
      Shazeer and Stern 2018, Algorithm 4, lines 5 to 7; Ziyin, Wang and Ueda 2020,
      "LaProp", for the order of averaging and dividing; Kingma and Ba 2015.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_factored_adam()
    >>> state = tx.init({"w": jnp.ones((256, 128)), "b": jnp.ones(128)})
    >>> state.nu_row["w"].shape, state.nu_column["w"].shape, state.nu["b"].shape
    ((256, 1), (1, 128), (128,))
    """
    name = "min_dim_size_to_factor"
    check_static_int("scale_by_factored_adam", name, min_dim_size_to_factor, 2)

    def init(params):
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        first = functools.partial(_first_second_moment, min_dim_size_to_factor)
        return FactoredAdamState(jnp.zeros((), jnp.int32), mu, *_each(first, params))

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        before = state.nu, state.nu_row, state.nu_column
        second = _each(functools.partial(_averaged, b2), updates, *before)

        def divided(grad, *second):
            nu = _second_moment(b2, count, *second)
            wide = grad.astype(nu.dtype) / (jnp.sqrt(nu + eps_root) + eps)
            return wide.astype(grad.dtype)

        grads = jax.tree.map(divided, updates, *second)
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        directions = corrected_momentum(mu, grads, b1, count, nesterov)
        return directions, FactoredAdamState(
            count, optax.tree.cast(mu, mu_dtype), *second
        )

    return optax.GradientTransformation(init, update)


def _factored_adamw(
    learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, **options
):
    """Returns ``optax.adamw`` with a factored second moment."""
    return optax.chain(
        scale_by_factored_adam(b1, b2, eps, eps_root, mu_dtype, **options),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _first_second_moment(least: int, param):
    """Returns the initial ``nu``, ``nu_row`` and ``nu_column`` of a leaf."""
    is_real = jnp.issubdtype(param.dtype, jnp.floating)
    if not is_real or param.ndim < 2 or min(param.shape[-2:]) < least:
        return jnp.zeros_like(param), blank(param), blank(param)
    return blank(param), *map(jnp.zeros_like, _means(param))


def _averaged(b2, grad, nu, row, column):
    """Returns the second moment after a step, with the gradients of this step."""
    if not is_blank(nu):
        nu = optax.tree.update_moment_per_elem_norm(grad, nu, b2, 2)
        return nu, row, column
    averaged = lambda old, new: b2 * old + (1 - b2) * new
    of_rows, of_columns = _means(jnp.square(grad))
    return nu, averaged(row, of_rows), averaged(column, of_columns)


def _means(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the means over the last axis, and over the axis before it."""
    return jnp.mean(x, -1, keepdims=True), jnp.mean(x, -2, keepdims=True)


def _second_moment(b2, count, nu, row, column):
    """Returns Adam's second moment, or r_i c_j / mean(r), corrected for its bias."""
    if not is_blank(nu):
        return optax.tree.bias_correction(nu, b2, count)
    wide = jnp.promote_types(row.dtype, jnp.float32)
    row, column = row.astype(wide), column.astype(wide)
    # Divide first: the product of two small means could underflow.
    mean = jnp.mean(row, -2, keepdims=True)
    share = row / jnp.maximum(mean, np.finfo(np.float32).tiny)
    return share * optax.tree.bias_correction(column, b2, count)


def _each(function: Callable, *trees) -> list:
    """Maps a function that returns three arrays over trees, and returns three trees."""
    structure = jax.tree.structure(trees[0])
    leaves = map(structure.flatten_up_to, trees)
    found = [function(*x) for x in zip(*leaves, strict=True)]
    return [structure.unflatten([x[i] for x in found]) for i in range(3)]
