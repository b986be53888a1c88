"""flax's TrainState and nnx.Optimizer on the fast path. Needs the ``flax`` extra."""

import typing

import jax
import jax.numpy as jnp
import optax

try:
    from flax import nnx
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "flax":
        raise
    raise ImportError(
        "lowbit_optax.training needs flax, which is not installed: "
        "pip install 'lowbit-optax[flax]'"
    ) from error

from lowbit_optax.states.masters import (
    KeepFloat32,
    from_master,
    is_bias_or_vector,
    param_dtypes,
    with_master,
)
from lowbit_optax.transformations.direct import direct_updates
from lowbit_optax.transformations.lowbit import step


class TrainState(train_state.TrainState):
    """flax's TrainState, stepping parameters directly instead of adding differences.

    The same fields, checkpoints and results as flax's with a lowbit transformation;
    ``apply_gradients`` calls :func:`lowbit_optax.step`.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> state = TrainState.create(
    ...     apply_fn=None,
    ...     params={"w": jnp.ones(3, jnp.bfloat16)},
    ...     tx=lowbit_optax.kahan_adamw(1e-3),
    ... )
    >>> state.apply_gradients(grads={"w": jnp.ones(3, jnp.bfloat16)}).step
    1
    """

    @classmethod
    def create(
        cls,
        *,
        apply_fn: typing.Any,
        params: typing.Any,
        tx: optax.GradientTransformation,
        param_dtype: jax.typing.DTypeLike | None = None,
        keep_float32: KeepFloat32 = is_bias_or_vector,
        **kwargs,
    ) -> typing.Self:
        """A state at step 0; with ``param_dtype``, of narrowed parameters.

        Args:
          apply_fn: as in flax, usually ``model.apply``.
          params: tree of parameters.
          tx: an optax transformation.
          param_dtype: if given, ``params`` are float32 and are narrowed as
            :meth:`from_master` does; without it this is flax's ``create``.
          keep_float32: with ``param_dtype``, which leaves stay float32; see
            :func:`lowbit_optax.param_dtypes`.
          **kwargs: other fields.

        >>> import jax.numpy as jnp, lowbit_optax
        >>> state = TrainState.create(
        ...     apply_fn=None,
        ...     params={"kernel": jnp.full((64, 64), 0.1), "bias": jnp.ones(64)},
        ...     tx=lowbit_optax.extra_bits_adamw(1e-3),
        ...     param_dtype=jnp.bfloat16,
        ... )
        >>> state.params["kernel"].dtype, state.params["bias"].dtype
        (dtype(bfloat16), dtype('float32'))
        """
        if param_dtype is not None:
            return cls.from_master(
                apply_fn=apply_fn,
                params=params,
                tx=tx,
                param_dtype=param_dtype,
                keep_float32=keep_float32,
                **kwargs,
            )
        return super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)

    @classmethod
    def from_master(
        cls,
        *,
        apply_fn: typing.Any,
        params: typing.Any,
        tx: optax.GradientTransformation,
        param_dtype: jax.typing.DTypeLike = jnp.bfloat16,
        keep_float32: KeepFloat32 = is_bias_or_vector,
        **kwargs,
    ) -> typing.Self:
        """A state at step 0 from float32 weights, whose low bits the residuals keep.

        Args:
          apply_fn: as in flax. If the model is to compute in ``param_dtype``, give its
            layers that ``dtype``: flax promotes to the widest of its inputs.
          params: tree of float32 weights, as ``model.init`` makes them.
          tx: a transformation of this package, alone or inside optax's wrappers.
          param_dtype: of the parameters.
          keep_float32: called with a leaf's path and the leaf, it says whether the leaf
            stays float32. The default keeps leaves named ``bias`` and leaves of fewer
            than two axes, such as the scales of normalisations. See
            :func:`lowbit_optax.param_dtypes`.
          **kwargs: other fields.

        Raises:
          ValueError: if ``tx`` keeps no lowbit state, or cannot hold a leaf's dtype.

        >>> import jax.numpy as jnp, lowbit_optax
        >>> state = TrainState.from_master(
        ...     apply_fn=None,
        ...     params={"kernel": jnp.full((64, 64), 0.1)},
        ...     tx=lowbit_optax.extra_bits_adamw(1e-3),
        ... )
        >>> lowbit_optax.master_weights(state.params, state.opt_state)["kernel"][0, 0]
        Array(0.1, dtype=float32)
        """
        overwrite = OVERWRITE_WITH_GRADIENT in params
        masters = params["params"] if overwrite else params
        dtypes = param_dtypes(masters, param_dtype, keep_float32)
        trained, opt_state = from_master(tx, masters, dtypes)
        params = {**params, "params": trained} if overwrite else trained
        return cls(
            step=0,
            apply_fn=apply_fn,
            params=params,
            tx=tx,
            opt_state=opt_state,
            **kwargs,
        )

    def apply_gradients(self, *, grads, **kwargs) -> typing.Self:
        """One optimizer step.

        Args:
          grads: tree like ``params``.
          **kwargs: other fields to replace.

        Returns:
          The state with ``step``, ``params`` and ``opt_state`` advanced.
        """
        overwrite = OVERWRITE_WITH_GRADIENT in grads
        params, opt_state = step(
            self.tx,
            self.params["params"] if overwrite else self.params,
            self.opt_state,
            grads["params"] if overwrite else grads,
        )
        if overwrite:
            # flax's float8 layers hand over new values of these as their gradients.
            params = {
                "params": params,
                OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT],
            }
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )


def cast_model(
    model: typing.Any,
    tx: optax.GradientTransformation,
    *,
    wrt: typing.Any = nnx.Param,
    param_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    keep_float32: KeepFloat32 = is_bias_or_vector,
) -> optax.GradientTransformation:
    """Narrow the parameters of an nnx model; the low bits are for the optimizer.

    For trainers that make an ``nnx.Optimizer`` themselves, such as Tunix'::

        trainer = PeftTrainer(model, cast_model(model, tx), config)

    Args:
      model: an nnx module with float32 parameters, which are replaced.
      tx: a transformation of this package, alone or inside optax's wrappers.
      wrt: which variables are parameters, as of ``nnx.Optimizer``.
      param_dtype: of the parameters that are narrowed.
      keep_float32: which stay float32; see :func:`lowbit_optax.param_dtypes`. Paths end
        with ``.value``.

    Returns:
      ``tx``, whose first ``init`` starts from the float32 weights; see
      :func:`lowbit_optax.with_master`.

    >>> from flax import nnx
    >>> import lowbit_optax
    >>> model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    >>> tx = cast_model(model, lowbit_optax.extra_bits_adamw(1e-3))
    >>> model.kernel[...].dtype, model.bias[...].dtype
    (dtype(bfloat16), dtype('float32'))
    """
    master = nnx.state(model, wrt)
    params, _ = from_master(tx, master, param_dtypes(master, param_dtype, keep_float32))
    start = with_master(tx, master)
    nnx.update(model, params)  # and with it what master refers to
    return start


def nnx_optimizer(
    model: typing.Any,
    tx: optax.GradientTransformation,
    *,
    wrt: typing.Any = nnx.Param,
    param_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    keep_float32: KeepFloat32 = is_bias_or_vector,
) -> nnx.Optimizer:
    """An ``nnx.Optimizer`` from a float32 model, on the fast path.

    Args:
      model, tx, wrt, param_dtype, keep_float32: as of :func:`cast_model`, which narrows
        the model's parameters.

    Returns:
      flax's own optimizer, of :func:`lowbit_optax.direct_updates`.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, lowbit_optax
    >>> model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    >>> optimizer = nnx_optimizer(model, lowbit_optax.lowbit_adamw(1e-3))
    >>> grads = nnx.grad(lambda model: model(jnp.ones(64)).sum())(model)
    >>> updates = optimizer.update(model, grads)
    >>> model.kernel[...].dtype
    dtype(bfloat16)
    """
    options = dict(wrt=wrt, param_dtype=param_dtype, keep_float32=keep_float32)
    tx = cast_model(model, direct_updates(tx), **options)
    return nnx.Optimizer(model, tx, wrt=wrt)
