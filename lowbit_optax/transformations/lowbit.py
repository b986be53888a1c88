"""``lowbit``: any optax transformation on low-precision parameters.

How a step works is in :mod:`lowbit_optax._step.engine`.
"""

from __future__ import annotations

import typing

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._arguments import check_static_int, check_transformation
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import REPLACE, apply_leaf
from lowbit_optax._step import context
from lowbit_optax._step.direct_update import DirectUpdate
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.moment_slots import MomentChoice, Moments
from lowbit_optax._step.param_shardings import ParamShardings
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax._step.wrapped import step_wrapped
from lowbit_optax._types import OptState, Params, PyTree, Transformation
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
    """Run an optax transformation in float32 on parameters kept in fewer bits.

    The inner transformation sees float32 masters and float32 gradients, so weight
    decay and schedules work as in float32 training. Leaves in bfloat16, float16 and
    float8, and :func:`block_scale`'s, are held by ``weights``; float32 and other leaves
    pass through. Plain ``lowbit(inner)`` is the recommended preset: 8 extra bits, 8-bit
    moments.

    Put other transformations inside (``lowbit(optax.chain(adamw, scale))``): after or
    around ``lowbit``, ``scale``, ``reduce_on_plateau``, ``scale_by_schedule``,
    ``add_decayed_weights``, ``schedule_free`` and the like would change updates that
    were rounded to land exactly, and :func:`step` raises an error. Wrappers that
    compare the dtypes of updates and gradients, such as ``optax.apply_if_finite``, go
    inside as well, or around it with :func:`step` or ``match_grad_dtype``. Non-finite
    gradients do what they do in the inner transformation.

    What is in ``params`` is the truth: where a stored master does not round to the
    parameter, because the parameter was set by hand, the parameter wins.

    Args:
      inner: any optax transformation.
      weights: format of the parameters; ``extra_bits(8)`` if None.
      moments: format of the moments.

        - A moment format, for the fields of the inner state that are known to be
          running averages (Adam's ``mu`` and ``nu``, momentum's ``trace``, Lion's
          ``mu``, ...). Others stay float32: weights that schedule-free and Prodigy
          keep, sums, maxima, moments of a custom transformation.
        - A mapping from state field (``mu``, ``nu``, ``trace``) to format, for these
          fields, whatever they are; fields left out stay float32.
        - ``"low"``, the fewest bits that follow float32's updates: 6 for second
          moments, 4 for first moments that a second one bounds (Adam's and its like), 8
          for others. Also in a mapping.
        - ``"float32"``, also in a mapping.
        - None: ``block_quantized(8)``.

        :func:`lowbit_optax.memory_report` shows what each takes.
      seed: of stochastic rounding, 0 if None. ``init`` mixes a checksum of the
        parameters into it, so states of different parameters draw different noise.
      min_size: leaves with fewer elements keep a float32 master instead of packed bits,
        and float32 moments instead of quantised ones; 4096 if None.
      implementation: ``"xla"``; ``"pallas"``, one fused kernel per leaf, an error where
        that cannot be, interpreted (slowly) on other platforms than CUDA and TPUs
        (scalars, and packed or quantised leaves of fewer than 4096 elements, are left
        to XLA without an error);
        ``"triton"`` or ``"mosaic"``, the same by this backend of Pallas', in programs
        that are for CUDA only (else Mosaic GPU on Hopper and Blackwell with JAX 0.11 or
        newer, Triton elsewhere); ``"tpu"``, kernels for TPUs (elsewhere Pallas' model
        of one runs them, slowly) and XLA for leaves that these do not take; or None,
        the kernels on CUDA and TPUs for the leaves that can have one, and XLA
        elsewhere.
      param_shardings: where the parameters lie on a mesh of automatic axes: a tree of
        NamedShardings like the parameters, or a prefix of it, or a function from the
        parameters to one; PartitionSpecs are of the mesh in force. Kernels for TPUs
        need it there, as XLA cannot partition them. It changes nothing on GPUs, nor on
        explicit axes, whose arrays know where they lie.
      warn: whether ``init``, outside ``jax.jit``, warns once if most parameters are
        float32, and a step if XLA updates large leaves on a GPU or a TPU; True if None.
        Pass False to keep float32 parameters and store only the moments in fewer bits.
        See also :func:`lowbit_optax.explain`.
      match_grad_dtype: whether ``update`` returns updates in the gradients' dtype, as
        optax does, if parameter and gradient have the same dtype; False if None. Set it
        for code around ``update`` that compares these dtypes, and for
        ``equinox.apply_updates``, which adds updates without a cast. A bfloat16 update
        can change a weight by up to 256 units in the last place exactly. It rounds
        larger changes, by up to one unit of the new weight, and the residual belongs to
        the rounded weight. :func:`step` and float32 leaves are not affected. In float16
        and float8, with ``extra_bits(rounding="toward_zero")``, a negative master below
        the dtype's smallest number becomes 0, because no sum changes +0 to -0.

    Returns:
      A transformation whose ``update`` needs ``params`` and returns float32 updates for
      the held leaves unless ``match_grad_dtype`` is set, and differences of integers
      for quantised weights.

    Raises:
      TypeError, ValueError: for arguments that are not as above. From ``init``,
        ValueError for optax's DoG, DoWG, Prodigy and Mechanize with weights that are
        not stored exactly: they take rounding for distance from the start; for
        ``optax.lookahead``; and for ``optax.MultiSteps`` around or inside, with
        something in it that skips non-finite gradients, which would never recover. From
        a step, TypeError if a hyperparameter inside is a scalar of fewer bits than
        float32, as ``optax.inject_hyperparams`` makes them without
        ``hyperparam_dtype``.

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> tx = lowbit(optax.adamw(1e-3))
    >>> state = tx.init(params)
    >>> grads = {"w": jnp.full((64, 64), 0.1, jnp.bfloat16)}
    >>> updates, state = tx.update(grads, state, params)
    >>> optax.apply_updates(params, updates)["w"].dtype
    dtype(bfloat16)
    """
    _check_inner(inner)
    weights = extra_bits(8) if weights is None else weights
    if not isinstance(weights, WeightFormat):
        raise TypeError(
            f"lowbit: weights is {weights!r}, not a weight format such as "
            "lowbit_optax.kahan() or lowbit_optax.extra_bits(8)"
        )
    check_implementation("lowbit", implementation)
    seed = 0 if seed is None else seed
    min_size = 4096 if min_size is None else min_size
    check_static_int("lowbit", "seed", seed, 0, 2**32 - 1)
    check_static_int("lowbit", "min_size", min_size, 0)
    choice = MomentChoice.of(moments)
    return Lowbit(
        inner,
        weights,
        choice,
        seed,
        min_size,
        implementation,
        param_shardings,
        warn is None or warn,
        bool(match_grad_dtype),
    ).transformation


def step(
    tx: Transformation, params: Params, opt_state: OptState, grads: PyTree, **extra_args
) -> tuple[Params, OptState]:
    """One optimizer step, params to params: the fast path past ``apply_updates``.

    For a transformation made by :func:`lowbit` (the aliases included) no difference of
    parameters is formed, also inside of ``with_loss_scale``, ``accumulate_gradients``
    and optax's wrappers that hand on updates as they are (``chain`` with ``lowbit``
    last, ``masked``, ``partition``, ``inject_hyperparams``) or not at all
    (``apply_if_finite``, ``conditionally_mask``). With any other transformation or
    wrapper (``MultiSteps``) it is ``update`` and ``apply_updates``.

    What these wrappers make of a gradient element by element, with scalars such as a
    global norm, is part of the kernels and in float32, as inside ``lowbit``. So
    ``chain(clip, lowbit(adamw))`` steps as ``lowbit(chain(clip, adamw))`` does. By
    ``update`` it is rounded to the gradients' dtype. All else is computed in their
    dtype either way.

    Under ``jax.jit`` donate what it takes and returns, in this order::

        jax.jit(functools.partial(lowbit_optax.step, tx), donate_argnums=(0, 1))

    XLA pairs donated buffers with results of the same shape and dtype in order, so a
    training step should return what it donates in the order in which it takes it.

    Args:
      tx: an optax transformation.
      params: tree of parameters.
      opt_state: ``tx``'s state.
      grads: tree of gradients, any float dtype.
      **extra_args: for ``tx.update``.

    Returns:
      ``(params, opt_state)``.

    Raises:
      TypeError: if ``tx`` is not a transformation.
      ValueError: if a transformation after or around ``lowbit`` changes its updates;
        put it inside. ``tx.update`` alone cannot detect this.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = jnp.ones(4, jnp.bfloat16)
    >>> tx = lowbit_optax.kahan_sgd(0.5)
    >>> params, state = step(tx, params, tx.init(params), jnp.ones(4))
    >>> params
    Array([0.5, 0.5, 0.5, 0.5], dtype=bfloat16)
    """
    stepper = stepper_of(tx)
    with context.changed(wants_params=False):
        if stepper is not None:
            return stepper.run(params, opt_state, grads, REPLACE, extra_args)
        check_transformation("step", "tx", tx)
        # optax's own types know neither MultiSteps here nor the type of these params.
        other = typing.cast(typing.Any, optax.with_extra_args_support)(tx)
        arguments = other, params, opt_state, grads, extra_args, apply_updates
        direct = step_wrapped(*arguments)
        if direct is not None:
            return direct
        updates, opt_state = other.update(grads, opt_state, params, **extra_args)
        return apply_updates(params, updates), opt_state


def apply_updates(params: Params, updates: PyTree) -> Params:
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

    def apply(param: typing.Any, update):
        if param is None:
            return None
        if isinstance(update, DirectUpdate):
            return param + update
        if not is_narrow(jnp.asarray(param).dtype):
            return optax.apply_updates(param, update)
        return apply_leaf(param, update)

    return jax.tree.map(apply, params, updates, is_leaf=lambda x: x is None)


def _check_inner(inner) -> None:
    """Raise unless ``inner`` is a transformation that this package has not wrapped."""
    check_transformation("lowbit", "inner", inner)
    if isinstance(stepper_of(inner), Lowbit):
        raise TypeError(
            "lowbit: inner is a transformation of this package already, such as "
            "kahan_adamw; give lowbit the optax transformation, such as optax.adamw, "
            "or use it alone"
        )
