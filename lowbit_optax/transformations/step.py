"""``step``: run a step of any transformation, which a guard may skip."""

import typing

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._arguments import check_transformation
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import REPLACE, DirectUpdate, Landing, apply_leaf
from lowbit_optax._step import context, trees
from lowbit_optax._step.guard import UNGUARDED, Guard
from lowbit_optax._step.state import LowbitState, check_made_by
from lowbit_optax._step.stepper import stepper_of, with_extra_args
from lowbit_optax._step.wrapped import step_wrapped, trace_wrapper
from lowbit_optax._types import OptState, Params, PyTree, Transformation
from lowbit_optax.formats.quantized_tensor import is_quantized
from lowbit_optax.states.host_memory import is_on_host
from lowbit_optax.states.host_step import step_by_group


def step(
    tx: Transformation,
    params: Params,
    opt_state: OptState,
    grads: PyTree,
    **extra_args: typing.Any,
) -> tuple[Params, OptState]:
    """Run one optimizer step and return the new parameters and optimizer state.

    This is the fast path for transformations made with :func:`lowbit`, which includes
    the aliases: it computes the new parameters directly, without updates. It also works
    inside ``with_loss_scale``, ``accumulate_gradients``, and optax's wrappers that do
    not change updates (``chain`` with ``lowbit`` last, ``masked``, ``partition``,
    ``inject_hyperparams``) or that skip steps (``apply_if_finite``,
    ``conditionally_mask``). For all other transformations, such as ``MultiSteps``, it
    calls ``update`` and :func:`apply_updates`.

    Elementwise operations of such wrappers on gradients, including scalars such as a
    global norm, run in float32 inside the kernels. Therefore
    ``chain(clip, lowbit(adamw))`` steps like ``lowbit(chain(clip, adamw))``. ``update``
    would round their results to the dtype of the gradients.

    With ``jax.jit``, donate parameters and state, and return them in the same order,
    because XLA pairs donated buffers with results in order::

        jax.jit(functools.partial(lowbit_optax.step, tx), donate_argnums=(0, 1))

    The state may be in host memory, where :func:`lowbit_optax.host_shardings` places
    it. The compiled step updates one group of parameters at a time. While it copies the
    new state of a group to the host, it copies the state of the next group to the
    device. The results are the same.

    Args:
      tx: an optax transformation.
      params: tree of parameters.
      opt_state: the state of ``tx``.
      grads: tree of gradients in any float dtype.
      **extra_args: passed to ``tx.update``.

    Returns:
      ``(params, opt_state)``.

    Raises:
      TypeError: if ``tx`` is not a transformation.
      ValueError: if a transformation after or around ``lowbit`` changes its updates.
        Put it inside ``lowbit``. ``tx.update`` cannot detect this.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = jnp.ones(4, jnp.bfloat16)
    >>> tx = lowbit_optax.kahan_sgd(0.5)
    >>> params, state = step(tx, params, tx.init(params), jnp.ones(4))
    >>> params
    Array([0.5, 0.5, 0.5, 0.5], dtype=bfloat16)
    """
    if any(map(is_on_host, jax.tree.leaves(opt_state))):
        on_device = lambda *arguments: step(tx, *arguments, **extra_args)
        return step_by_group(on_device, params, opt_state, grads)
    check_transformation("step", "tx", tx)
    with context.changed(wants_params=False):
        return guarded(tx, params, opt_state, grads, UNGUARDED, REPLACE, extra_args)


def apply_updates(params: Params, updates: PyTree) -> Params:
    """Add updates to parameters; also supports float8 and strict dtype promotion.

    Unlike optax, it does not change integers, booleans and PRNG keys.

    Args:
      params: tree of parameters; None leaves stay None.
      updates: tree with the same structure.

    Returns:
      ``params + updates``, rounded to nearest in the dtype of each parameter.

    >>> import jax.numpy as jnp
    >>> apply_updates(jnp.float8_e4m3fn(1.0), jnp.float32(0.3))
    Array(1.25, dtype=float8_e4m3fn)
    """

    def apply(param: typing.Any, update):
        if param is None:
            return None
        if is_quantized(param):
            # Only this package's transformations return differences of codes.
            arrays = jax.tree.leaves(update) if is_quantized(update) else []
            is_trained = arrays and arrays[0].dtype != jax.dtypes.float0
            return optax.apply_updates(param, update) if is_trained else param
        if isinstance(update, DirectUpdate):
            return param + update
        if not trees.is_inexact(jnp.asarray(param)):
            return param
        if not is_narrow(jnp.asarray(param).dtype):
            return optax.apply_updates(param, update)
        return apply_leaf(param, update)

    is_leaf = lambda x: x is None or is_quantized(x)
    return jax.tree.map(apply, params, updates, is_leaf=is_leaf)


def guarded(
    tx,
    params,
    state,
    grads,
    guard: Guard,
    landing: Landing,
    extra_args: dict,
) -> tuple[typing.Any, typing.Any]:
    """Run a step unless the guard skips it.

    Args:
      tx: the transformation.
      params, state: the parameters, and the state of ``tx``.
      grads: the scaled gradients.
      guard: unscales the gradients, and decides on the device whether to step.
      landing: ``REPLACE`` for new parameters, ``ADD`` for updates.
      extra_args: passed to the transformation.

    Returns:
      ``(new params or updates, new state)``.

    Raises:
      ChangedUpdateError: if a wrapper changes rounded updates.
    """
    stepper = stepper_of(tx)
    if stepper is not None:
        return stepper.run(params, state, grads, landing, extra_args, guard)
    tx = with_extra_args(tx)
    try:
        return _by_update(tx, params, state, grads, guard, landing, extra_args)
    except (AttributeError, KeyError, TypeError, ValueError):
        # Wrappers raise many errors for the state of another transformation.
        check_made_by("step: tx", tx, params, state)
        _check_not_none(params, grads)
        raise


def _check_not_none(params, grads) -> None:
    """Raise a TypeError if the gradient of a parameter is None."""
    names, is_none = trees.named_leaves(params)[0], lambda x: x is None
    for path, grad in jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_none):
        name = jax.tree_util.keystr(path)
        if grad is None and name in names:
            message = f"step: gradient of params{name} must be an array, got None"
            raise TypeError(message) from None


def _by_update(tx, params, state, grads, guard, landing: Landing, extra_args):
    """Run a step of a transformation that is not from this package."""
    if landing.is_direct:
        arguments = tx, params, state, grads, extra_args, apply_updates, guard
        direct = step_wrapped(*arguments)
        if direct is not None:
            return direct
    else:
        trace_wrapper(tx, grads, state, params, extra_args)  # raises errors
    _check_frozen(params, state)
    # Other transformations also run in skipped steps, which drop the results.
    grads = guard.unscaled(grads)
    new, new_state = tx.update(grads, state, params, **extra_args)
    if landing.is_direct:
        new = guard.chosen(apply_updates(params, new), params)
    else:
        new = guard.updates(new)
    return new, guard.chosen(new_state, state)


def _check_frozen(params, state) -> None:
    """Raise a TypeError if no transformation of this package updates quantized weights.

    ``optax.masked`` and ``partition`` may freeze them.
    """
    leaves = trees.by_path(params).items()
    name = next((name for name, x in leaves if is_quantized(x)), None)
    owners = LowbitState, optax.MaskedState
    if name is not None and not trees.all_of(owners, state):
        raise TypeError(
            f"step: params{name} is quantized, and optax cannot update it. Use "
            "lpmm_adam, or freeze it with optax.partition and optax.set_to_zero"
        )
