"""Muon for matrices and AdamW for all other parameters, in the default formats."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lowbit_optax import formats
from lowbit_optax._arguments import check_type
from lowbit_optax._step import context, trees
from lowbit_optax._step.moments import Moments
from lowbit_optax._step.param_shardings import leaf_shardings
from lowbit_optax.aliases.common import (
    check_decay,
    check_learning_rate,
    check_numbers,
    checked,
    corrected_momentum,
)
from lowbit_optax.aliases.newton_schulz import orthogonalized_shards
from lowbit_optax.formats.moment_fields import register_moments
from lowbit_optax.transformations.lowbit import lowbit
from lowbit_optax.transformations.options import Options, takes_options

_EPS = 1e-8

IsMatrix = Callable[[str, typing.Any], bool]
"""A function of a path and a leaf, like ``keep_float32`` of ``from_master``."""


class MomentumState(typing.NamedTuple):
    """The state of Muon's momentum.

    Args:
      count: int32 scalar, the number of steps.
      mu: the running average of the gradients.
    """

    count: typing.Any  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: typing.Any


register_moments(MomentumState, averages=("mu",), orthogonalized=("mu",))


@takes_options
def lowbit_muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    ns_steps: int = 5,
    ns_dtype: jax.typing.DTypeLike = jnp.float32,
    beta: float = 0.95,
    weight_decay: float = 0.0,
    nesterov: bool = True,
    is_matrix: IsMatrix | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_weight_decay: float = 0.0,
    bits: int | None = None,
    moments: Moments = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """Muon for matrices in 4.06 bytes per parameter, and AdamW in 5.13 for the rest.

    The master weight W consists of a bfloat16 parameter and 8 extra bits. Q rounds to
    8-bit codes with a scale per block.

        m_t = beta Q(m_{t-1}) + (1 - beta) g_t
        n_t = beta m_t / (1 - beta^(t+1)) + (1 - beta) g_t / (1 - beta^t)
        W   = round(W - eta_t (sqrt(max(1, columns / rows)) NS(n_t) + d W))

    NS moves all singular values close to 1. It starts from ``X = n / ||n||``, and
    repeats this ``ns_steps`` times:

        A = X X^T;    X = 3.4445 X + (-4.7750 A + 2.0315 A A) X

    A leaf with more than two axes is a stack of matrices in its last two axes. NS runs
    on one matrix after the other, so that temporary memory does not grow with the
    stack. With :mod:`lowbit_optax.release`, the backward loop updates each matrix. On a
    mesh with explicit axes, or with ``param_shardings``, shards of matrices are moved
    in bfloat16, and NS of a stack runs on different layers on different devices.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      ns_steps: the number of iterations of NS.
      ns_dtype: the dtype of the matrix products in NS, ``jnp.float32`` or
        ``jnp.bfloat16``. Momentum and norm are computed in float32 in both cases.
      beta, nesterov: see ``optax.contrib.muon``; ``nesterov`` also applies to AdamW.
        Without it, n_t is ``m_t / (1 - beta^t)``.
      weight_decay: the decoupled weight decay d.
      is_matrix: a function of ``(path, leaf)`` that returns True if Muon updates the
        leaf. If None, Muon updates all leaves with two or more axes. AdamW usually
        trains embeddings and output layers better.
      adam_learning_rate: the learning rate of AdamW; ``learning_rate`` if None.
      adam_b1, adam_b2, adam_weight_decay: the other hyperparameters of AdamW.
      bits: the number of extra bits per weight; 8 if None.
      moments: formats for Muon's m (``mu``) and AdamW's moments (``mu``, ``nu``);
        ``block_quantized(8)`` if None. Codes for Muon's m are linear.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value. ``init`` raises
        one if ``is_matrix`` selects a complex leaf or one with fewer than two axes.

    References:
      Jordan 2024, "Muon: An optimizer for hidden layers in neural networks".
      Gupta et al. 2025, "Effective Quantization of Muon Optimizer States".

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> tx = lowbit_muon(
    ...     0.02,
    ...     adam_learning_rate=1e-3,
    ...     is_matrix=lambda path, leaf: "layers" in path and leaf.ndim == 3,
    ... )
    >>> shapes = {
    ...     "embedding": jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16),
    ...     "layers": jax.ShapeDtypeStruct((12, 1024, 1024), jnp.bfloat16),
    ... }
    >>> report = lowbit_optax.memory_report(tx, shapes)
    >>> [round(leaf.total / leaf.size, 2) for leaf in report.leaves]
    [5.12, 4.06]
    """
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    check_learning_rate("lowbit_muon", learning_rate)
    check_numbers("lowbit_muon", weight_decay=weight_decay)
    check_decay("lowbit_muon", "beta", beta)
    arguments = adam_rate, adam_b1, adam_b2, _EPS, 0.0, None, adam_weight_decay
    adam = checked("lowbit_muon", moments, optax.adamw, *arguments, nesterov=nesterov)
    # optax.inject_hyperparams turns dtypes into arrays.
    dtype = jnp.dtype(getattr(ns_dtype, "dtype", ns_dtype))
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"lowbit_muon: ns_dtype must be float32 or bfloat16, got {dtype}"
        )
    given = options.get("param_shardings")
    muon = optax.chain(
        _momentum(beta, nesterov),
        optax.stateless(functools.partial(_orthogonal, ns_steps, dtype, given)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    accepted = "a function (path, leaf) -> bool, or None"
    check_type("lowbit_muon: is_matrix", is_matrix, Callable | None, accepted)
    labels = functools.partial(_labels, is_matrix)
    inner = optax.partition({"muon": muon, "adam": adam}, labels)
    weights = formats.extra_bits(8 if bits is None else bits)
    return lowbit(inner, weights=weights, moments=moments, **options)


def _momentum(beta: float, nesterov: bool) -> optax.GradientTransformation:
    """Returns a transformation that averages gradients, with bias correction."""

    def init(params):
        mu = optax.tree.zeros_like(params, dtype=jnp.float32)
        return MomentumState(jnp.zeros((), jnp.int32), mu)

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        found = corrected_momentum(mu, updates, beta, count, nesterov)
        keep = lambda new, old: new.astype(old.dtype)
        return found, MomentumState(count, jax.tree.map(keep, mu, state.mu))

    return optax.GradientTransformation(init, update)


def _orthogonal(steps: int, dtype, given, updates, params):
    """Returns the orthogonalized updates; ``given`` is ``param_shardings``."""
    _, leaves, structure = trees.named_leaves(updates)
    places = leaf_shardings(given, params)
    found = []
    for x, place in zip(leaves, places, strict=True):
        explicit = jax.typeof(x).sharding
        place = explicit if any(explicit.spec) else place
        of_one = functools.partial(
            orthogonalized_shards, sharding=place, steps=steps, dtype=dtype
        )
        found.append(context.layerwise(of_one)(x))
    return structure.unflatten(found)


def _labels(is_matrix: IsMatrix | None, params):
    is_matrix = is_matrix or (lambda name, leaf: leaf.ndim >= 2)
    names, leaves, structure = trees.named_leaves(params)
    labels = []
    for name, leaf in zip(names, leaves, strict=True):
        labels.append("muon" if is_matrix(name, leaf) else "adam")
        if labels[-1] == "muon" and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(
                f"lowbit_muon: params{name} must be real to be updated by Muon, got "
                f"{trees.describe(leaf)}; pass an is_matrix that leaves it to AdamW"
            )
        if labels[-1] == "muon" and leaf.ndim < 2:
            raise ValueError(
                f"lowbit_muon: is_matrix selects params{name} of shape "
                f"{list(leaf.shape)}, but Muon needs at least two axes"
            )
    return structure.unflatten(labels)
