"""Sum gradients over microbatches in few bits, then update with their mean."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import optax

from lowbit_optax import formats
from lowbit_optax._arguments import check_static_int
from lowbit_optax._jaxprs.not_folded import not_folded
from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics.random_bits import accumulator_draws
from lowbit_optax._step import trees
from lowbit_optax._step.context import layerwise
from lowbit_optax._step.leaf import StoredLeaf, check_grad
from lowbit_optax._step.moments import in_parallel_trees, leaf_by_leaf
from lowbit_optax._step.step import random_of_leaves
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax.formats import MomentFormat
from lowbit_optax.lpmm.quantization import PAPER_BLOCK_SIZE

PAPER_ACCUMULATORS = formats.block_quantized(
    8, code="linear", block_size=PAPER_BLOCK_SIZE, rounding="stochastic"
)
"""The format of gradient accumulators in the LPMM paper."""


class AccumulationState(typing.NamedTuple):
    """State of :func:`accumulate_gradients`.

    Args:
      count: uint32 scalar, the number of calls so far. Together with ``seed`` it is the
        whole state of the random numbers.
      seed: uint32 scalar.
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
      if it is one of this package, and in the gradients' dtypes otherwise.

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
    config = Accumulation(inner, every, format, seed, min_size)
    return optax.GradientTransformationExtraArgs(config.init, config.update)


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulation:
    """The arguments of one call of :func:`accumulate_gradients`."""

    inner: optax.GradientTransformation
    every: int
    format: MomentFormat
    seed: int
    min_size: int

    def init(self, params) -> AccumulationState:
        """The initial state, with accumulators of zeros."""
        names, leaves, treedef = trees.named_leaves(params)
        count, seed = jnp.zeros([], jnp.uint32), jnp.asarray(self.seed, jnp.uint32)
        zeros = [_zeros(leaf) if trees.is_float(leaf) else leaf for leaf in leaves]
        parts = map(self._stored, leaves, zeros, _random(names, leaves, seed, count))
        return AccumulationState(
            count,
            seed,
            jnp.zeros([], jnp.int32),
            in_parallel_trees(self.format, treedef, list(parts)),
            self.inner.init(params),
        )

    def update(self, updates, state, params=None, **extra_args):
        """As in optax; the updates are zeros between two real updates."""
        inner = optax.with_extra_args_support(self.inner)
        names, leaves, treedef = trees.named_leaves(
            updates if params is None else params
        )
        grads = trees.parts_of(names, treedef, updates, "grads")
        parts = leaf_by_leaf(names, treedef, state.accumulators, "accumulators")
        random = _random(names, leaves, state.seed, state.count)

        # In the branches sums and means fuse with what reads them. Outside they would
        # be float32 copies of all gradients.
        def summed() -> tuple[list, typing.Any]:
            sums = list(map(self._sum, names, leaves, grads, parts))
            return sums, treedef.unflatten(map(self._mean, leaves, grads, sums))

        def stored(sums) -> list:
            return list(map(self._stored, leaves, sums, random))

        def last(means):
            return inner.update(means, state.inner_state, params, **extra_args)

        def update():
            sums, means = summed()
            result, inner_state = last(means)
            emptied = [not_folded(jnp.zeros_like(x)) for x in sums]
            return result, stored(emptied), inner_state

        def wait():
            sums, means = summed()
            shapes, _ = jax.eval_shape(last, means)
            result = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return result, stored(sums), state.inner_state

        result, parts, inner_state = jax.lax.cond(
            state.mini_step == jnp.int32(self.every - 1), update, wait
        )
        return result, AccumulationState(
            jnp.asarray(optax.safe_increment(state.count)),
            state.seed,
            (state.mini_step + jnp.int32(1)) % jnp.int32(self.every),
            in_parallel_trees(self.format, treedef, parts),
            inner_state,
        )

    def _sum(self, name: str, leaf, grad, part):
        """A gradient in float32 and the accumulator's sum; others as they are."""
        if not trees.is_float(leaf):
            return grad
        check_grad(name, grad, leaf)
        wide = StoredLeaf(name, leaf, None, grad=grad).wide_grad()
        format_ = self.format.for_leaf(leaf.shape, self.min_size)
        if format_ is None:
            return wide + (part if self.format.container is None else part.codes)
        try:
            return wide + layerwise(traced_once(_decoded, format_, leaf.shape))(part)
        except (AttributeError, ValueError) as error:
            raise ValueError(
                f"accumulate_gradients: the accumulator of params{name} is not one of "
                f"{format_}: was this state made with another format?"
            ) from error

    def _mean(self, leaf, grad, total):
        if not trees.is_float(leaf):
            return grad
        mean = total * jnp.float32(1 / self.every)
        # A transformation of this package takes float32 for narrow parameters.
        if trees.is_quantized(leaf) or stepper_of(self.inner) is not None:
            return mean
        return mean.astype(grad.dtype)

    def _stored(self, leaf, total, random):
        """A sum as its accumulator stores it; None at a leaf that is not float."""
        if not trees.is_float(leaf):
            return None
        format_ = self.format.for_leaf(total.shape, self.min_size)
        if format_ is None:
            return total
        encode = traced_once(_encoded, format_)
        return layerwise(lambda x: encode(x, random))(total)


def _encoded(format_: MomentFormat, total, random):
    return format_.encode(total, random, 0)


def _decoded(format_: MomentFormat, shape: tuple[int, ...], stored):
    return format_.decode(stored, shape)


def _zeros(leaf) -> jax.Array:
    if trees.is_quantized(leaf):
        return jnp.zeros(leaf.shape, jnp.float32)
    return jnp.zeros_like(leaf, jnp.float32)


def _random(names, leaves, seed, count):
    random = random_of_leaves(names, leaves, seed, count)
    return [accumulator_draws(bits) for bits in random]
