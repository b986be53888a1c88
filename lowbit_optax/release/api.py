"""``value_and_update``: a loss's value, and its parameters after a step on it."""

import functools
import inspect
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax.release import plan as planning
from lowbit_optax.release import traced_loss as tracing
from lowbit_optax.release.backward import Rule, released_scan
from lowbit_optax.release.plan import Plan
from lowbit_optax.release.rules import Optimizer, SumOfSquares, Update, squares
from lowbit_optax.release.traced_loss import Traced


def value_and_update(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    max_grad_norm: float | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Callable:
    """A loss's value, and parameters and state after one step, without all gradients.

        value, grads = jax.value_and_grad(loss_fn)(params, *args)
        params, opt_state = lowbit_optax.step(tx, params, opt_state, grads)

    in one backward pass, in which the parameters that ``loss_fn`` scans over
    (:func:`lowbit_optax.release.scan`, ``lax.scan``, flax's ``nn.scan``) are updated
    layer by layer, in place, each as soon as its gradient is there; the gradient is
    then forgotten. All other parameters are updated when the pass is through. jit it
    and donate parameters and state.

    A parameter is updated inside the loop if nothing but one scan reads it, as it is:
    not cast before (cast in the body), not used elsewhere. Where ``loss_fn`` uses it in
    more places its whole gradient is summed up first. :func:`explain` says which
    parameters go which way.

    Args:
      loss_fn: called as ``loss_fn(params, *args, **kwargs)``; returns a real scalar, or
        ``(loss, aux)``. It dequantises a :class:`QuantizedTensor` itself, by
        :func:`lowbit_optax.dequantize`, in the scan's body for stacks.
      tx: an optax transformation. Inside it no update may need the gradients of several
        parameters. What is done to a stacked leaf as a whole (its norm, a matrix
        product) makes it wait for its whole gradient.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      max_grad_norm: clip the gradients of all parameters to this global norm, as
        ``optax.clip_by_global_norm`` before ``tx``. It takes two backward passes: the
        first for the norm alone.
      dtype: of the gradients of QuantizedTensors.

    Returns:
      A function ``(params, opt_state, *args, **kwargs) -> (value, params, opt_state)``,
      the value being the loss or ``(loss, aux)`` before the step. ``opt_state`` is that
      of ``tx.init(params)`` and of the ordinary step.

    Raises:
      ValueError: when called, if ``tx`` needs several gradients at once.
      TypeError: if the loss is no real scalar.

    References:
      Lewandowski, Kosson 2023, section 3.2, "Fusing backward pass and optimizer step".

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> from lowbit_optax import release
    >>> params = {"layers": jnp.full((3, 64, 64), 0.01, jnp.bfloat16)}
    >>> def loss_fn(params, x):
    ...     body = lambda x, w: (jnp.tanh(x @ w), None)
    ...     x, _ = release.scan(body, x, params["layers"])
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
    dtype = _checked_dtype(dtype)
    if max_grad_norm is not None and not _is_positive(max_grad_norm):
        raise ValueError(
            f"release: max_grad_norm is {max_grad_norm!r}; accepted are positive "
            "numbers, and None for no clipping"
        )

    def with_update(params, opt_state, *args, **kwargs):
        traced = tracing.trace(loss_fn, has_aux, dtype, params, args, kwargs)
        plan = planning.plan(traced, tx, opt_state)
        change = lambda grad: grad
        if max_grad_norm is not None:
            change = _clipping(traced, plan, max_grad_norm)
        return _update(traced, plan, tx, opt_state, change)

    return _named_after(loss_fn, with_update)


def explain(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Callable:
    """Where :func:`value_and_update` updates each parameter, without running anything.

    Args:
      loss_fn, tx, has_aux, dtype: as there.

    Returns:
      A function of ``(params, opt_state, *args, **kwargs)``, arrays or
      ShapeDtypeStructs, that returns a dictionary from the parameters' paths to
      ``"in the loop"`` or the reason why not.

    >>> import jax.numpy as jnp, optax
    >>> from lowbit_optax import release
    >>> params = {"layers": jnp.ones((3, 64, 64)), "head": jnp.ones(64)}
    >>> def loss_fn(params, x):
    ...     body = lambda x, w: (x @ w, None)
    ...     return release.scan(body, x, params["layers"])[0] @ params["head"]
    >>> tx = optax.adam(1e-3)
    >>> explain(loss_fn, tx)(params, tx.init(params), jnp.ones(64))
    {"['head']": 'after it: no scan runs over it', "['layers']": 'in the loop'}
    """
    dtype = _checked_dtype(dtype)

    def with_shapes(params, opt_state, *args, **kwargs):
        traced = tracing.trace(loss_fn, has_aux, dtype, params, args, kwargs)
        plan = planning.plan(traced, tx, opt_state)
        return {
            leaf.name: "in the loop"
            if leaf.name in plan.slots
            else f"after it: {plan.reasons[leaf.name]}"
            for leaf in traced.leaves
        }

    return with_shapes


def _checked_dtype(dtype) -> jnp.dtype:
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"release: dtype is {jnp.dtype(dtype)}, not a float dtype")
    return jnp.dtype(dtype)


def _is_positive(number) -> bool:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return is_number and number > 0


def _named_after(loss_fn: Callable, with_update: Callable) -> Callable:
    """With the loss's name, and arguments as jit's ``static_argnames`` sees them."""
    try:
        _, *rest = inspect.signature(loss_fn).parameters.values()
        own = list(inspect.signature(with_update).parameters.values())[:2]
        signature = inspect.Signature([*own, *rest])
    except ValueError:  # a builtin, or a name that is there already
        signature = inspect.signature(with_update)
    functools.update_wrapper(with_update, loss_fn)
    del with_update.__wrapped__
    with_update.__signature__ = signature
    return with_update


def _update(traced: Traced, plan: Plan, tx, opt_state, change: Callable):
    """The value, and parameters and state after the step."""
    state, structure = jax.tree.flatten(opt_state)
    optimizer = Optimizer(tx, state, structure, plan.slots, change)
    rules = [Update(traced, released, optimizer) for released in plan.scans]
    results, handles, grads = _differentiate(traced, plan, rules)
    # For the released leaves it is a step of zero gradients, which nothing reads.
    params, state = optimizer.step(traced, grads, {}, {})
    for rule, handle in zip(rules, handles, strict=True):
        values, parts = optimizer.sort(rule.released.leaves, rule.stacks(handle))
        params |= values
        for number, part in parts.items():
            state[number] = part
    return (
        traced.result(results),
        traced.tree(lambda leaf: params[leaf.name]),
        jax.tree.unflatten(structure, state),
    )


def _clipping(traced: Traced, plan: Plan, most: float) -> Callable:
    """``optax.clip_by_global_norm`` of one gradient, by the norm of all of them."""
    rules = [SumOfSquares(released) for released in plan.scans]
    _, sums, grads = _differentiate(traced, plan, rules)
    norm = jnp.sqrt(sum([*sums, *map(squares, grads.values())], jnp.float32(0)))

    def clip(grad):
        clipped = grad.astype(jnp.float32) / norm * jnp.float32(most)
        return jnp.where(norm < jnp.float32(most), grad, clipped.astype(grad.dtype))

    return clip


def _differentiate(traced: Traced, plan: Plan, rules: Sequence[Rule]):
    """One backward pass.

    Args:
      traced, plan: of the loss.
      rules: for the plan's scans.

    Returns:
      ``(results, handles, grads)``: the loss's flat results, what the rules carried
      through their loops, and by name the gradients of the other leaves.
    """
    program = traced.program
    rest = [x for x in traced.leaves if x.slot is not None and x.name not in plan.slots]
    steps = [released.step for released in plan.scans]
    made = program.depends_on([leaf.slot for leaf in rest], steps)

    def run(handles, values):
        given = {leaf.slot: x for leaf, x in zip(rest, values, strict=True)}
        arguments = []
        for leaf in traced.leaves:
            arrays = zip(leaf.parts, leaf.arrays, strict=True)
            arguments += [given.get(part, array) for part, array in arrays]
            if leaf.is_quantized:
                arguments.append(given.get(leaf.slot))
        instead = {
            released.step: functools.partial(
                released_scan,
                released.step.scan,
                released.roles(program, made),
                rule,
                handle,
            )
            for released, rule, handle in zip(plan.scans, rules, handles, strict=True)
        }
        loss, *aux = program.evaluate([*arguments, *traced.rest], instead)
        return loss, aux

    values = [x.no_gradient() if x.is_quantized else x.value for x in rest]
    (loss, aux), (handles, grads) = jax.value_and_grad(
        run, argnums=(0, 1), has_aux=True
    )([rule.handle() for rule in rules], values)
    return [loss, *aux], handles, {x.name: g for x, g in zip(rest, grads, strict=True)}
