"""flax's TrainState and nnx.Optimizer with direct steps; needs the ``flax`` extra."""

import typing
from collections.abc import Mapping

import jax
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

from lowbit_optax._arguments import brief
from lowbit_optax._step.float32_params import KeepFloat32, is_bias_or_norm
from lowbit_optax._types import PyTree
from lowbit_optax.states.masters import from_master, with_master
from lowbit_optax.transformations.direct import direct_updates
from lowbit_optax.transformations.step import step


class TrainState(train_state.TrainState):
    """A flax TrainState whose ``apply_gradients`` calls :func:`lowbit_optax.step`.

    Fields, checkpoints and results are the same as for flax's class.

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
        **kwargs: typing.Any,
    ) -> typing.Self:
        """Create a state at step 0 from float32 parameters.

        Float32 matrices become bfloat16 if ``tx`` stores them in a weight format, as in
        :func:`lowbit_optax.from_master`.

        Args:
          apply_fn: usually ``model.apply``. To compute in bfloat16, also pass this
            dtype to the layers of the model, because flax promotes to the widest dtype
            of the inputs.
          params: tree of float32 parameters. Narrow parameters keep their dtype.
          tx: an optax transformation. With plain optax, parameters stay float32.
          param_dtype, keep_float32: ``dtype`` and ``keep_float32`` of
            :func:`lowbit_optax.from_master`.
          **kwargs: other fields.

        Raises:
          TypeError, ValueError: see :func:`lowbit_optax.from_master`.

        >>> import jax.numpy as jnp, lowbit_optax
        >>> state = TrainState.create(
        ...     apply_fn=None,
        ...     params={"kernel": jnp.full((64, 64), 0.1), "bias": jnp.ones(64)},
        ...     tx=lowbit_optax.extra_bits_adamw(1e-3),
        ... )
        >>> state.params["kernel"].dtype, state.params["bias"].dtype
        (dtype(bfloat16), dtype('float32'))
        """
        overwrite = _overwrites(params)
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

    def apply_gradients(self, *, grads: PyTree, **kwargs: typing.Any) -> typing.Self:
        """Run one optimizer step.

        Args:
          grads: tree with the structure of ``params``.
          **kwargs: other fields to replace.

        Returns:
          The state with new ``step``, ``params`` and ``opt_state``.
        """
        overwrite = _overwrites(grads)
        of = lambda tree: tree["params"] if overwrite else tree
        params, opt_state = step(self.tx, of(self.params), self.opt_state, of(grads))
        if overwrite:
            # flax's float8 layers return new values of these variables as gradients.
            new = grads[OVERWRITE_WITH_GRADIENT]
            params = {"params": params, OVERWRITE_WITH_GRADIENT: new}
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )


def _overwrites(tree) -> bool:
    return isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree


def cast_model(
    model: typing.Any,
    tx: optax.GradientTransformation,
    *,
    wrt: typing.Any = nnx.Param,
    param_dtype: jax.typing.DTypeLike | None = None,
    keep_float32: KeepFloat32 = is_bias_or_norm,
) -> optax.GradientTransformation:
    """Cast an nnx model to bfloat16, and keep the low bits for the optimizer.

    Use it for trainers that create an ``nnx.Optimizer`` themselves, such as Tunix::

        trainer = PeftTrainer(model, cast_model(model, tx), config)

    Args:
      model: an nnx module with float32 parameters, which are replaced in place.
      tx: an optax transformation. With plain optax, the model does not change.
      wrt: a filter that selects the parameters, as in ``nnx.Optimizer``.
      param_dtype, keep_float32: ``dtype`` and ``keep_float32`` of
        :func:`lowbit_optax.from_master`. Paths end with ``.value``.

    Returns:
      ``tx`` with an ``init`` that starts from the float32 weights; see
      :func:`lowbit_optax.with_master`.

    >>> from flax import nnx
    >>> import lowbit_optax
    >>> model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    >>> tx = cast_model(model, lowbit_optax.extra_bits_adamw(1e-3))
    >>> model.kernel[...].dtype, model.bias[...].dtype
    (dtype(bfloat16), dtype('float32'))
    """
    master = nnx.state(model, wrt)
    if not jax.tree.leaves(master):
        raise ValueError(
            "cast_model: model must be an nnx module with parameters of the type "
            f"{brief(wrt)}, got {brief(model)}"
        )
    params, _ = from_master(tx, master, param_dtype, keep_float32)
    start = with_master(tx, master)
    nnx.update(model, params)  # also changes the arrays in master
    return start


def nnx_optimizer(
    model: typing.Any,
    tx: optax.GradientTransformation,
    *,
    wrt: typing.Any = nnx.Param,
    param_dtype: jax.typing.DTypeLike | None = None,
    keep_float32: KeepFloat32 = is_bias_or_norm,
) -> "nnx.Optimizer[typing.Any]":
    """Cast an nnx model to bfloat16, and create an ``nnx.Optimizer``.

    Args:
      model, tx, wrt, param_dtype, keep_float32: see :func:`cast_model`.

    Returns:
      An ``nnx.Optimizer`` with :func:`lowbit_optax.direct_updates`.

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
