"""``Lowbit``: the object behind a ``lowbit`` transformation, with its init and step.

    grads, any float dtype                      new param, or an update to it
        | to float32                                ^
        v                                           | split
    join(param, residual) --> master --> inner.update --> master + update
    decode(codes) --> moments -->          |        --> moments --> encode --> codes

:meth:`Lowbit.run` calls :meth:`Lowbit.open`, which checks the arguments and returns a
:class:`.step.Step`. It passes this step to :func:`.run.run`, and builds the next
state from the results. The inner transformation sees whole trees, while formats process
one leaf at a time. :func:`lowbit_optax.lowbit` creates ``Lowbit`` objects.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._jaxprs.compiling import not_folded
from lowbit_optax._numerics.landing import ADD_LIKE_GRADS, REPLACE, Landing
from lowbit_optax._numerics.random_bits import ToNearest
from lowbit_optax._step import context, run, trees
from lowbit_optax._step.error_feedback import field_of, parts_for_errors
from lowbit_optax._step.float32_params import warn_of_wide_params
from lowbit_optax._step.guard import UNGUARDED, Guard
from lowbit_optax._step.inner_update import trace_update
from lowbit_optax._step.leaf import (
    StoredLeaf,
    beside_state,
    format_of,
    min_size_of_shard,
    widen,
)
from lowbit_optax._step.moments import MomentChoice, MomentPlan, find_slots
from lowbit_optax._step.param_shardings import ParamShardings, leaf_shardings
from lowbit_optax._step.seeds import seed_of
from lowbit_optax._step.state import LowbitState, holds_lowbit, residuals_of
from lowbit_optax._step.step import LeafStep, Step
from lowbit_optax._step.stepper import (
    Stepper,
    check_multi_steps_around,
    check_multi_steps_in,
    check_state,
    marked,
    with_extra_args,
)
from lowbit_optax.formats.base import Residuals, WeightFormat
from lowbit_optax.formats.moment_fields import fields_of
from pallas_kernels.operations import ClosedJaxpr
from pallas_kernels.platforms import Implementation


class InexactWeightsError(ValueError):
    """The weight format rounds weights that the inner transformation needs exactly."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lowbit(Stepper):
    """The transformation that :func:`lowbit_optax.lowbit` returns.

    Args:
      inner: the wrapped optax transformation.
      weights: format of the parameters that have a narrow float dtype.
      moments: the formats of the moments.
      seed: seed for stochastic rounding.
      min_size: leaves with fewer elements may get a simpler format.
      implementation: see :data:`pallas_kernels.platforms.Implementation`.
      param_shardings: the shardings of the parameters on a mesh.
      warn: if True, ``init`` warns about float32 parameters, and a step warns about
        large leaves that XLA updates on an accelerator.
      match_grad_dtype: if True, and if a parameter and its gradient have the same
        dtype, the update also has this dtype.
    """

    inner: optax.GradientTransformation
    weights: WeightFormat
    moments: MomentChoice
    seed: int
    min_size: int
    implementation: Implementation = None
    param_shardings: ParamShardings = None
    warn: bool = True
    match_grad_dtype: bool = False

    def __repr__(self) -> str:
        return f"lowbit(weights={type(self.weights).__name__})"

    def init(self, params: optax.Params):
        """Return the initial state, in which each master equals its parameter."""
        if params is None:
            raise ValueError("lowbit: init needs params, got None")
        if holds_lowbit(params):
            raise TypeError(
                "lowbit: params must be a tree of arrays or ShapeDtypeStructs, got "
                f"the optimizer state {type(params).__name__}"
            )
        check_multi_steps_around(params)
        start = context.current().start
        if start is not None:
            return start(self, params)
        return self.start(params, {})

    def start(self, params, masters: Mapping[str, jax.Array]) -> LowbitState:
        """Return the initial state; ``masters`` maps paths of leaves to masters."""
        names, given, treedef = trees.named_leaves(params)
        leaves = self._placed(self.leaves(names, given), treedef)
        if self.warn:
            warn_of_wide_params(self.weights, names, given)
        split = [_split(leaf, masters.get(leaf.name)) for leaf in leaves]
        # Create count and seed here, so that JAX places them like the parameters.
        wide = [masters.get(name, x) for name, x in zip(names, given, strict=True)]
        count, seed = jnp.zeros([], jnp.uint32), seed_of(self.seed, wide)
        with context.changed(start=_refuse_inner_lowbit):
            inner_state = self.inner.init(treedef.unflatten(x for x, _ in split))
        # DoG and lookahead keep the parameters. A step cannot donate an array twice.
        ids = set(map(id, given))
        copied = lambda x: jnp.copy(x) if id(x) in ids else x
        inner_state = jax.tree.map(copied, inner_state)
        _check_inner_state(inner_state, self.weights)
        self.check_start(leaves, inner_state)
        plan = self._plan(leaves, inner_state)
        parts_for_errors(plan)  # raises an error for a leaf without this part
        plan.check_divided()
        drawn = LeafStep(leaves, seed, count, context.current().layer)
        parts, structure = jax.tree.flatten(jax.tree.map(not_folded, inner_state))
        inner_state = plan.tree(structure, plan.encode(parts, drawn.draws))
        residual = self.residuals(treedef, [x for _, x in split], leaves)
        return LowbitState(count, seed, residual, inner_state)

    def residuals(self, treedef, parts: Sequence, leaves: Sequence[StoredLeaf]):
        """Return the residuals of a new state; None stands for a missing residual."""
        name, blanks = self.weights.residual_name, [leaf.blank() for leaf in leaves]
        return residuals_of(name, treedef, parts, blanks, _dtypes(leaves))

    def run(self, params, state, grads, landing, extra_args, guard=UNGUARDED):
        """Run a step unless the guard skips it; see :meth:`.Stepper.run`."""
        if self.match_grad_dtype and not landing.is_direct:
            landing = ADD_LIKE_GRADS
        step = self.open(params, state, grads, guard, landing)
        report = context.current().report
        update = self._update_with(extra_args)
        if report is not None:
            report(step, update, self.implementation)
            return jax.tree.map(jnp.zeros_like, step.tree(step.masters)), state
        done = run.run(
            step, update, self.implementation, self.warn, bool(self._checked)
        )
        self._checked.add(True)
        if step.on_changes is not None:
            step.on_changes(*trees.named_leaves(params)[:2], done.changed)
        results = list(map(StoredLeaf.moved_back, step.leaves, done.results))
        if not landing.is_direct:
            results = guard.updates(results)
        count = jnp.asarray(optax.safe_increment(state.count))
        count = guard.chosen(count, state.count)
        residual = state.residual
        if residual.name is not None:
            before = step.treedef.flatten_up_to(residual.tree)
            of_state = step.treedef, done.residuals, before, residual.dtypes
            residual = residuals_of(residual.name, *of_state)
        new_state = LowbitState(count, state.seed, residual, done.inner_state)
        return step.tree(results), new_state

    def update_within(self, updates, state, params=None, **extra):
        """See :meth:`.Stepper.update_within`.

        Unlike other steppers, ``Lowbit`` can add a marker, because the jaxpr of the
        inner update lists the traced values that the inner transformation contains.
        """
        if not context.current().wants_params:
            return self.update(updates, state, params, **extra)
        # A marker keeps traced values.
        if jax.config.jax_check_tracer_leaks:  # pyright: ignore[reportAttributeAccessIssue]
            return super().update_within(updates, state, params, **extra)
        step = self.open(params, state, updates, UNGUARDED, REPLACE)
        traced = trace_update(self._update_with(extra), step)

        def with_held(held) -> Lowbit:
            closed = ClosedJaxpr(traced.closed.jaxpr, held)
            again = dataclasses.replace(traced, closed=closed)

            def update(updates, state, params=None, **extra_args):
                del extra_args
                return again.update(updates, state, params)

            inner = optax.GradientTransformationExtraArgs(self.inner.init, update)
            return dataclasses.replace(self, inner=inner)

        held = list(traced.closed.consts)
        return marked(self, with_held, held, updates, state, params, {})

    @functools.cached_property
    def _checked(self) -> set:
        """Not empty after the first step, which checks the inner transformation."""
        return set()

    def _update_with(self, extra_args: dict) -> Callable:
        """Return the inner update as a function of gradients, state and masters."""
        update = with_extra_args(self.inner).update
        return functools.partial(update, **extra_args)

    def open(self, params, state, grads, guard: Guard, landing: Landing) -> Step:
        """Check the arguments of a step, and split them into leaves."""
        if params is None:
            raise ValueError(
                "lowbit: update needs params, got None. Call tx.update(grads, state, "
                "params)"
            )
        check_state("lowbit", state, LowbitState, integers=("count", "seed"))
        names, params, treedef = trees.named_leaves(params)
        leaves = self.stored_leaves(names, params, treedef, state.residual)
        leaves = beside_state(leaves, (state.residual.tree, state.inner_state))
        grads = trees.parts_of(names, treedef, grads, "grads")
        leaves = list(map(StoredLeaf.with_grad, leaves, grads))
        plan = self.plan_of(leaves, treedef)
        parts, layer = plan.parts(state.inner_state), context.current().layer
        drawn = leaves, state.seed, state.count, layer
        return Step(*drawn, treedef, plan, state, parts, guard, landing)

    def leaves(
        self, names: Sequence[str], params: Sequence, shardings: Sequence | None = None
    ) -> list[StoredLeaf]:
        """Return the leaves of parameters, without residuals.

        Args:
          names, params: paths and arrays of the parameters.
          shardings: result of :func:`leaf_shardings`; None in ``init``.
        """
        choose = functools.partial(format_of, self.weights, self.min_size)
        places = shardings or [None] * len(params)
        each = zip(names, params, map(choose, names, params), places, strict=True)
        return [StoredLeaf(n, x, kind, sharding=place) for n, x, kind, place in each]

    def stored_leaves(
        self, names: Sequence[str], params: Sequence, treedef, residual
    ) -> list[StoredLeaf]:
        """Check the residuals of parameters, and return leaves that contain them."""
        shardings = leaf_shardings(self.param_shardings, treedef.unflatten(params))
        leaves = self._placed(self.leaves(names, params, shardings), treedef)
        name = self.weights.residual_name
        if not isinstance(residual, Residuals) or residual.name != name:
            given = getattr(residual, "name", type(residual).__name__)
            raise ValueError(
                f"lowbit: state must contain the residuals {name!r} for "
                f"{self.weights}, got {given!r}. Use the transformation that made the "
                "state, or move the state to this format with lowbit_optax.convert"
            )
        for dtype, leaf in _dtypes(leaves).items():
            if name is not None and dtype not in residual.dtypes:
                raise TypeError(
                    f"lowbit: params{leaf} must have a dtype of the parameters in "
                    f"tx.init ({', '.join(sorted(residual.dtypes))}), got {dtype}. To "
                    "change the dtype, use lowbit_optax.convert"
                )
        tree = residual.tree
        if name is None and isinstance(tree, tuple) and not tree:  # without blanks
            return leaves
        what = "residuals in the state"
        residuals = trees.parts_of(names, treedef, tree, what)
        return list(map(StoredLeaf.with_residual, leaves, residuals))

    def _placed(self, leaves: list[StoredLeaf], treedef) -> list[StoredLeaf]:
        """Move leaves whose shards on explicit axes would split words or blocks."""
        arrays = [x.param for x in leaves if isinstance(x.param, jax.Array)]
        if not any(any(jax.typeof(x).sharding.spec) for x in arrays):
            return leaves
        return self.plan_of(leaves, treedef).placed(leaves)

    def plan_of(self, leaves: Sequence[StoredLeaf], treedef) -> MomentPlan:
        """Return the plan for storing the inner state of these leaves."""
        masters = [
            trees.abstract(leaf.param)
            if leaf.format is None and trees.is_inexact(leaf.param)
            else jax.ShapeDtypeStruct(leaf.param.shape, jnp.float32)
            for leaf in leaves
        ]
        inner_state = jax.eval_shape(self.inner.init, treedef.unflatten(masters))
        return self._plan(leaves, inner_state)

    def _plan(self, leaves: Sequence[StoredLeaf], inner_state) -> MomentPlan:
        expected, slots = trees.abstract(inner_state), (None, [])
        if any(map(field_of, leaves)) or not self.moments.is_float32:
            slots = find_slots(self.inner, self.moments, expected)
        sizes = {x.name: min_size_of_shard(self.min_size, x.param) for x in leaves}
        leaves = [StoredLeaf(x.name, trees.abstract(x.param), x.format) for x in leaves]
        return MomentPlan(slots, self.moments, leaves, expected, sizes)

    def check_start(self, leaves: Sequence[StoredLeaf], inner_state) -> None:
        """Raise InexactWeightsError if the inner state needs exact weights."""
        has_start = lambda x: fields_of(type(x)).start is not None
        starts = {}
        for state in jax.tree.leaves(inner_state, is_leaf=has_start):
            field = fields_of(type(state)).start
            if field is not None:
                names = trees.named_leaves(getattr(state, field))[0]
                starts |= dict.fromkeys(names, f"{type(state).__name__}.{field}")
        for leaf in leaves:
            is_exact = leaf.format is None or leaf.format.is_exact(leaf.param.dtype)
            if is_exact or leaf.name not in starts:
                continue
            raise InexactWeightsError(
                f"lowbit: weights must store params{leaf.name}, "
                f"{trees.describe(leaf.param)}, exactly, got {self.weights}. The inner "
                "transformation measures how far weights have moved from the start "
                f"({starts[leaf.name]}), and would count rounding errors as distance. "
                "Pass weights=lowbit_optax.extra_bits(), which stores all bits of "
                "float32, or weights=lowbit_optax.master_copy()"
            )


def _dtypes(leaves: Sequence[StoredLeaf]) -> dict[str, str]:
    """Return the dtypes of leaves with a weight format, each with the path of one."""
    stored = [x for x in leaves if x.format is not None]
    return {jnp.dtype(x.param.dtype).name: x.name for x in stored}


def _split(leaf: StoredLeaf, master) -> tuple[typing.Any, typing.Any]:
    """Return the initial master (by default, the parameter) and its residual."""
    if leaf.format is None:
        weight = leaf.master()
        if trees.is_inexact(leaf.param):
            return weight, None
        # optax would keep moments in the leaf's dtype until the first step.
        return jnp.asarray(weight, jnp.float32), None
    if master is not None:
        master = leaf.moved_like_param(master)
        return master, _residual(leaf.format, master, leaf.param)
    return widen(leaf.format, leaf.param), leaf.format.init(leaf.param)


@functools.partial(jax.jit, static_argnums=0)
def _residual(format_: WeightFormat, master, param):
    return format_.residual(master, param, ToNearest())


def _refuse_inner_lowbit(config: Lowbit, params) -> typing.NoReturn:
    del config, params
    raise ValueError(
        "lowbit: inner must not contain a transformation of this package, such as "
        "kahan_adamw. Pass an optax transformation, such as optax.adamw(1e-3), or use "
        "the transformation of this package without lowbit"
    )


def _check_inner_state(inner_state, weights: WeightFormat) -> None:
    if trees.all_of(optax.LookaheadState, inner_state):
        raise ValueError(
            "lowbit: inner must not contain optax.lookahead. It needs pairs of fast "
            "and slow weights as parameters, but only the fast weights have "
            "gradients. The recipes in the documentation show a lookahead that stores "
            "the slow weights in its state"
        )
    if weights.error_feedback and trees.all_of(optax.MultiStepsState, inner_state):
        raise ValueError(
            "lowbit: error_feedback does not support optax.MultiSteps inside lowbit, "
            "because the first update after updates of zero would scale the moment to "
            "zero. Put MultiSteps around lowbit, or use "
            "lowbit_optax.accumulate_gradients"
        )
    check_multi_steps_in(inner_state)
