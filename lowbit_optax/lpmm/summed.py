"""Update with the sums in accumulators, and replace the sums with zeros.

The accumulators are moments of the inner transformation of ``lowbit``. Therefore, one
kernel decodes them, updates with them, and writes zeros.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._jaxprs.compiling import not_folded
from lowbit_optax._step import trees
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.state import LowbitState
from lowbit_optax._step.stepper import with_extra_args
from lowbit_optax.formats import MomentFormat
from lowbit_optax.formats.moment_fields import register_moments
from lowbit_optax.lpmm.sums import Sums, zeros


class SummedState(typing.NamedTuple):
    """State, during a step, of an inner transformation that reads sums.

    Args:
      inner_state: the state of the original inner transformation.
      accumulators: the sums of the gradients.
    """

    inner_state: typing.Any
    accumulators: typing.Any


register_moments(SummedState, averages=("accumulators",))


@dataclasses.dataclass(frozen=True)
class Accumulators(MomentFormat):
    """The format of accumulators, which keeps small sums in float32.

    Args:
      format: the format of sums with ``min_size`` or more elements.
      min_size: see :func:`lowbit_optax.accumulate_gradients`.
    """

    format: MomentFormat
    min_size: int

    def of_sum(self, leaf) -> MomentFormat | None:
        """Return the format of a leaf's sum, or None for a float32 or complex array."""
        return self.for_leaf(leaf.shape) if trees.is_float(leaf) else None

    def for_leaf(self, shape, min_size=0):
        del min_size
        return self.format.for_leaf(shape, self.min_size)


@dataclasses.dataclass(frozen=True, eq=False)
class Summed:
    """Sums that replace gradients, for :func:`.step_wrapped`.

    Args:
      format: the format of the accumulators.
      sums: the accumulators, with the guard of the update.
      treedef: the structure of the parameters.
      new: the accumulators after the update, by index of the leaf.
    """

    format: Accumulators
    sums: Sums
    treedef: trees.PyTreeDef
    new: dict[int, typing.Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def seen(self):
        """The float32 sums, as a tree with the structure of the parameters."""
        return self.treedef.unflatten(self.sums.decoded())

    def run(self, lowbit: Lowbit, leaves: Sequence[int], params, state, *args) -> tuple:
        """Run a step of ``lowbit`` with sums instead of gradients.

        Args:
          lowbit: the transformation that updates with the sums.
          leaves: indices of the leaves that it updates. The step adds their new
            accumulators to ``new``.
          params, state, *args: the arguments of :meth:`.Stepper.run`.
        """
        treedef = trees.named_leaves(params)[2]
        if isinstance(state, LowbitState):  # otherwise, the step raises an error
            sums = self.sums
            parts = [
                sums.leaves[i].grad if sums.parts[i] is None else sums.parts[i]
                for i in leaves
            ]
            accumulators = treedef.unflatten(parts)
            inner_state = SummedState(state.inner_state, accumulators)
            state = state._replace(inner_state=inner_state)
        result, new = _with_sums(self.format, lowbit).run(params, state, *args)
        found = treedef.flatten_up_to(new.inner_state.accumulators)
        self.new.update(zip(leaves, found, strict=True))
        return result, new._replace(inner_state=new.inner_state.inner_state)

    def emptied(self) -> list:
        """Return all accumulators after the update, None for constant leaves."""
        sums = self.sums
        is_new = lambda i: i in self.new and sums.parts[i] is not None
        each = enumerate(zip(sums.empty(), sums.parts, strict=True))
        choose = sums.guard.chosen
        return [self.new[i] if is_new(i) else choose(*pair) for i, pair in each]


def _filled(x: jax.Array, value: jax.Array) -> jax.Array:
    """Return an array like ``x`` with the same value in all places."""
    filled, sharding = jax.lax.full_like(x, value), jax.typeof(x).sharding
    # Without jax.set_mesh, it does not take the sharding of explicit axes.
    is_placed = jax.typeof(filled).sharding.spec == sharding.spec
    return filled if is_placed else jax.sharding.reshard(filled, sharding)


def _with_sums(format_: Accumulators, lowbit: Lowbit) -> Lowbit:
    """Return ``lowbit`` with the accumulators among its moments.

    Its update passes the sums to the inner transformation instead of the gradients, and
    replaces the sums with zeros.
    """
    within = with_extra_args(lowbit.inner)

    def init(params):
        return SummedState(within.init(params), jax.tree.map(zeros, params))

    def update(updates, state, params=None, **extra_args):
        del updates
        zero = not_folded(jnp.float32(0))
        result, inner_state = within.update(
            state.accumulators, state.inner_state, params, **extra_args
        )
        emptied = jax.tree.map(lambda x: _filled(x, zero), state.accumulators)
        return result, SummedState(inner_state, emptied)

    moments = dataclasses.replace(
        lowbit.moments,
        by_field={**lowbit.moments.by_field, "accumulators": format_},
        is_default=lowbit.moments.is_default or lowbit.moments.is_float32,
    )
    inner = optax.GradientTransformationExtraArgs(init, update)
    return dataclasses.replace(lowbit, inner=inner, moments=moments)
