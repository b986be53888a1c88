"""``value_and_update``: compute a loss, and update parameters in its backward pass."""

import functools
import inspect
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._arguments import check_choice, check_number, check_transformation
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._tables import Explanation
from lowbit_optax._types import Function, OptState, Params
from lowbit_optax.release.plan import plan_release
from lowbit_optax.release.released_step import released_step
from lowbit_optax.release.traced_loss import trace_loss
from lowbit_optax.release.wrappers import check_reduced
from lowbit_optax.states.host_memory import with_memory_kind
from lowbit_optax.transformations.step import step

_Value = typing.TypeVar("_Value")

StateMemory = typing.Literal["device", "pinned_host"]


def value_and_update(
    loss_fn: Callable[..., _Value],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    max_grad_norm: float | None = None,
    state_memory: StateMemory = "device",
    grad_dtype: jax.typing.DTypeLike = jnp.float32,
) -> Callable[
    typing.Concatenate[Params, OptState, ...],
    tuple[_Value, Params, OptState],
]:
    """Return a training step that updates parameters during the backward pass.

    The step has the same result as

        value, grads = jax.value_and_grad(loss_fn)(params, *args)
        params, opt_state = lowbit_optax.step(tx, params, opt_state, grads)

    It updates each parameter in place as soon as its gradient is complete, and frees
    the gradient. Call the step inside ``jax.jit``, and donate parameters and state.

    The gradient of a parameter is complete once the backward pass is past the first use
    of the parameter in ``loss_fn``. Barriers keep the compiler from postponing the
    update. Small parameters are updated in groups, and parameters with fewer than 4,096
    elements at the end. Each parameter passes through :func:`released`, and a scan over
    parameters that can be updated layer by layer runs like :func:`scan`. The backward
    pass recomputes elementwise operations between matrix products and convolutions.

    A stack of parameters is updated layer by layer if exactly one ``jax.lax.scan``, or
    flax's ``nn.scan``, loops over it, nothing else reads it, each layer has at least
    4,096 elements, and the optimizer can update a single layer. Cast it in the body of
    the scan, not before the scan. Parameters of one ``jax.checkpoint`` are updated
    together. :func:`explain` reports when each parameter is updated, and why.

    The step runs the same operations on the same numbers in the same order as the two
    lines above. If each operation is compiled separately, all bits are the same. If XLA
    compiles the whole step, the last bits may differ. XLA may fuse multiplications with
    additions, add the bfloat16 gradients of a parameter that is used several times in
    float32 (``xla_allow_excess_precision``), or add a scattered gradient to the
    momentum of ``optax.sgd`` in another order. A function under ``jit`` that reads
    several parameters is inlined, which may change the order in which cotangents are
    added.

    Args:
      loss_fn: a function ``(params, *args, **kwargs) -> loss`` that returns a real
        scalar or ``(loss, aux)``. To use a :class:`QuantizedTensor`, it must call
        :func:`lowbit_optax.lpmm.dequantize`; for stacked layers, in the scan's body.
      tx: an optax transformation, or :func:`lowbit_optax.with_loss_scale` around one,
        which scales the loss; do not scale it in ``loss_fn``. An extra backward pass
        then checks all gradients before any parameter is updated. In a loop, the update
        of a layer must not need the gradients of other parameters. A stack that is
        updated as a whole, with its norm or a product of matrices, waits for its whole
        gradient. Outside of loops, parameters whose updates need each other's gradients
        are updated at the end.
      has_aux: if True, ``loss_fn`` returns ``(loss, aux)``.
      max_grad_norm: if not None, the gradients of all parameters are clipped to this
        global norm, as with ``optax.clip_by_global_norm`` before ``tx``. The backward
        pass then runs twice after one forward pass. The first run computes the norm
        without keeping gradients. A loss scale uses the same extra pass.
      state_memory: where to store the state of stacks that are updated in a loop:
        ``"device"``, or ``"pinned_host"`` for host memory. With host memory, the step
        copies the state of a layer to the device while it computes the layer's
        gradients, and back after the update. All other state is on the device. The step
        moves state that is in the wrong memory; use :func:`host_shardings` to place it
        in advance. Results do not change.
      grad_dtype: the dtype of gradients of QuantizedTensors, any float dtype.

    Returns:
      A function ``(params, opt_state, *args, **kwargs) -> (value, params, opt_state)``.
      The value is ``loss`` or ``(loss, aux)`` before the step. ``opt_state`` is the
      same state as without release, so you can turn release on or off during training.

    Raises:
      ValueError: if ``max_grad_norm`` or ``state_memory`` has a wrong value; when the
        step is called, if the device has no such memory, if a loss scale is inside
        another transformation, or if an update needs the gradients of several
        parameters, one of which is updated in a loop.
      TypeError: if ``grad_dtype`` is not a float dtype; when the step is called, if a
        parameter is not an array, if the loss is not a real scalar, or if ``loss_fn``
        computes with a QuantizedTensor without dequantizing it.

    References:
      Lewandowski, Kosson 2023, section 3.2, "Fusing backward pass and optimizer step".

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> from lowbit_optax import release
    >>> params = {"layers": jnp.full((3, 64, 64), 0.01, jnp.bfloat16)}
    >>> def loss_fn(params, x):
    ...     body = lambda x, w: (jnp.tanh(x @ w), None)
    ...     x, _ = jax.lax.scan(body, x, params["layers"])
    ...     return jnp.mean(x.astype(jnp.float32) ** 2)
    >>> tx = lowbit_optax.lowbit_adamw(1e-3)
    >>> train_step = jax.jit(
    ...     release.value_and_update(loss_fn, tx), donate_argnums=(0, 1)
    ... )
    >>> x = jnp.ones((8, 64), jnp.bfloat16)
    >>> loss, params, state = train_step(params, tx.init(params), x)
    >>> params["layers"].shape
    (3, 64, 64)
    """
    planned = _planned(loss_fn, tx, has_aux, grad_dtype)
    if max_grad_norm is not None:
        what = "a positive number, or None for no clipping"
        check_number("release", "max_grad_norm", max_grad_norm, lambda x: x > 0, what)
    check_choice("release", "state_memory", state_memory, StateMemory)

    def with_update(params, opt_state, *args, **kwargs):
        loss, plan = planned(params, opt_state, args, kwargs)
        grads = loss.tree_of({x.name: x.gradient for x in loss.leaves})
        check_reduced(functools.partial(step, tx), params, opt_state, grads)
        return released_step(loss, plan, tx, opt_state, max_grad_norm, state_memory)

    return named_after(loss_fn, with_update)


def explain(
    loss_fn: Function,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    grad_dtype: jax.typing.DTypeLike = jnp.float32,
) -> Function:
    """Report when :func:`value_and_update` updates each parameter, without running it.

    Args:
      loss_fn, tx, has_aux, grad_dtype: see :func:`value_and_update`.

    Returns:
      A function of ``(params, opt_state, *args, **kwargs)``, which may be
      ShapeDtypeStructs. It returns a dictionary from paths of parameters to one of:

      - ``"in the loop"``: in the backward loop of its scan. With
        ``state_memory="pinned_host"``, its state is in host memory.
      - ``"in the backward pass, update 1 of 3"``, and ``"; not in the loop: "`` with
        the reason if a scan reads it.
      - ``"after the backward pass: "``, with the reason.

    Raises:
      ValueError, TypeError: see :func:`value_and_update`.

    >>> import jax.numpy as jnp, optax
    >>> from lowbit_optax import release
    >>> params = {"layers": jnp.ones((3, 64, 64)), "head": jnp.ones(64)}
    >>> def loss_fn(params, x):
    ...     body = lambda x, w: (x @ w, None)
    ...     return jax.lax.scan(body, x, params["layers"])[0] @ params["head"]
    >>> tx = optax.adam(1e-3)
    >>> when = explain(loss_fn, tx)(params, tx.init(params), jnp.ones(64))
    >>> when["['layers']"], when["['head']"]
    ('in the loop', 'after the backward pass: it has fewer than 4096 elements')
    """
    planned = _planned(loss_fn, tx, has_aux, grad_dtype)

    def with_shapes(params, opt_state, *args, **kwargs):
        return Explanation(planned(params, opt_state, args, kwargs)[1].reports)

    return with_shapes


def _planned(loss_fn: Callable, tx, has_aux: bool | None, grad_dtype) -> Callable:
    """Return a function ``(params, opt_state, args, kwargs) -> (loss, plan)``."""
    check_transformation("release", "tx", tx)
    dtype = float_dtype("release: grad_dtype", grad_dtype)

    def planned(params, opt_state, args, kwargs):
        loss = trace_loss(loss_fn, has_aux, dtype, params, args, kwargs)
        return loss, plan_release(loss, tx, opt_state)

    return planned


def named_after(loss_fn: Callable, with_update: Callable) -> Callable:
    """Give a step the name of the loss, and argument names for ``jax.jit``."""
    try:
        _, *rest = inspect.signature(loss_fn).parameters.values()
        first = list(inspect.signature(with_update).parameters.values())[:2]
        signature = inspect.Signature([*first, *rest])
    except ValueError:  # a builtin, or a loss with an argument named opt_state
        signature = inspect.signature(with_update)
    functools.update_wrapper(with_update, loss_fn)
    # jit would look up argument names in __wrapped__, which has no opt_state.
    attributes = vars(with_update)
    del attributes["__wrapped__"]
    attributes["__signature__"] = signature
    return with_update


def host_shardings(loss_fn: Function, tx: optax.GradientTransformation) -> Function:
    """Return shardings that place optimizer state in host memory before the first step.

    With ``state_memory="pinned_host"``, the state of stacks that are updated layer by
    layer is in host memory, and all other state is on the device. :func:`explain` lists
    the stacks.

    Args:
      loss_fn, tx: see :func:`value_and_update`. The loss may return ``(loss, aux)``.

    Returns:
      A function of ``(params, opt_state, *args, **kwargs)``, which may be
      ShapeDtypeStructs. It returns a tree of shardings with the structure of
      ``opt_state``: the shardings of its arrays, with the right memory kind. A
      ShapeDtypeStruct without a sharding is placed on the first device. Pass the tree
      to ``jax.device_put`` or to ``jax.jit(tx.init, out_shardings=...)``.

    Raises:
      ValueError: if a device has no memory of the kind ``pinned_host``.
      ValueError, TypeError: see :func:`value_and_update`.

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
    planned = _planned(loss_fn, tx, None, jnp.float32)

    def with_shapes(params, opt_state, *args, **kwargs):
        _, plan = planned(params, opt_state, args, kwargs)
        with_path, structure = jax.tree_util.tree_flatten_with_path(opt_state)
        stacks = plan.parts.stack_numbers
        # The state of a loss scale comes first, and stays on the device.
        first = len(with_path) - len(plan.parts.state)

        def sharding(number: int, path, leaf):
            kind = "pinned_host" if number in stacks else "device"
            what = f"release: state{jax.tree_util.keystr(path)}"
            return with_memory_kind(what, getattr(leaf, "sharding", None), kind)

        return structure.unflatten(
            sharding(n, *each) for n, each in enumerate(with_path, -first)
        )

    return with_shapes
