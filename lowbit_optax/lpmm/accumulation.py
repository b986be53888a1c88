"""Sum the gradients of microbatches in a low-bit format, and update with the sum."""

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp
import optax

from lowbit_optax import formats
from lowbit_optax._arguments import check_static_int, check_transformation, check_type
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._step import context, trees
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.guard import UNGUARDED, Guard, neutral_updates
from lowbit_optax._step.leaf import StoredLeaf, beside_state
from lowbit_optax._step.moments import (
    NoSuchMomentError,
    check_container,
    in_parallel_trees,
    leaf_by_leaf,
    uncontained,
)
from lowbit_optax._step.param_shardings import leaf_shardings
from lowbit_optax._step.seeds import seed_of
from lowbit_optax._step.state import blank
from lowbit_optax._step.stepper import Stepper, check_state, stepper_of, with_extra_args
from lowbit_optax._step.wrapped import step_wrapped
from lowbit_optax.formats import MomentFormat
from lowbit_optax.lpmm.quantization import PAPER_BLOCK_SIZE
from lowbit_optax.lpmm.summed import Accumulators, Summed
from lowbit_optax.lpmm.sums import Sums, empty
from lowbit_optax.transformations.step import apply_updates, guarded
from pallas_kernels.platforms import is_for_one_cpu

PAPER_ACCUMULATORS = formats.block_quantized(
    8, code="linear", block_size=PAPER_BLOCK_SIZE, rounding="stochastic"
)
"""The format of gradient accumulators in the LPMM paper."""


class AccumulationState(typing.NamedTuple):
    """State of :func:`accumulate_gradients`.

    Args:
      count: uint32 scalar, the number of calls so far. The random numbers depend only
        on ``count`` and ``seed``.
      seed: uint32 scalar; see :class:`.LowbitState`.
      mini_step: int32 scalar, the number of gradients in the accumulators.
      accumulators: the sums in their format, as a tree with the structure of the
        parameters or a QuantizedMoment of such trees. Integers, booleans
        and PRNG keys have zeros.
      inner_state: the state of the inner transformation.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    seed: jax.Array
    mini_step: jax.Array
    accumulators: typing.Any
    inner_state: typing.Any


def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: int,
    format: MomentFormat = PAPER_ACCUMULATORS,
    *,
    seed: int | None = None,
    min_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Accumulate N gradients in a low-bit format, and update with their sum.

        g_0 = 0
        g_i = Q(g_{i-1} + grad_i), i = 1..N
        u   = inner.update(g_N)

    Each call adds the gradients of one microbatch, and every N-th call changes the
    parameters. ``optax.MultiSteps`` keeps the mean in full precision. This
    transformation quantizes the sum after every gradient, and passes the sum to
    ``inner``, as Algorithm 1 does. To keep a learning rate or a clipping threshold that
    was tuned for the mean, divide by N first:
    ``accumulate_gradients(optax.chain(optax.scale(1 / N), inner), N)``.

    If a gradient of any microbatch is infinite or NaN, the sum contains NaN, so
    ``optax.apply_if_finite`` inside detects it.

    Args:
      inner: any optax transformation, including transformations of this package.
      every: N, at least 1.
      format: moment format of the sums. The default is the paper's format: 8 bits, the
        linear code, blocks of 64 rows by 32 columns and stochastic rounding. Each
        gradient then adds an error of up to 1/127 of the largest sum in the block. If
        the rows of a gradient differ by orders of magnitude, use ``cast(jnp.bfloat16)``
        or ``block_quantized(8)``, which is smaller and has more noise.
      seed: seed for stochastic rounding; 0 if None.
      min_size: sums with fewer elements are float32; 4096 if None.

    Returns:
      An optax transformation. Between updates, it returns zeros, and zero uint32
      differences for QuantizedTensors. ``inner`` receives float32 sums if it is a
      transformation of this package, or if it contains one and you call
      :func:`lowbit_optax.step`. Steps on a GPU then neither branch nor copy the state.
      Otherwise, ``inner`` receives sums in the dtypes of the gradients.

    Raises:
      TypeError, ValueError: if an argument or a gradient has a wrong type or value.
        Errors about a leaf name its path.

    References:
      LPMM, section 3.3, "Microbatching", and Algorithm 1.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = lowbit_optax.lpmm.quantize_params(jnp.ones((64, 64)), bits=12)
    >>> tx = accumulate_gradients(lowbit_optax.lpmm_sgd(0.5), every=2)
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...     params, state = lowbit_optax.step(tx, params, state, jnp.ones((64, 64)))
    >>> params.dequantize()[0, 0]
    Array(0., dtype=float32)
    """
    seed = 0 if seed is None else seed
    min_size = 4096 if min_size is None else min_size
    check_static_int("accumulate_gradients", "every", every, 1)
    check_static_int("accumulate_gradients", "seed", seed, 0, 2**32 - 1)
    check_static_int("accumulate_gradients", "min_size", min_size, 0)
    accepted = "a moment format, such as lowbit_optax.block_quantized(8)"
    check_type("accumulate_gradients: format", format, MomentFormat, accepted)
    check_transformation("accumulate_gradients", "inner", inner)
    accumulators = Accumulators(format.for_sums(), min_size)
    return Accumulation(inner, every, accumulators, seed).transformation


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Accumulation(Stepper):
    """The configuration of one call of :func:`accumulate_gradients`."""

    inner: optax.GradientTransformation
    every: int
    accumulators: Accumulators
    seed: int

    def init(self, params) -> AccumulationState:
        """Return the initial state, with accumulators of zeros."""
        _, leaves, treedef = trees.named_leaves(params)
        count, seed = jnp.zeros([], jnp.uint32), seed_of(self.seed, leaves)
        accumulators = [
            empty(x, self.accumulators.of_sum(x)) if trees.is_inexact(x) else blank(x)
            for x in leaves
        ]
        mini_step = jnp.zeros([], jnp.int32)
        held = in_parallel_trees(self.accumulators.format, treedef, accumulators)
        return AccumulationState(count, seed, mini_step, held, self.inner.init(params))

    def run(self, params, state, grads, landing, extra_args, guard=UNGUARDED):
        """Run a step, which changes the parameters only in every N-th call."""
        check_state("accumulate_gradients", state, AccumulationState)
        call = _Call(self, params, state, grads, landing, extra_args, guard)
        result, accumulators, inner_state = call.result()
        next_mini_step = (state.mini_step + 1) % self.every  # keeps the dtype
        counts = jnp.asarray(optax.safe_increment(state.count)), next_mini_step
        count, mini_step = guard.chosen(counts, (state.count, state.mini_step))
        new = count, state.seed, mini_step, accumulators, inner_state
        return result, AccumulationState(*new)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """One step of a transformation that accumulates; see :meth:`.Stepper.run`."""

    config: Accumulation
    params: typing.Any
    state: AccumulationState
    grads: typing.Any
    landing: Landing
    extra_args: dict
    guard: Guard

    def result(self):
        """Return ``(result, accumulators, inner state)``."""
        stepper = stepper_of(self.config.inner)
        lowbit = stepper if isinstance(stepper, Lowbit) else None
        can_be = lowbit is not None or (stepper is None and self.landing.is_direct)
        # On CPUs, branches copy nothing, but a guarded step always computes the update.
        is_chosen = lowbit is not None and lowbit.implementation not in (None, "xla")
        is_for_kernels = is_chosen or not is_for_one_cpu()
        in_place = None
        if self.params is not None and can_be and is_for_kernels:
            # Not every transformation can have accumulators among its moments.
            with contextlib.suppress(NoSuchMomentError):
                in_place = self._in_place(lowbit)
        return self._by_branches() if in_place is None else in_place

    def _in_place(self, lowbit: Lowbit | None):
        """Run two steps without a branch; a guard may skip the second one.

        The first step adds the gradients to the accumulators. The second step is a step
        of the inner transformation, with the accumulators as moments. Returns None if a
        wrapper prevents the second step from writing new parameters.

        Raises:
          NoSuchMomentError: if the accumulators cannot be moments.
        """
        implementation = lowbit and lowbit.implementation
        one = jnp.float32(1)
        # The kernel of the first step also reads the scalars of a guard.
        always = self.guard.within(one, jnp.bool_(True))
        parts = dataclasses.replace(self._sums, guard=always).added(implementation)
        updates = self.guard.within(one, self._is_last)
        sums = dataclasses.replace(self._sums, parts=parts, guard=updates)
        summed = Summed(self.config.accumulators, sums, self._named[2])
        state = self.state.inner_state
        if lowbit is None:
            tx = with_extra_args(self.config.inner)
            arguments = tx, self.params, state, self.grads, self.extra_args
            found = step_wrapped(*arguments, apply_updates, updates, summed)
            if found is None:
                return None
            result, inner_state = found
        else:
            arguments = self.grads, self.landing, self.extra_args, updates
            leaves = range(len(parts))
            result, inner_state = summed.run(
                lowbit, leaves, self.params, state, *arguments
            )
        return result, self._in_containers(summed.emptied()), inner_state

    def _by_branches(self):
        """Run a step with a conditional, whose branches copy all arrays they change."""
        state, params, is_direct = self.state, self.params, self.landing.is_direct
        parts = self._sums.added("xla")
        sums = dataclasses.replace(self._sums, parts=parts, guard=UNGUARDED)

        def update():
            # XLA fuses the sums with their uses. Outside of the branch, they would be
            # float32 copies of all gradients.
            totals = map(self._gradient, sums.leaves, sums.decoded())
            grads, inner = self._named[2].unflatten(totals), self.config.inner
            arguments = params, state.inner_state, grads, UNGUARDED, self.landing
            result, inner_state = guarded(inner, *arguments, self.extra_args)
            # Before the first step, optax's moments of integers are integers.
            keep = lambda new, old: (
                new
                if trees.is_inexact(old) or new.dtype == old.dtype
                else new.astype(old.dtype)
            )
            inner_state = jax.tree.map(keep, inner_state, state.inner_state)
            return result, sums.empty(), inner_state

        def wait():
            result = params
            if not is_direct:
                shapes, _, _ = jax.eval_shape(update)
                fill = lambda x, value: jnp.full(x.shape, value, x.dtype)
                result = jax.tree.map(fill, shapes, neutral_updates(shapes))
            return result, sums.parts, state.inner_state

        is_last = self._is_last
        if isinstance(is_last, jax.core.Tracer):
            result, parts, inner_state = jax.lax.cond(is_last, update, wait)
        # Outside of jit, JAX would compile a conditional of new closures in every step.
        elif is_last:
            result, parts, inner_state = update()
        else:
            jax.eval_shape(update)  # to raise its errors in the first step
            result, parts, inner_state = wait()
        parts = self.guard.chosen(parts, self._sums.parts)
        inner_state = self.guard.chosen(inner_state, state.inner_state)
        if is_direct:
            result = self.guard.chosen(result, params)
        else:
            result = self.guard.updates(result)
        return result, self._in_containers(parts), inner_state

    @property
    def _is_last(self) -> jax.Array:
        return jnp.asarray(self.state.mini_step) == self.config.every - 1

    @functools.cached_property
    def _named(self) -> tuple[list[str], list, trees.PyTreeDef]:
        return trees.named_leaves(self.grads if self.params is None else self.params)

    def _in_containers(self, parts: Sequence):
        format_, treedef = self.config.accumulators.format, self._named[2]
        parts = [
            old if x is None else x for x, old in zip(parts, self._stored, strict=True)
        ]
        return in_parallel_trees(format_, treedef, parts, self.state.accumulators)

    @property
    def _stored(self) -> list:
        """The accumulators in the state, and zeros for leaves that do not change."""
        names, _, treedef = self._named
        stored, format_ = self.state.accumulators, self.config.accumulators.format
        check_container(format_, stored, "accumulate_gradients: the sum of gradients")
        parts = leaf_by_leaf(names, treedef, stored, "accumulators")
        return list(map(uncontained, parts))

    @functools.cached_property
    def _sums(self) -> Sums:
        """The accumulators before the step, and the gradients to add to them."""
        names, params, treedef = self._named
        grads = trees.parts_of(names, treedef, self.grads, "grads")
        lowbit = stepper_of(self.config.inner)
        shardings: Sequence = [None] * len(names)
        if isinstance(lowbit, Lowbit):
            shardings = leaf_shardings(lowbit.param_shardings, self.params)
        each = zip(names, params, shardings, strict=True)
        leaves = [StoredLeaf(name, x, None, sharding=to) for name, x, to in each]
        leaves = beside_state(leaves, self.state.accumulators)
        leaves = list(map(StoredLeaf.with_grad, leaves, grads))
        pairs = zip(params, self._stored, strict=True)
        parts = [part if trees.is_inexact(param) else None for param, part in pairs]
        formats = list(map(self.config.accumulators.of_sum, params))
        drawn = self.state.seed, self.state.count, context.current().layer
        return Sums(leaves, *drawn, parts, formats, self.guard)

    def _gradient(self, leaf: StoredLeaf, total):
        """Return a leaf's sum in the dtype that the inner transformation needs."""
        # A transformation of this package uses float32 for narrow parameters.
        is_ours = stepper_of(self.config.inner) is not None
        if is_ours or trees.is_quantized(leaf.param) or not trees.is_float(leaf.param):
            return total
        return total.astype(leaf.grad.dtype)
