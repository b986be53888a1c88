"""``host_shardings``: where the state lies when that of layers is in host memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lowbit_optax.release.gates import loss_scaled, without_scale
from lowbit_optax.release.host_memory import with_memory_kind
from lowbit_optax.release.plan import plan_release
from lowbit_optax.release.traced_loss import trace_loss


def host_shardings(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Callable:
    """Shardings of the state with which ``state_memory="pinned_host"`` begins.

    The state of stacks that are updated layer by layer is in host memory, all other
    state on the device; :func:`explain` tells which. Nothing is run.

    Args:
      loss_fn, tx, has_aux, dtype: as for :func:`value_and_update`.

    Returns:
      A function of ``(params, opt_state, *args, **kwargs)``, arrays or
      ShapeDtypeStructs, to a tree like ``opt_state`` of shardings: those of its arrays
      with another memory kind. A ShapeDtypeStruct without a sharding is of the first
      device. Give it to ``jax.device_put``, or to ``jax.jit(tx.init,
      out_shardings=...)``, by which the state begins in host memory.

    Raises:
      ValueError: if a device has no memory of the kind ``pinned_host``.
      ValueError, TypeError: as :func:`value_and_update` does.

    >>> import jax, jax.numpy as jnp, optax
    >>> from lowbit_optax import release
    >>> params = {"layers": jnp.ones((3, 64, 64)), "head": jnp.ones(64)}
    >>> def loss_fn(params, x):
    ...     body = lambda x, w: (x @ w, None)
    ...     return jax.lax.scan(body, x, params["layers"])[0] @ params["head"]
    >>> tx = optax.sgd(1e-3, momentum=0.9)
    >>> state, x = jax.eval_shape(tx.init, params), jnp.ones(64)
    >>> shardings = host_shardings(loss_fn, tx)(params, state, x)
    >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
    >>> momentum = state[0].trace
    >>> momentum["layers"].sharding.memory_kind, momentum["head"].sharding.memory_kind
    ('pinned_host', 'device')
    """

    def with_shapes(params, opt_state, *args, **kwargs):
        inner, inner_state = without_scale(tx, opt_state)
        loss = trace_loss(loss_fn, has_aux, dtype, params, args, kwargs)
        stacks = plan_release(loss, inner, inner_state).stack_numbers
        # A loss scale's own numbers stay on the device.
        marks = jax.tree.unflatten(
            jax.tree.structure(inner_state),
            [n in stacks for n in range(len(jax.tree.leaves(inner_state)))],
        )
        if loss_scaled(tx) is not None:
            around = jax.tree.map(lambda _: False, opt_state)
            marks = around._replace(inner_state=marks)

        def sharding(path, leaf, is_stack: bool):
            kind = "pinned_host" if is_stack else "device"
            return with_memory_kind(jax.tree_util.keystr(path), leaf, kind)

        return jax.tree_util.tree_map_with_path(sharding, opt_state, marks)

    return with_shapes
