"""Place the optimizer state in host memory, except for counts and other scalars."""

from collections.abc import Sequence

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from lowbit_optax._arguments import check_transformation
from lowbit_optax._step import trees
from lowbit_optax._types import PyTree, Transformation
from lowbit_optax.states.host_memory import devices_of, with_memory_kind
from lowbit_optax.states.sharding import known_shardings, state_shardings
from lowbit_optax.states.state_leaves import (
    StateLeaf,
    is_scalar_of_the_state,
    state_leaves,
)


def host_shardings(
    tx: Transformation,
    params: PyTree,
    shardings: PyTree = None,
    *,
    over: str | Sequence[str] = (),
):
    """Return shardings that place the state of parameters in host memory.

    The moments, residuals, packed words and scales of parameters are in ``pinned_host``
    memory. Other arrays, such as counts, seeds and loss scales, are on the device.
    :func:`lowbit_optax.step` in ``jax.jit`` then updates one group of parameters at a
    time, and returns a state in the same places.

    Put a state there with ``jax.device_put``. With the ``out_shardings`` of ``jax.jit``
    and from a checkpointer, arrays reach host memory, but JAX gives them the types of
    arrays on the device, and a compiled step would move them there. Such a state needs
    ``jax.jit(lambda state: jax.device_put(state, shardings))(state)`` before the first
    step.

    Args:
      tx: an optax transformation.
      params: tree of arrays or ShapeDtypeStructs. A QuantizedTensor is one leaf.
      shardings, over: see :func:`lowbit_optax.state_shardings`. If neither shardings
        nor a mesh is known, the state is on the device of the parameters, or on the
        first device for ShapeDtypeStructs.

    Returns:
      A tree of shardings like ``tx.init(params)``.

    Raises:
      TypeError, ValueError: see :func:`lowbit_optax.state_shardings`.
      ValueError: if a device has no memory of the kind ``pinned_host``.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> tx = lowbit_optax.lowbit_adamw(1e-3)
    >>> shardings = host_shardings(tx, params)
    >>> init = jax.jit(lambda params: jax.device_put(tx.init(params), shardings))
    >>> state = init(params)
    >>> state.residual.tree["w"].sharding.memory_kind, state.count.sharding.memory_kind
    ('pinned_host', 'device')
    """
    check_transformation("host_shardings", "tx", tx)
    shapes = {name: tuple(x.shape) for name, x in trees.by_path(params).items()}
    state = jax.eval_shape(tx.init, trees.abstract(params))
    devices = _devices(params)
    is_sharded = shardings is not None or bool(over) or len(devices) > 1
    if is_sharded or not jax.sharding.get_mesh().empty or known_shardings(tx, params):
        placed = state_shardings(tx, params, shardings, over=over)
    else:
        one = SingleDeviceSharding(next(iter(devices), jax.devices()[0]))
        placed = jax.tree.map(lambda _: one, state)

    def in_memory(part: StateLeaf, sharding: Sharding) -> Sharding:
        owner, what = part.owner, f"state{jax.tree_util.keystr(part.path)}"
        stays = owner is None or is_scalar_of_the_state(part, shapes[owner])
        kind = "device" if stays or part.kind == "blank" else "pinned_host"
        return with_memory_kind(f"host_shardings: {what}", sharding, kind)

    leaves = map(in_memory, state_leaves(params, state), jax.tree.leaves(placed))
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _devices(params: PyTree) -> set:
    """Return the devices of the parameters whose sharding is known."""
    known = (getattr(x, "sharding", None) for x in jax.tree.leaves(params))
    return set().union(*(devices_of(x) for x in known if x is not None))
