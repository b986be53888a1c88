"""Sum gradients over microbatches in few bits, then update with their mean."""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax import formats
from lowbit_optax._arguments import check_static_int
from lowbit_optax._jaxprs.not_folded import not_folded
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import DrawsToNearest
from lowbit_optax._step import context, trees
from lowbit_optax._step.blanks import blank
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.guard import UNGUARDED, Guard, Unguarded, neutral_updates
from lowbit_optax._step.leaf import StoredLeaf
from lowbit_optax._step.moment_slots import NoSuchMomentError
from lowbit_optax._step.moments import in_parallel_trees, leaf_by_leaf
from lowbit_optax._step.seeds import seed_of
from lowbit_optax._step.stepper import Stepper, stepper_of
from lowbit_optax._step.wrapped import step_wrapped
from lowbit_optax._step.wrapper_trace import NotDirect
from lowbit_optax.formats import MomentFormat
from lowbit_optax.loss_scaling.guarded import guarded
from lowbit_optax.lpmm.means import Means, uncontained, zeros
from lowbit_optax.lpmm.quantization import PAPER_BLOCK_SIZE
from lowbit_optax.lpmm.sums import Sums, encoded
from lowbit_optax.transformations.lowbit import apply_updates
from pallas_kernels.platforms import is_for_one_cpu

PAPER_ACCUMULATORS = formats.block_quantized(
    8, code="linear", block_size=PAPER_BLOCK_SIZE, rounding="stochastic"
)
"""The format of gradient accumulators in the LPMM paper."""


class AccumulationState(typing.NamedTuple):
    """State of :func:`accumulate_gradients`.

    Args:
      count: uint32 scalar, the number of calls so far. Together with ``seed`` it is the
        whole state of the random numbers.
      seed: uint32 scalar; see :class:`.LowbitState`.
      mini_step: int32 scalar, the number of gradients in the accumulators.
      accumulators: the sums in their format, a tree like the parameters or a
        QuantizedMoment of such trees; None at leaves that are not float.
      inner_state: the inner transformation's state.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]: tuple's
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
    """Update with the mean of N gradients, which low-bit accumulators sum.

        g_i = Q(g_{i-1} + grad_i), i = 1..N-1;  u = inner.update((g_{N-1} + grad_N) / N)

    It replaces ``optax.MultiSteps``, which keeps a gradient in full precision. Each
    call is one microbatch; only every N-th call changes the parameters.

    Where a gradient of any microbatch is infinite or NaN, the mean is not finite
    either, so that ``optax.apply_if_finite`` inside sees it. Codes have no infinity: an
    infinity of any microbatch but the last becomes NaN.

    Args:
      inner: any optax transformation, those of this package included.
      every: N, 1 or more.
      format: moment format of the sums; by default the paper's, with 8 bits, the linear
        code and stochastic rounding.
      seed: of stochastic rounding; 0 if None.
      min_size: sums with fewer elements are float32; 4096 if None.

    Returns:
      An optax transformation. Between updates it returns zeros, and zero uint32
      differences for QuantizedTensors. The inner transformation gets means in float32
      if it is one of this package, or has one within and is stepped by
      :func:`lowbit_optax.step`; and in the gradients' dtypes otherwise. In the first
      two cases no step on a GPU branches or copies state.

    Raises:
      TypeError, ValueError: for arguments or gradients that are not as above; errors
        about a leaf name its path.

    References:
      LPMM, section 3.3, "Microbatching", and Algorithm 1.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = lowbit_optax.quantize_params(jnp.ones((64, 64)), bits=12)
    >>> tx = accumulate_gradients(lowbit_optax.lpmm_sgd(0.5), every=2)
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...     params, state = lowbit_optax.step(tx, params, state, jnp.ones((64, 64)))
    >>> params.dequantize()[0, 0]
    Array(0.4998..., dtype=float32)
    """
    seed = 0 if seed is None else seed
    min_size = 4096 if min_size is None else min_size
    check_static_int("accumulate_gradients", "every", every, 1)
    check_static_int("accumulate_gradients", "seed", seed, 0, 2**32 - 1)
    check_static_int("accumulate_gradients", "min_size", min_size, 0)
    if not isinstance(format, MomentFormat):
        raise TypeError(
            f"accumulate_gradients: format is {format!r}, not a moment format such as "
            "lowbit_optax.block_quantized(8)"
        )
    try:
        format = format.for_sums()
    except ValueError as error:
        raise ValueError(
            f"accumulate_gradients: format is {format}, whose code holds no negative "
            "values, but sums of gradients may be negative"
        ) from error
    if format.reference is not None:
        raise ValueError(
            f"accumulate_gradients: format is {format}, but sums of gradients have no "
            "second moment to be relative to; accepted is relative_to=None"
        )
    if not callable(getattr(inner, "init", None)) or not hasattr(inner, "update"):
        raise TypeError(
            f"accumulate_gradients: inner is {inner!r}; accepted is an optax "
            "transformation, such as lowbit_optax.lpmm_sgd(1e-3)"
        )
    return Accumulation(inner, every, format, seed, min_size).transformation


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulation(Stepper):
    """The configuration that one call of :func:`accumulate_gradients` makes."""

    inner: optax.GradientTransformation
    every: int
    format: MomentFormat
    seed: int
    min_size: int

    def init(self, params) -> AccumulationState:
        """The initial state, with accumulators of zeros."""
        _, leaves, treedef = trees.named_leaves(params)
        count, seed = jnp.zeros([], jnp.uint32), seed_of(self.seed, leaves)
        empty = list(map(self._empty, leaves))
        return AccumulationState(
            count,
            seed,
            jnp.zeros([], jnp.int32),
            in_parallel_trees(self.format, treedef, empty),
            self.inner.init(params),
        )

    def run(
        self,
        params,
        state: AccumulationState,
        grads,
        landing: Landing,
        extra_args: dict,
        guard: Guard | Unguarded = UNGUARDED,
    ):
        """A step; between two updates the updates are zeros."""
        call = _Call(self, params, state, grads, landing, extra_args, guard)
        result, accumulators, inner_state = call.result()
        next_mini_step = (state.mini_step + jnp.int32(1)) % jnp.int32(self.every)
        counts = jnp.asarray(optax.safe_increment(state.count)), next_mini_step
        count, mini_step = guard.chosen(counts, (state.count, state.mini_step))
        return result, AccumulationState(
            count, state.seed, mini_step, accumulators, inner_state
        )

    def format_of(self, leaf) -> MomentFormat | None:
        """The format of a leaf's accumulator; None for float32."""
        return self.format.for_leaf(leaf.shape, self.min_size)

    def _empty(self, leaf):
        """A leaf's accumulator of zeros; a blank at a leaf that is not float."""
        if not trees.is_float(leaf):
            return blank(leaf)
        return encoded(self.format_of(leaf), zeros(leaf), DrawsToNearest())


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """One call of a transformation that accumulates; see :meth:`.Stepper.run`."""

    config: Accumulation
    params: typing.Any
    state: AccumulationState
    grads: typing.Any
    landing: Landing
    extra_args: dict
    guard: Guard | Unguarded

    def result(self):
        """``(result, accumulators, inner state)``."""
        stepper = stepper_of(self.config.inner)
        lowbit = stepper if isinstance(stepper, Lowbit) else None
        can_be = lowbit is not None or (stepper is None and self.landing.is_direct)
        # A CPU's branches copy nothing, and a guard there does not save the work.
        is_chosen = lowbit is not None and lowbit.implementation not in (None, "xla")
        is_for_kernels = is_chosen or not is_for_one_cpu()
        if self.params is not None and can_be and is_for_kernels:
            try:
                return self._in_place(lowbit)
            except (NotDirect, NoSuchMomentError):
                pass  # then accumulators cannot be among its moments
        return self._by_branches()

    def _in_place(self, lowbit: Lowbit | None):
        """Without a branch, by two steps under guards of which one happens.

        The first adds a gradient to the accumulators. The second is the inner
        transformation's, in which the accumulators are moments.

        Raises:
          NotDirect, NoSuchMomentError: if they cannot be.
        """
        one, is_last = jnp.float32(1), self._is_last
        waits = self.guard.within(one, jnp.logical_not(is_last))
        updates = self.guard.within(one, is_last)
        parts, implementation = self._parts, lowbit and lowbit.implementation
        if self.config.every > 1:
            parts = self._sums(parts, waits).added(implementation)
        sums = self._sums(parts, updates)
        means = Means(self.config, sums, self._named[2])
        state = self.state.inner_state
        if lowbit is None:
            found = step_wrapped(
                optax.with_extra_args_support(self.config.inner),
                self.params,
                state,
                self.grads,
                self.extra_args,
                apply_updates,
                updates,
                means,
            )
            if found is None:
                raise NotDirect
            result, inner_state = found
        else:
            result, inner_state = means.among(lowbit, range(len(parts))).run(
                self.params, state, self.grads, self.landing, self.extra_args, updates
            )
        return result, self._in_containers(means.emptied()), inner_state

    def _by_branches(self):
        """By a conditional, whose branches write new copies of what they change."""
        grads, params = self.guard.unscaled(self.grads), self.params
        sums = dataclasses.replace(self, grads=grads)._sums(self._parts, UNGUARDED)
        _ = sums.draws  # not made in a branch, for the other one reads them too
        state, is_direct = self.state, self.landing.is_direct

        # In the branches sums and means fuse with what reads them. Outside they would
        # be float32 copies of all gradients.
        def last(totals):
            means = self._tree(map(self._mean, sums.leaves, totals))
            return guarded(
                self.config.inner,
                params,
                state.inner_state,
                means,
                UNGUARDED,
                self.landing,
                self.extra_args,
            )

        def update():
            totals = sums.totals()
            result, inner_state = last(totals)
            emptied = [not_folded(jnp.zeros_like(x)) for x in totals]
            return result, sums.stored(emptied), inner_state

        def wait():
            totals = sums.totals()
            shapes, _ = jax.eval_shape(last, totals)
            neutral = neutral_updates(shapes)
            fill = lambda x, value: jnp.full(x.shape, value, x.dtype)
            result = params if is_direct else jax.tree.map(fill, shapes, neutral)
            return result, sums.stored(totals), state.inner_state

        result, parts, inner_state = jax.lax.cond(self._is_last, update, wait)
        parts = self.guard.chosen(parts, self._parts)
        inner_state = self.guard.chosen(inner_state, state.inner_state)
        if is_direct:
            result = self.guard.chosen(result, params)
        else:
            result = self.guard.updates(result)
        return result, self._in_containers(parts), inner_state

    @property
    def _is_last(self) -> jax.Array:
        return self.state.mini_step == jnp.int32(self.config.every - 1)

    @functools.cached_property
    def _named(self) -> tuple[list[str], list, trees.PyTreeDef]:
        return trees.named_leaves(self.grads if self.params is None else self.params)

    def _tree(self, leaves):
        return self._named[2].unflatten(leaves)

    def _in_containers(self, parts: Sequence):
        format_, treedef = self.config.format, self._named[2]
        return in_parallel_trees(format_, treedef, parts, self.state.accumulators)

    @functools.cached_property
    def _parts(self) -> list:
        """The accumulators, leaf by leaf; None at leaves that are not float."""
        names, leaves, treedef = self._named
        parts = leaf_by_leaf(names, treedef, self.state.accumulators, "accumulators")
        return [
            uncontained(part) if trees.is_float(leaf) else None
            for leaf, part in zip(leaves, parts, strict=True)
        ]

    def _sums(self, parts: Sequence, guard: Guard | Unguarded) -> Sums:
        names, leaves, treedef = self._named
        grads = trees.parts_of(names, treedef, self.grads, "grads")
        lowbit = stepper_of(self.config.inner)
        told: Sequence = [None] * len(names)
        if isinstance(lowbit, Lowbit):
            told = lowbit.told_shardings(self.params)
        return Sums(
            [
                StoredLeaf(name, leaf, None, sharding=sharding).with_grad(grad)
                for name, leaf, sharding, grad in zip(
                    names, leaves, told, grads, strict=True
                )
            ],
            self.state.seed,
            self.state.count,
            context.current().layer,
            parts,
            list(map(self.config.format_of, leaves)),
            guard,
        )

    def _mean(self, leaf: StoredLeaf, total):
        """The mean of a leaf's gradients; other gradients as they are."""
        if not trees.is_float(leaf.param):
            return leaf.grad
        mean = total * jnp.float32(1 / self.config.every)
        # A transformation of this package takes float32 for narrow parameters.
        if trees.is_quantized(leaf.param) or stepper_of(self.config.inner) is not None:
            return mean
        return mean.astype(leaf.grad.dtype)
