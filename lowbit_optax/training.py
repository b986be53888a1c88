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

from lowbit_optax._step.kept_float32 import KeepFloat32, is_bias_or_norm
from lowbit_optax.states.masters import from_master, with_master
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
        keep_float32: KeepFloat32 = is_bias_or_norm,
        **kwargs,
    ) -> typing.Self:
        """A state at step 0; with ``param_dtype``, of narrowed parameters.

        Args:
          apply_fn: as in flax, usually ``model.apply``. If the model is to compute in
            ``param_dtype``, give its layers that ``dtype``: flax promotes to the widest
            of its inputs.
          params: tree of parameters; with ``param_dtype``, of float32 weights.
          tx: an optax transformation; with ``param_dtype``, of this package, alone or
            inside optax's wrappers.
          param_dtype, keep_float32: ``dtype`` and ``keep_float32`` of
            :func:`lowbit_optax.from_master`. Without ``param_dtype`` this is flax's
            ``create``.
          **kwargs: other fields.

        Raises:
          ValueError: with ``param_dtype``, if ``tx`` keeps no lowbit state, or cannot
            hold a leaf's dtype.

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
        if param_dtype is None:
            return super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        overwrite = OVERWRITE_WITH_GRADIENT in params
        masters = params["params"] if overwrite else params
        trained, opt_state = from_master(tx, masters, param_dtype, keep_float32)
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
        of = lambda tree: tree["params"] if overwrite else tree
        params, opt_state = step(self.tx, of(self.params), self.opt_state, of(grads))
        if overwrite:
            # flax's float8 layers hand over new values of these as their gradients.
            new = grads[OVERWRITE_WITH_GRADIENT]
            params = {"params": params, OVERWRITE_WITH_GRADIENT: new}
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )


def cast_model(
    model: typing.Any,
    tx: optax.GradientTransformation,
    *,
    wrt: typing.Any = nnx.Param,
    param_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    keep_float32: KeepFloat32 = is_bias_or_norm,
) -> optax.GradientTransformation:
    """Narrow the parameters of an nnx model; the low bits are for the optimizer.

    For trainers that make an ``nnx.Optimizer`` themselves, such as Tunix'::

        trainer = PeftTrainer(model, cast_model(model, tx), config)

    Args:
      model: an nnx module with float32 parameters, which are replaced.
      tx: a transformation of this package, alone or inside optax's wrappers.
      wrt: which variables are parameters, as of ``nnx.Optimizer``.
      param_dtype: of the parameters that are narrowed.
      keep_float32: which stay float32; see :func:`lowbit_optax.from_master`. Paths end
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
    params, _ = from_master(tx, master, param_dtype, keep_float32)
    start = with_master(tx, master)
    nnx.update(model, params)  # and with it what master refers to
    return start


def nnx_optimizer(
    model: typing.Any,
    tx: optax.GradientTransformation,
    *,
    wrt: typing.Any = nnx.Param,
    param_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    keep_float32: KeepFloat32 = is_bias_or_norm,
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
