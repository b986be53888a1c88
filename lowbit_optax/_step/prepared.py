"""What a step needs before the inner update: masters, float32 gradients and moments."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import (
    Draws,
    RandomBits,
    leaf_number,
    moment_draws,
    random_bits,
    random_keys,
)
from lowbit_optax._step import context, trees
from lowbit_optax._step.choices import Choices
from lowbit_optax._step.guard import Guard, Unguarded, neutral_updates
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.shards import axes_of_shards, number_of_shard
from lowbit_optax._step.stacks import (
    bits_at_layers,
    keys_at_layers,
    marked_layerwise,
)
from lowbit_optax._step.state import LowbitState
from lowbit_optax._step.unchanged import unless_still
from lowbit_optax.formats.base import WeightFormat, residual_bits_read


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedStep:
    """Everything that a step needs, checked and decoded.

    Lists have one element per leaf of the parameters, in the order of their tree.

    Args:
      names, params, treedef: paths, leaves and structure of the parameters.
      formats: weight formats; None for leaves that pass through.
      residuals: as the state holds them.
      masters: the parameters that the inner transformation sees.
      given_grads: the gradients as the user gave them.
      grads: the gradients that the inner transformation sees, unscaled by the guard.
      moment_plan: how the inner state is stored.
      inner_state: the inner transformation's state, with its moments in float32.
      stored_inner_state: the same state in its stored form.
      random: random bits for the parameters.
      moment_draws: random numbers for the moments.
      keys: the keys of ``random``, in the form that kernels take, of whole leaves.
      guard: decides whether the step happens.
    """

    names: list[str]
    params: list
    treedef: trees.PyTreeDef
    formats: list[WeightFormat | None]
    residuals: list
    masters: list
    given_grads: list
    grads: list
    moment_plan: MomentPlan
    inner_state: typing.Any
    stored_inner_state: typing.Any
    random: list[RandomBits]
    moment_draws: list[Draws]
    keys: tuple[jax.Array, jax.Array]
    guard: Guard | Unguarded

    def tree(self, leaves: Sequence):
        """A tree with the parameters' structure and these leaves."""
        return self.treedef.unflatten(leaves)

    def inner_update(self, update: Callable, **extra):
        """Call the inner transformation.

        Args:
          update: of the inner transformation, from float32 gradients, its state and the
            masters.
          **extra: for ``update``.

        Returns:
          ``(updates, new inner state)`` in float32, the updates as a list.
        """
        updates, inner_state = update(
            self.tree(self.grads), self.inner_state, self.tree(self.masters), **extra
        )
        updates = trees.parts_of(self.names, self.treedef, updates, "inner updates")
        return updates, inner_state

    def error_parts(self) -> list[int | None]:
        """Per leaf, the part of the inner state that takes its rounding errors."""
        return error_parts(self.names, self.params, self.formats, self.moment_plan)

    def land(self, number: int, update, landing: Landing, still=None) -> "Landed":
        """Add the inner update to the master of a leaf and store it.

        Args:
          number: index of the leaf.
          update: its inner update.
          landing: how the new parameter takes the old one's place.
          still: whether the leaf stays as it is, a truth value; None if it does not.

        Returns:
          The :class:`Landed` leaf.
        """
        format_, param = self.formats[number], self.params[number]
        error = None
        if format_ is None:
            result, residual = update, None
            if landing.is_direct:
                result = optax.apply_updates(param, update)
        else:

            def advance(param, residual, update):
                random = self.random[number]
                return traced_once(_advance, format_, landing)(
                    param, residual, update, random
                )

            residual, result, error = marked_layerwise(
                advance, param, self.residuals[number], update.astype(jnp.float32)
            )
        unchanged = param if landing.is_direct else neutral_updates(result)
        result = unless_still(still, result, unchanged)
        residual = unless_still(still, residual, self.residuals[number])
        if landing.is_direct:
            result = self.guard.chosen(result, param)
        residual = self.guard.chosen(residual, self.residuals[number])
        return Landed(result, residual, error)

    def described_moments(self) -> list:
        """Per part of the inner state, its MomentStorage; None if it is not encoded."""
        return self.moment_plan.describe(self.inner_state)

    def stored_parts(self) -> list:
        """Per part of the inner state, that part in its stored form."""
        structure = jax.tree.structure(self.inner_state)
        return structure.flatten_up_to(
            self.moment_plan.from_parallel_trees(self.stored_inner_state)
        )


class Landed(typing.NamedTuple):
    """A leaf to whose master the inner update is added.

    Args:
      result: the new parameter, or the update.
      residual: the new residual.
      error: what storing the master has lost; None if its format does not ask for it.
    """

    result: typing.Any
    residual: typing.Any
    error: typing.Any


def error_parts(names, leaves, formats, plan: MomentPlan) -> list[int | None]:
    """Per leaf, the part of the inner state that takes its rounding errors, if any.

    Args:
      names, leaves, formats: of the parameters.
      plan: of their moments.

    Raises:
      ValueError: if no leaf has such a moment. One that is frozen needs none.
    """
    fields = {x.error_into for x in formats if x is not None} - {None}
    parts = {field: plan.parts_in(field) for field in fields}
    found: list[int | None] = []
    for name, leaf, format_ in zip(names, leaves, formats, strict=True):
        field = None if format_ is None else format_.error_into
        if field is not None and not parts[field] and leaf.shape:
            raise no_moment_for_errors(name, field)
        found.append(None if field is None else parts[field].get(name))
    return found


def no_moment_for_errors(name: str, field: str) -> ValueError:
    """The error of a leaf that has no moment to take its rounding errors."""
    return ValueError(
        f"lowbit: error_into is {field!r}, but the inner transformation has no float32 "
        f"moment of that name for params{name}; accepted is the field of its momentum, "
        "such as 'mu' of optax.adamw or 'trace' of optax.sgd(..., momentum=0.9), or "
        "error_into=None"
    )


def prepare(
    config: Choices,
    params: optax.Params | None,
    state: LowbitState,
    grads: optax.Updates,
    guard: Guard | Unguarded,
) -> PreparedStep:
    """Check the arguments of a step, join the masters and decode the moments.

    Args:
      config: of the transformation.
      params, state, grads: as in optax.
      guard: decides whether the step happens.

    Raises:
      TypeError, ValueError: naming the leaf at which the arguments do not fit together.
    """
    if params is None:
        raise ValueError(
            "lowbit: update needs params; call tx.update(grads, state, params)"
        )
    if not isinstance(state, LowbitState):
        raise TypeError(
            f"lowbit: state is a {type(state).__name__}, not a LowbitState; was it "
            "made by this transformation's init?"
        )
    names, leaves, treedef = trees.named_leaves(params)
    formats = config.formats_of(names, leaves)
    given_grads = trees.parts_of(names, treedef, grads, "grads")
    residuals = checked_residuals(
        config, names, leaves, treedef, formats, state.residual
    )
    masters = [
        leaf
        if format_ is None
        else marked_layerwise(traced_once(format_.inner_weight), leaf, residual)
        for format_, leaf, residual in zip(formats, leaves, residuals, strict=True)
    ]
    wide_grads = [
        widened_gradient(name, grad, leaf)
        for name, grad, leaf in zip(names, given_grads, leaves, strict=True)
    ]
    expected = jax.eval_shape(config.inner.init, treedef.unflatten(masters))
    plan = config.moment_plan(names, leaves, expected)
    random = random_of_leaves(names, leaves, state.seed, state.count)
    return PreparedStep(
        names=names,
        params=leaves,
        treedef=treedef,
        formats=formats,
        residuals=residuals,
        masters=masters,
        given_grads=given_grads,
        grads=guard.unscaled(wide_grads),
        moment_plan=plan,
        inner_state=plan.decode(state.inner_state),
        stored_inner_state=state.inner_state,
        random=random,
        moment_draws=draws_of_moments(leaves, formats, random),
        keys=keys_at_layers(
            random_keys(state.seed, state.count, _numbers(names)), names, leaves
        ),
        guard=guard,
    )


def _advance(format_: WeightFormat, landing: Landing, param, residual, update, random):
    """The residual, result and error of a leaf."""
    new, after, result = format_.advance(param, residual, update, random, landing)
    if format_.error_into is None:
        return after, result, None
    return after, result, format_.error(param, residual, update, new, after)


def random_of_leaves(names, leaves, seed, count) -> list[RandomBits]:
    """The random bits of each leaf at one step."""
    numbers = _numbers(names)
    if context.current().is_analysed:
        # Those of one leaf must not look as if they depended on what others there are.
        bits = [random_bits(seed, count, [number])[0] for number in numbers]
    else:
        bits = random_bits(seed, count, numbers)
    return [
        x.on_shard(number_of_shard(axes)) if axes else x
        for x, axes in zip(
            bits_at_layers(bits, names, leaves),
            map(axes_of_shards, leaves),
            strict=True,
        )
    ]


def draws_of_moments(leaves, formats, random: list[RandomBits]) -> list[Draws]:
    """Per leaf, the random numbers for its moments."""
    return [
        moment_draws(bits, residual_bits_read(format_, leaf))
        for leaf, format_, bits in zip(leaves, formats, random, strict=True)
    ]


def widened_gradient(name: str, grad, param):
    """The gradient of a leaf, as float32 if it or its parameter is narrower than that.

    Raises:
      TypeError, ValueError: naming the leaf, for a gradient that is not a float array
        of the parameter's shape.
    """
    if trees.is_quantized(grad):
        raise TypeError(
            f"lowbit: gradient of params{name} is a QuantizedTensor; accepted is an "
            f"array of shape {param.shape}, see lowbit_optax.lpmm.value_and_grad"
        )
    if not hasattr(grad, "dtype"):
        raise TypeError(f"lowbit: gradient of params{name} is {grad!r}, not an array")
    if not trees.is_float(param):
        return grad
    if not trees.is_float(grad):
        raise TypeError(
            f"lowbit: gradient of params{name} is {grad.dtype}; accepted are real "
            "floating-point dtypes"
        )
    if grad.shape != param.shape:
        raise ValueError(
            f"lowbit: gradient of params{name} has shape {grad.shape}; its parameter "
            f"has {param.shape}"
        )
    is_wide = not (
        trees.is_quantized(param) or is_narrow(param.dtype) or is_narrow(grad.dtype)
    )
    return grad if is_wide else grad.astype(jnp.float32)


def checked_residuals(
    config: Choices, names, leaves, treedef, formats, residual
) -> list:
    """The residual of each leaf, after checking that it belongs to its parameter."""
    container = config.weights.container
    if type(residual) is not container:
        raise ValueError(
            f"lowbit: the state's residuals are {type(residual).__name__}, but "
            f"{config.weights} keeps {container.__name__}: was this state made by a "
            "transformation with other weights?"
        )
    if not residual:
        return [None] * len(leaves)
    held = trees.parts_of(names, treedef, residual[0], "residuals")
    for name, leaf, format_, part in zip(names, leaves, formats, held, strict=True):
        if format_ is None and part is not None:
            raise ValueError(
                f"lowbit: params{name} is {leaf.dtype}, but the state holds the "
                f"residual of a lower precision, {trees.describe(part)}: was it cast "
                "on the way, as equinox.apply_updates does when it adds float32 "
                "updates? Apply updates by lowbit_optax.apply_updates or "
                "optax.apply_updates, "
                "or step by lowbit_optax.step"
            )
        want = _expected_residual(format_, leaf)
        if part is None and want is not None:
            raise ValueError(
                f"lowbit: params{name} is {leaf.dtype}, but the state has no residual "
                "of it, as of a float32 parameter: was it cast after tx.init? Start "
                "from the float32 parameters by "
                f"lowbit_optax.from_master(tx, params, {leaf.dtype.name!r}), which "
                "casts them and keeps their low bits in the state"
            )
        if trees.describe(part) != trees.describe(want):
            raise ValueError(
                f"lowbit: residual of params{name} is {trees.describe(part)}, but "
                f"{format_ or 'a leaf that passes through'} keeps "
                f"{trees.describe(want)}: was this state made by a transformation with "
                "other weights?"
            )
    return held


def _expected_residual(format_: WeightFormat | None, leaf):
    if format_ is None or trees.is_quantized(leaf):
        return None
    return _residual_like(format_, leaf.shape, leaf.dtype)


@functools.lru_cache(maxsize=4096)
def _residual_like(format_: WeightFormat, shape: tuple[int, ...], dtype):
    return jax.eval_shape(format_.init, jax.ShapeDtypeStruct(shape, dtype))


def _numbers(names: Sequence[str]) -> list[int]:
    return [leaf_number(name) for name in names]
