"""``value_and_update``: the value of a loss, and its parameters after a step on it."""

import functools
import inspect
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._tables import Explanation
from lowbit_optax._types import OptState, Params
from lowbit_optax.release.host_memory import with_memory_kind
from lowbit_optax.release.plan import loss_scaled, plan_release, without_scale
from lowbit_optax.release.released_step import released_step
from lowbit_optax.release.traced_loss import trace_loss

_Value = typing.TypeVar("_Value")


def value_and_update(
    loss_fn: Callable[..., _Value],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    max_grad_norm: float | None = None,
    overflow: str = "exact",
    state_memory: str = "device",
    grad_dtype: jax.typing.DTypeLike = jnp.float32,
) -> Callable[
    typing.Concatenate[Params, OptState, ...],
    tuple[_Value, Params, *tuple[OptState, ...]],
]:
    """A training step that updates parameters during the backward pass.

    The step gives the result of

        value, grads = jax.value_and_grad(loss_fn)(params, *args)
        params, opt_state = lowbit_optax.step(tx, params, opt_state, grads)

    computed in one backward pass. Each parameter is updated in place as soon as its
    gradient is complete, and the gradient is then dropped. Put the step under
    ``jax.jit``, and donate parameters and state.

    The gradient of a parameter is whole once the backward pass is past the first use of
    it in ``loss_fn``. Barriers keep the compiler from going on before the update. Small
    gradients wait for each other, and those with fewer than 4,096 elements for the end.
    Each parameter passes through :func:`released`, and scans over parameters that can
    be updated layer by layer run like :func:`scan`. Between matrix products and
    convolutions, the backward pass recomputes elementwise operations and random bits
    instead of keeping their results.

    A stack of parameters is updated layer by layer if exactly one ``jax.lax.scan``, or
    flax's ``nn.scan``, runs over it, nothing else reads it, each layer has at least
    4,096 elements, and the optimizer can update one layer alone. Cast it in the scan's
    body, not before the scan. Parameters under one ``jax.checkpoint`` are updated
    together. :func:`explain` reports when each parameter is updated, and why.

    The operations are those above, on the same numbers and in the same order: compiled
    one at a time, they give the same bits. As XLA compiles by default, last bits may
    differ: sums of products may be contracted; gradients in bfloat16 that are added up,
    of a parameter that is used several times, may stay in float32
    (``xla_allow_excess_precision``); a gradient that is scattered may be added to the
    momentum of ``optax.sgd`` in another order. A function under ``jit`` that reads
    several parameters is inlined, which may change the order in which cotangents are
    added.

    Args:
      loss_fn: called as ``loss_fn(params, *args, **kwargs)``; returns a real scalar, or
        ``(loss, aux)``. To use a :class:`QuantizedTensor` it calls
        :func:`lowbit_optax.lpmm.dequantize`, for stacked layers in the scan's body.
      tx: an optax transformation, or :func:`lowbit_optax.with_loss_scale` around one;
        the loss is then scaled here, and not in ``loss_fn``. The update of one layer in
        a loop must not need the gradients of other parameters. A stack that is updated
        as a whole, by its norm or by a product of matrices, waits for its whole
        gradient. Outside loops, parameters whose updates need each other's gradients
        wait for the end.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      max_grad_norm: clip the gradients of all parameters to this global norm, as
        ``optax.clip_by_global_norm`` would before ``tx``. It takes two backward passes
        after one forward pass, the first for the norm, which keeps no gradients.
      overflow: what happens if gradients overflow under the loss scale of ``tx``.

        - ``"exact"``: an extra backward pass, shared with ``max_grad_norm``, checks all
          gradients first. If any overflows, no bit changes but in the scale's state.
        - ``"layer"``: in one pass; a layer of a scan, or leaves that are updated
          together, are skipped if their own gradients overflow. The scale falls, too.
      state_memory: where the state of stacks is kept that are updated in a loop:
        ``"device"``, or ``"pinned_host"``, host memory. There a layer's slice is copied
        to the device while the layer's gradients are computed, and back after the
        update. All other state is on the device. A state that lies elsewhere is moved;
        :func:`host_shardings` places it before. The numbers are the same.
      grad_dtype: of the gradients of QuantizedTensors; any float dtype.

    Returns:
      A function ``(params, opt_state, *args, **kwargs) -> (value, params, opt_state)``.
      The value is the loss or ``(loss, aux)`` before the step. ``opt_state`` is that of
      ``tx.init(params)``, as in the ordinary step, so training can change between both.
      With ``overflow="layer"`` there is a fourth result, a tree like the parameters of
      bools, whether a leaf was skipped, or bool[layers] where it was updated in a loop.

    Raises:
      ValueError: if ``max_grad_norm`` is not a positive number; if ``overflow`` is not
        as above, or ``"layer"`` without a loss scale or with ``max_grad_norm``; if
        ``state_memory`` is not as above, or the device has no such memory; when the
        step is called, if a loss scale is inside another transformation, or if ``tx``
        needs the gradients of several parameters at once, one of which would be updated
        in a loop.
      TypeError: if ``grad_dtype`` is not a float dtype; when the step is called, if a
        parameter is not an array, if the loss is not a real scalar, or if ``loss_fn``
        computes with a QuantizedTensor that it has not dequantised.

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
    if max_grad_norm is not None and not _is_positive(max_grad_norm):
        raise ValueError(
            "release: max_grad_norm must be a positive number, or None for no "
            f"clipping; it is {max_grad_norm!r}"
        )
    _check_options(overflow, state_memory, tx, max_grad_norm)

    def with_update(params, opt_state, *args, **kwargs):
        loss, plan = planned(params, opt_state, args, kwargs)
        options = max_grad_norm, overflow, state_memory
        return released_step(loss, plan, tx, opt_state, *options)

    return _named_after(loss_fn, with_update)


def explain(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    overflow: str = "exact",
    state_memory: str = "device",
    grad_dtype: jax.typing.DTypeLike = jnp.float32,
) -> Callable:
    """When :func:`value_and_update` updates each parameter; nothing is run.

    Args:
      loss_fn, tx, has_aux, overflow, state_memory, grad_dtype: as for
        :func:`value_and_update`.

    Returns:
      A function of ``(params, opt_state, *args, **kwargs)``, arrays or
      ShapeDtypeStructs. It returns a dictionary from the parameters' paths to
      ``"in the loop"`` of a scan, ``"in the backward pass, update 1 of 3"``, with the
      number of leaves beside it and the operation that the pass must be past, or
      ``"after the backward pass: "`` and the reason. Of stacked parameters that are not
      updated in the loop of their scan it says why. With a loss scale each also says
      which overflows leave the parameter as it is; with
      ``state_memory="pinned_host"``, where its state is.

    Raises:
      ValueError, TypeError: as :func:`value_and_update` does.

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
    _check_options(overflow, state_memory, tx, None)

    def with_shapes(params, opt_state, *args, **kwargs):
        _, plan = planned(params, opt_state, args, kwargs)
        in_loops = {leaf.name for leaf in plan.parts.stacks}

        def complete(name: str, report: str) -> str:
            unless = _unless(report, overflow) if loss_scaled(tx) is not None else ""
            where = "in" if name in in_loops else "not in"
            is_on_host = state_memory == "pinned_host"
            place = f"; its state is {where} host memory" if is_on_host else ""
            return report + unless + place

        found = {name: complete(name, x) for name, x in plan.reports.items()}
        return Explanation(found)

    return with_shapes


def _planned(loss_fn: Callable, tx, has_aux: bool, grad_dtype) -> Callable:
    """``(params, opt_state, args, kwargs) -> (traced loss, plan)``."""
    dtype = float_dtype("release: grad_dtype", grad_dtype)

    def planned(params, opt_state, args, kwargs):
        loss = trace_loss(loss_fn, has_aux, dtype, params, args, kwargs)
        return loss, plan_release(loss, tx, opt_state)

    return planned


def _check_options(overflow: str, state_memory: str, tx, max_grad_norm) -> None:
    if state_memory not in ("device", "pinned_host"):
        raise ValueError(
            "release: state_memory must be 'device' or 'pinned_host'; it is "
            f"{state_memory!r}"
        )
    if overflow not in ("exact", "layer"):
        raise ValueError(
            f"release: overflow must be 'exact' or 'layer'; it is {overflow!r}"
        )
    if overflow == "exact":
        return
    if loss_scaled(tx) is None:
        raise ValueError(
            "release: overflow='layer' is for an optimizer with a loss scale; accepted "
            "is with_loss_scale(tx, scaling)"
        )
    if max_grad_norm is not None:
        raise ValueError(
            "release: overflow='layer' cannot be combined with max_grad_norm, which is "
            f"{max_grad_norm!r}; use overflow='exact', which shares the extra backward "
            "pass that clipping needs"
        )


def _unless(report: str, overflow: str) -> str:
    """What is added to the report of a leaf's update about the loss scale."""
    if overflow == "exact":
        return "; not if any gradient overflows, which a pass before finds out"
    if report == "in the loop":
        return "; not a layer whose gradients overflow"
    return "; not if a gradient of this update overflows"


def _is_positive(number) -> bool:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return is_number and number > 0


def _named_after(loss_fn: Callable, with_update: Callable) -> Callable:
    """Give a step the loss's name, and the argument names that ``jax.jit`` looks up."""
    try:
        _, *rest = inspect.signature(loss_fn).parameters.values()
        first = list(inspect.signature(with_update).parameters.values())[:2]
        signature = inspect.Signature([*first, *rest])
    except ValueError:  # a builtin, or a loss that has an argument opt_state itself
        signature = inspect.signature(with_update)
    functools.update_wrapper(with_update, loss_fn)
    # jit would look up the names in the wrapped function, which has no opt_state.
    attributes = vars(with_update)
    del attributes["__wrapped__"]
    attributes["__signature__"] = signature
    return with_update


def host_shardings(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    grad_dtype: jax.typing.DTypeLike = jnp.float32,
) -> Callable:
    """Shardings of a state that starts where ``state_memory="pinned_host"`` keeps it.

    The state of stacks that are updated layer by layer is in host memory, all other
    state on the device; :func:`explain` tells which. Nothing is run.

    Args:
      loss_fn, tx, has_aux, grad_dtype: as for :func:`value_and_update`.

    Returns:
      A function of ``(params, opt_state, *args, **kwargs)``, arrays or
      ShapeDtypeStructs, to a tree like ``opt_state`` of shardings: those of its arrays
      with another memory kind. A ShapeDtypeStruct without a sharding is on the first
      device. Give the tree to ``jax.device_put``, or to ``jax.jit(tx.init,
      out_shardings=...)``, so that the state starts in host memory.

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
    planned = _planned(loss_fn, tx, has_aux, grad_dtype)

    def with_shapes(params, opt_state, *args, **kwargs):
        _, plan = planned(params, opt_state, args, kwargs)
        stacks = plan.stack_numbers
        leaves, structure = jax.tree.flatten(without_scale(tx, opt_state)[1])
        marks = structure.unflatten([n in stacks for n in range(len(leaves))])
        # A loss scale's own numbers stay on the device.
        if loss_scaled(tx) is not None:
            around = jax.tree.map(lambda _: False, opt_state)
            marks = around._replace(inner_state=marks)

        def sharding(path, leaf, is_stack: bool):
            kind = "pinned_host" if is_stack else "device"
            return with_memory_kind(jax.tree_util.keystr(path), leaf, kind)

        return jax.tree_util.tree_map_with_path(sharding, opt_state, marks)

    return with_shapes
