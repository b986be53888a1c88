"""``lowbit``: any optax transformation on low-precision parameters.

:mod:`lowbit_optax._step.engine` implements the step.
"""

from __future__ import annotations

import optax

from lowbit_optax._arguments import check_static_int, check_transformation, check_type
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.moments import MomentChoice, Moments
from lowbit_optax._step.param_shardings import ParamShardings
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax.formats import extra_bits
from lowbit_optax.formats.base import WeightFormat
from pallas_kernels.platforms import Implementation, check_implementation


def lowbit(
    inner: optax.GradientTransformation,
    *,
    weights: WeightFormat | None = None,
    moments: Moments = None,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: Implementation = None,
    param_shardings: ParamShardings = None,
    warn: bool | None = None,
    match_grad_dtype: bool | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run an optax transformation in float32 on low-precision parameters.

    The inner transformation receives float32 master weights and float32 gradients, so
    weight decay and schedules work as in float32 training. ``weights`` stores leaves in
    bfloat16, float16 and float8, and leaves of :func:`block_scale`. Leaves with other
    dtypes, such as float32, are passed to the inner transformation unchanged.

    Put transformations that change updates inside, as in
    ``lowbit(optax.chain(adamw, scale))``. After or around ``lowbit``, transformations
    such as ``scale``, ``add_decayed_weights`` or ``schedule_free`` would change updates
    that are already rounded, so :func:`step` raises an error. ``optax.apply_if_finite``
    and ``conditionally_mask`` need updates in the gradients' dtype. Inside them,
    ``update`` returns such updates, as with ``match_grad_dtype``. The inner
    transformation decides what a non-finite gradient does.

    If you change a parameter outside of the optimizer, the next step adds the old
    residual to the new parameter, or ignores a residual that is too large for it.

    Args:
      inner: an optax transformation.
      weights: format for the parameters; ``extra_bits(8)`` if None.
      moments: format for the moments, one of:

        - A moment format. It applies to fields of the inner state that are known to be
          running averages, such as Adam's ``mu`` and ``nu`` and momentum's ``trace``.
          All other fields, such as the weights that schedule-free stores, sums, maxima,
          and moments of a custom transformation, stay float32.
        - A mapping from field names (``mu``, ``nu``, ``trace``) to formats. Fields that
          are not in the mapping stay float32.
        - ``"float32"``. Also allowed in a mapping.
        - None: ``block_quantized(8)``.

        :func:`lowbit_optax.memory_report` prints the bytes of each.
      seed: seed for stochastic rounding, 0 if None. ``init`` combines it with a
        checksum of the parameters, so that different models draw different bits.
      min_size: leaves with fewer elements get a float32 master instead of packed bits,
        and float32 moments instead of quantized ones; 4096 if None.
      implementation: how the step runs, one of:

        - None: kernels on CUDA devices and TPUs for each leaf that supports one, and
          XLA for all other leaves and devices.
        - ``"xla"``: XLA without kernels.
        - ``"pallas"``: one kernel per leaf, or an error if a leaf supports none. XLA
          updates scalars, and packed or quantized leaves with fewer than 4096 elements.
          On other devices, Pallas interprets the kernels, which is slow.
        - ``"triton"`` or ``"mosaic"``: like ``"pallas"``, with this Pallas backend on
          CUDA devices. The default is Mosaic on Hopper and Blackwell from JAX 0.11 on,
          because JAX deprecates Triton, and Triton otherwise.
        - ``"tpu"``: the TPU kernels, and XLA for leaves that do not support one. On
          other devices, Pallas simulates them, which is slow.
      param_shardings: the shardings of the parameters on a mesh with automatic axes. A
        tree of NamedShardings or PartitionSpecs with the structure of the parameters or
        a prefix of it, or a function of the parameters that returns one. TPU kernels
        need it on automatic axes, because XLA cannot partition them. On other devices,
        only :func:`lowbit_optax.lowbit_muon` and :func:`lowbit_optax.state_shardings`
        use it. Explicit axes need none.
      warn: if True or None, ``init`` warns once if most parameters are float32, and a
        step warns if XLA updates large leaves on a GPU or TPU. Pass False to keep
        float32 parameters and quantize only the moments. See also
        :func:`lowbit_optax.explain`.
      match_grad_dtype: if True, ``update`` returns updates in the gradients' dtype, as
        optax does, for each parameter that has the same dtype. Set it for code that
        compares these dtypes, and for ``equinox.apply_updates``, which adds updates
        without a cast. A bfloat16 update is exact if it changes a weight by at most 256
        units in the last place, and is off by at most one unit of the new weight
        otherwise; the residual matches the rounded weight. :func:`step` and float32
        leaves do not change. In float16 and float8 with
        ``extra_bits(rounding="toward_zero")``, negative masters below the smallest
        number of the dtype become 0.

    Returns:
      A transformation whose ``update`` needs ``params``. By default, it returns float32
      updates outside of ``optax.apply_if_finite``, and integer differences for
      quantized weights.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value. ``init`` raises a
        ValueError for optax's DoG, DoWG, Prodigy and Mechanize unless weights are
        stored exactly, because they measure the distance from the start; for
        ``optax.lookahead``; and for ``optax.MultiSteps`` with a transformation that
        skips non-finite gradients, because it would never recover. A step raises a
        TypeError if a hyperparameter has fewer than 32 bits, which happens with
        ``optax.inject_hyperparams`` without ``hyperparam_dtype``.

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> tx = lowbit(optax.adamw(1e-3))
    >>> state = tx.init(params)
    >>> grads = {"w": jnp.full((64, 64), 0.1, jnp.bfloat16)}
    >>> updates, state = tx.update(grads, state, params)
    >>> optax.apply_updates(params, updates)["w"].dtype
    dtype(bfloat16)
    """
    check_transformation("lowbit", "inner", inner)
    if isinstance(stepper_of(inner), Lowbit):
        raise TypeError(
            "lowbit: inner is already a transformation of this package, such as "
            "kahan_adamw; use it alone, or pass one of optax, such as optax.adamw(1e-3)"
        )
    weights = extra_bits(8) if weights is None else weights
    accepted = "a weight format, such as lowbit_optax.kahan()"
    check_type("lowbit: weights", weights, WeightFormat, accepted)
    check_implementation("lowbit", implementation)
    seed = 0 if seed is None else seed
    min_size = 4096 if min_size is None else min_size
    check_static_int("lowbit", "seed", seed, 0, 2**32 - 1)
    check_static_int("lowbit", "min_size", min_size, 0)
    choice = MomentChoice.of(moments)
    warn = warn is None or warn
    given = implementation, param_shardings, warn, bool(match_grad_dtype)
    return Lowbit(inner, weights, choice, seed, min_size, *given).transformation
