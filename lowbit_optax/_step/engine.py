"""One step of a wrapped transformation: join, run the inner update, split.

    grads, any float dtype                      new param --> update that lands exactly
        | to float32                                ^
        v                                           | split
    join(param, residual) --> master --> inner.update --> master + update
    decode(codes) --> moments -->          |        --> moments --> encode --> codes

The inner transformation sees whole trees; formats work leaf by leaf. The lists here run
over the parameters' leaves in the order of their tree.
"""

import contextlib
import contextvars
import dataclasses
import functools
import types
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import land, stay
from lowbit_optax._numerics.random_bits import (
    RandomBits,
    leaf_number,
    random_bits,
    random_keys,
)
from lowbit_optax._step import kernel_plan, kernel_step, trees
from lowbit_optax._step.guard import Guard
from lowbit_optax._step.moments import MomentPlan, Moments
from lowbit_optax._step.stacks import is_analysed, layerwise, placed, stacks_to_write
from lowbit_optax.formats.base import WeightFormat
from pallas_kernels.platforms import is_elsewhere


class LowbitState(typing.NamedTuple):
    """State of :func:`lowbit`: parallel trees, each with the parameters' structure.

    Args:
      count: uint32 scalar, steps taken; with ``seed`` it is all the random state.
      seed: uint32 scalar.
      residual: the weight format's container of a tree of residuals, None at leaves
        that have none.
      inner_state: the inner transformation's state, its moments in their formats.
    """

    count: jax.Array
    seed: jax.Array
    residual: typing.Any
    inner_state: typing.Any


_MASTERS: contextvars.ContextVar[dict[str, jax.Array]] = contextvars.ContextVar(
    "masters", default=types.MappingProxyType({})
)


@contextlib.contextmanager
def initial_masters(masters: dict[str, jax.Array]):
    """Within it, ``init`` takes these masters, by leaf path, in the parameters' place.

    A context, because wrappers such as ``optax.masked`` stand between the caller and
    the ``init`` of :class:`Lowbit`.
    """
    token = _MASTERS.set(masters)
    try:
        yield
    finally:
        _MASTERS.reset(token)


class ToNearest:
    """Random bits with which stochastic rounding is to nearest."""

    def words(self, shape: tuple[int, ...], stream: int = 0) -> jax.Array:
        """Half a unit, everywhere."""
        del stream
        return jnp.full(shape, 0x80000000, jnp.uint32)


@dataclasses.dataclass(frozen=True, eq=False)
class Lowbit:
    """The choices of one :func:`lowbit` call, and the functions made of them."""

    inner: optax.GradientTransformationExtraArgs
    weights: WeightFormat
    moments: Moments
    seed: int
    min_size: int
    implementation: typing.Literal["xla", "pallas"] | None = None

    def format(self, leaf) -> WeightFormat | None:
        """The weight format of a leaf; None for one that passes through."""
        if not trees.is_float(leaf) or not is_narrow(leaf.dtype):
            return None
        return self.weights.for_leaf(leaf.shape, leaf.dtype, self.min_size)

    def named_leaves(self, params: optax.Params):
        """Paths, leaves and structure: what a parameter's leaf is."""
        return trees.named_leaves(params)

    def gradient(self, name: str, grad, leaf):
        """A leaf's gradient as the inner transformation sees it."""
        return widened(name, grad, leaf)

    def init(self, params: optax.Params) -> LowbitState:
        """The state in which every master is its parameter."""
        if params is None:
            raise ValueError("lowbit: init needs params")
        names, leaves, treedef = self.named_leaves(params)
        self._check(names, leaves)
        given = _MASTERS.get()
        masters, residuals = [], []
        for name, leaf in zip(names, leaves, strict=True):
            format_ = self.format(leaf)
            if format_ is None:
                masters.append(leaf)
                residuals.append(None)
            elif name in given:
                masters.append(given[name])
                residuals.append(format_.residual(given[name], leaf, ToNearest()))
            else:
                masters.append(format_.widen(leaf))
                residuals.append(format_.init(leaf))
        residual = self._contain(treedef.unflatten(residuals))
        # Placed with the parameters' devices by being made here, not at import.
        count, seed = jnp.zeros([], jnp.uint32), jnp.asarray(self.seed, jnp.uint32)
        inner_state = self.inner.init(treedef.unflatten(masters))
        plan = self._plan(names, leaves, inner_state)
        formats = [self.format(leaf) for leaf in leaves]
        random = _random(names, leaves, formats, seed, count)
        inner_state = plan.encode(inner_state, random)
        return LowbitState(count, seed, residual, inner_state)

    def update(self, updates, state, params=None, **extra_args):
        """As in optax: ``(updates that land exactly, new state)``."""
        return self._advance(updates, state, params, land, extra_args)

    def step(self, grads, state, params, **extra_args):
        """``(new params, new state)`` without differences."""
        return self._advance(grads, state, params, stay, extra_args)

    def guarded(self, grads, state, params, guard: Guard, landing, **extra_args):
        """:meth:`step` or :meth:`update`, as ``landing`` says, if the guard lets it."""
        return self._advance(grads, state, params, landing, extra_args, guard)

    def inner_update(self, grads, state, params, **extra_args):
        """What the inner transformation does, before anything is rounded.

        Returns:
          ``(masters, updates)``, trees of float32 arrays at the held leaves.
        """
        inside = self._inside(grads, state, params)
        updates, _ = self._inner(inside, extra_args)
        return inside.master_tree, inside.treedef.unflatten(updates)

    def _inside(self, grads, state, params, guard: Guard | None = None) -> "Inside":
        if params is None:
            raise ValueError(
                "lowbit: update needs params; call tx.update(grads, state, params)"
            )
        if not isinstance(state, LowbitState):
            raise TypeError(
                f"lowbit: state is a {type(state).__name__}, not a LowbitState; was it "
                "made by this transformation's init?"
            )
        names, leaves, treedef = self.named_leaves(params)
        self._check(names, leaves)
        raw_grads = trees.beside(names, treedef, grads, "grads")
        formats = [self.format(leaf) for leaf in leaves]
        residuals = self._residuals(names, leaves, treedef, formats, state.residual)
        masters = [
            leaf if format_ is None else layerwise(format_.inner_weight, leaf, residual)
            for format_, leaf, residual in zip(formats, leaves, residuals, strict=True)
        ]
        wide = [
            self.gradient(name, grad, leaf)
            for name, grad, leaf in zip(names, raw_grads, leaves, strict=True)
        ]
        if guard is not None:
            wide = guard.unscaled(wide)
        expected = jax.eval_shape(self.inner.init, treedef.unflatten(masters))
        plan = self._plan(names, leaves, expected)
        moments = plan.decode(state.inner_state)
        return Inside(
            names,
            leaves,
            treedef,
            formats,
            residuals,
            masters,
            raw_grads,
            wide,
            plan,
            moments,
            guard,
        )

    def _inner(self, inside: "Inside", extra_args: dict):
        updates, inner_state = self.inner.update(
            inside.grad_tree, inside.moments, inside.master_tree, **extra_args
        )
        updates = trees.beside(inside.names, inside.treedef, updates, "inner updates")
        return updates, inner_state

    def _advance(
        self,
        grads: optax.Updates,
        state: LowbitState,
        params: optax.Params,
        landing: Callable,
        extra_args: dict,
        guard: Guard | None = None,
    ):
        inside = self._inside(grads, state, params, guard)
        random = _random(
            inside.names, inside.leaves, inside.formats, state.seed, state.count
        )
        keys = random_keys(state.seed, state.count, _numbers(inside.names))

        def finish(number: int, update):
            """A leaf's result and residual, from its inner update."""
            result, residual = finished(number, update)
            if guard is None:
                return result, residual
            if landing is stay:
                result = guard.chosen(result, inside.leaves[number])
            return result, guard.chosen(residual, inside.residuals[number])

        def finished(number: int, update):
            format_, leaf = inside.formats[number], inside.leaves[number]
            if format_ is None:
                return (
                    optax.apply_updates(leaf, update) if landing is stay else update
                ), None

            def advance(leaf, residual, update):
                return format_.advance(leaf, residual, update, random[number], landing)

            _, residual, result = layerwise(
                advance, leaf, inside.residuals[number], update.astype(jnp.float32)
            )
            return result, residual

        def by_xla():
            updates, inner_state = self._inner(inside, extra_args)
            pairs = [finish(i, update) for i, update in enumerate(updates)]
            results, residuals = zip(*pairs, strict=True) if pairs else ((), ())
            encoded = inside.plan.encode(inner_state, random)
            if guard is not None:
                encoded = guard.chosen(encoded, state.inner_state)
            return list(results), list(residuals), encoded

        stored = jax.tree.structure(inside.moments).flatten_up_to(
            inside.plan.by_leaf(state.inner_state)
        )
        layer = stacks_to_write()
        old = inside.leaves, inside.residuals, state.inner_state

        def by_kernels(plan):
            results, residuals, parts, written = kernel_step.run(
                plan, inside, stored, keys, landing, finish, "pallas", layer
            )
            encoded = inside.plan.encode(
                plan.state_tree.unflatten(parts), random, written
            )
            if guard is not None:
                by_kernel = {id(x) for i in written for x in jax.tree.leaves(parts[i])}
                encoded = jax.tree.map(
                    lambda new, old: (
                        new if id(new) in by_kernel else guard.chosen(new, old)
                    ),
                    encoded,
                    state.inner_state,
                )
            return results, residuals, encoded

        def choices(plan):
            if layer is None:
                return functools.partial(by_kernels, plan), by_xla, lambda new: new
            overwritten = kernel_step.overwritten(plan, inside, stored, layer)
            return (
                functools.partial(by_kernels, plan),
                lambda: layer.into_stacks(overwritten, old, by_xla()),
                functools.partial(layer.out_of_stacks, overwritten, old),
            )

        results, residuals, inner_state = self._choose(
            inside, landing, extra_args, by_xla, choices
        )
        count = optax.safe_increment(state.count)
        if guard is not None:
            count = guard.chosen(count, state.count)
            results = results if landing is stay else guard.updates(results)
        return inside.treedef.unflatten(results), LowbitState(
            count,
            state.seed,
            self._contain(inside.treedef.unflatten(residuals)),
            inner_state,
        )

    def _choose(self, inside, landing, extra_args, by_xla, choices):
        """The step by the implementation asked for, on the platform it will run on."""
        chosen = self.implementation
        elsewhere = chosen is None and is_elsewhere(inside.leaves)
        if chosen == "xla" or elsewhere or is_analysed():
            return by_xla()
        plan = kernel_plan.plan(self.inner, inside, landing, extra_args)
        if chosen == "pallas":
            plan.require(inside.names)
        if plan.is_empty:
            return by_xla()
        with_kernels, without, finish = choices(plan)
        if chosen == "pallas":
            return finish(with_kernels())
        return finish(jax.lax.platform_dependent(cuda=with_kernels, default=without))

    def _check(self, names, leaves):
        for name, leaf in zip(names, leaves, strict=True):
            if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
                raise TypeError(f"lowbit: params{name} is {leaf!r}, not an array")
            if self.format(leaf) is None:
                continue
            why = self.weights.check(leaf.dtype)
            if why:
                raise ValueError(f"lowbit: params{name}: {why}")

    def _contain(self, tree):
        container = self.weights.container
        return container(tree) if container._fields else container()

    def _residuals(self, names, leaves, treedef, formats, residual):
        if type(residual) is not self.weights.container:
            raise ValueError(
                f"lowbit: the state's residuals are {type(residual).__name__}, but "
                f"{self.weights} keeps {self.weights.container.__name__}: was this "
                "state made by a transformation with other weights?"
            )
        if not residual:
            return [None] * len(leaves)
        held = trees.beside(names, treedef, residual[0], "residuals")
        for name, leaf, format_, part in zip(names, leaves, formats, held, strict=True):
            want = _residual_like(format_, leaf.shape, leaf.dtype)
            if _shape(part) != _shape(want):
                raise ValueError(
                    f"lowbit: residual of params{name} is {_shape(part)}, but "
                    f"{format_ or 'a leaf that passes through'} keeps {_shape(want)}: "
                    "was this state made by a transformation with other weights?"
                )
        return held

    def _plan(self, names, leaves, inner_state) -> MomentPlan:
        expected = trees.abstract(inner_state)
        return MomentPlan(
            self.inner, self.moments, names, leaves, expected, self.min_size
        )


@dataclasses.dataclass(frozen=True)
class Inside:
    """One step up to the inner update: lists by leaf, in the order of ``treedef``.

    ``raw_grads`` are as given, ``grads`` as the inner transformation sees them, and
    ``moments`` is its state in float32. A guard's factor is in ``grads`` already.
    """

    names: list[str]
    leaves: list
    treedef: jax.tree_util.PyTreeDef
    formats: list[WeightFormat | None]
    residuals: list
    masters: list
    raw_grads: list
    grads: list
    plan: MomentPlan
    moments: typing.Any
    guard: Guard | None = None

    @property
    def grad_tree(self):
        return self.treedef.unflatten(self.grads)

    @property
    def master_tree(self):
        return self.treedef.unflatten(self.masters)


def _random(names, leaves, formats, seed, count) -> list[RandomBits]:
    """The leaves' random bits, which know what their formats leave to the moments."""
    random = placed(random_bits(seed, count, _numbers(names)), names, leaves)
    return [
        dataclasses.replace(
            bits,
            spare=format_ is not None and format_.residual_random_bits(x.dtype) <= 8,
        )
        for bits, x, format_ in zip(random, leaves, formats, strict=True)
    ]


def _numbers(names: list[str]) -> list[int]:
    return [leaf_number(name) for name in names]


@functools.lru_cache(maxsize=4096)
def _residual_like(format_: WeightFormat | None, shape: tuple[int, ...], dtype):
    if format_ is None:
        return None
    return jax.eval_shape(format_.init, jax.ShapeDtypeStruct(shape, dtype))


def widened(name: str, grad, param):
    """A leaf's gradient, in float32 if it or its parameter is narrower.

    Raises:
      TypeError, ValueError: naming the leaf, for a gradient that is not a float array
        of the parameter's shape.
    """
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
    wide = is_narrow(param.dtype) or is_narrow(grad.dtype)
    return grad.astype(jnp.float32) if wide else grad


def _shape(x) -> str:
    if x is None or not hasattr(x, "dtype"):
        return f"a {type(x).__name__}" if x is not None else "none"
    return f"{x.dtype}{list(x.shape)}"
