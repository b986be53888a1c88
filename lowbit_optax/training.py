"""flax's TrainState on the fast path. Needs the ``flax`` extra."""

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from lowbit_optax.transformation import step


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

    def apply_gradients(self, *, grads, **kwargs):
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
