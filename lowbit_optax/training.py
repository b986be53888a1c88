"""flax's TrainState on the fast path. Needs the ``flax`` extra."""

import typing

import jax
import jax.numpy as jnp
import optax

try:
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
    is_scalar_or_vector,
    param_dtypes,
)
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
        keep_float32: KeepFloat32 = is_scalar_or_vector,
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
        keep_float32: KeepFloat32 = is_scalar_or_vector,
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
            stays float32. The default keeps leaves of fewer than two axes: biases and
            the scales of normalisations. See :func:`lowbit_optax.param_dtypes`.
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
