"""Sum gradients over microbatches in few bits, then update with their mean."""

import dataclasses
import typing
from collections.abc import Callable

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
    config = Accumulation(
        inner,
        stepper_of(inner) is not None,
        every,
        format,
        seed,
        min_size,
    )
    return optax.GradientTransformationExtraArgs(config.init, config.update)


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulation:
    """The configuration that one call of :func:`accumulate_gradients` makes.

    Args:
      inner, every, format, seed, min_size: as for that function.
      takes_float32: whether the inner transformation accepts float32 gradients for
        narrow parameters.
    """

    inner: optax.GradientTransformation
    takes_float32: bool
    every: int
    format: MomentFormat
    seed: int
    min_size: int

    def init(self, params) -> AccumulationState:
        """The initial state, with accumulators of zeros."""
        names, leaves, treedef = trees.named_leaves(params)
        count, seed = jnp.zeros([], jnp.uint32), jnp.asarray(self.seed, jnp.uint32)
        random = _random(names, leaves, seed, count)
        sums = [
            self._encode(_zeros(leaf), bits) if trees.is_float(leaf) else None
            for leaf, bits in zip(leaves, random, strict=True)
        ]
        return AccumulationState(
            count,
            seed,
            jnp.zeros([], jnp.int32),
            in_parallel_trees(self.format, treedef, sums),
            self.inner.init(params),
        )

    def update(self, updates, state, params=None, **extra_args):
        """As in optax; the updates are zeros between two real updates."""
        inner = optax.with_extra_args_support(self.inner)

        def last(means, inner_state):
            return inner.update(means, inner_state, params, **extra_args)

        def between(means, inner_state):
            shapes, _ = jax.eval_shape(last, means, inner_state)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        like = updates if params is None else params
        return self._accumulated(like, state, updates, last, between)

    def _accumulated(self, like, state, grads, last: Callable, between: Callable):
        """Process one microbatch.

        Args:
          like: the parameters, or a tree with their structure.
          state, grads: arguments of the call.
          last: ``(mean gradients, inner state) -> (result, inner state)``, for the last
            microbatch before an update.
          between: ``(mean gradients, inner state) -> result``, for the others.

        Returns:
          ``(result, new AccumulationState)``.
        """
        names, leaves, treedef = trees.named_leaves(like)
        given = trees.parts_of(names, treedef, grads, "grads")
        held = leaf_by_leaf(names, treedef, state.accumulators, "accumulators")
        random = _random(names, leaves, state.seed, state.count)

        # In the branches sums and means fuse with what reads them. Outside they would
        # be float32 copies of all gradients.
        def summed() -> tuple[list, typing.Any]:
            sums = [
                _widened(name, grad, leaf) + self._decode(name, part, leaf)
                if trees.is_float(leaf)
                else grad
                for name, grad, leaf, part in zip(
                    names, given, leaves, held, strict=True
                )
            ]
            means = treedef.unflatten(
                self._mean(total, grad, leaf)
                for total, grad, leaf in zip(sums, given, leaves, strict=True)
            )
            return sums, means

        def update():
            sums, means = summed()
            result, inner_state = last(means, state.inner_state)
            emptied = [not_folded(jnp.zeros_like(x)) for x in sums]
            return result, self._stored(leaves, emptied, random), inner_state

        def wait():
            sums, means = summed()
            result = between(means, state.inner_state)
            return result, self._stored(leaves, sums, random), state.inner_state

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

    def _mean(self, total, grad, leaf):
        if not trees.is_float(leaf):
            return grad
        mean = total * jnp.float32(1 / self.every)
        if self.takes_float32 or trees.is_quantized(leaf):
            return mean
        return mean.astype(grad.dtype)

    def _stored(self, leaves, sums, random):
        return [
            self._encode(total, bits) if trees.is_float(leaf) else None
            for leaf, total, bits in zip(leaves, sums, random, strict=True)
        ]

    def _format(self, shape) -> MomentFormat | None:
        return self.format.for_leaf(shape, self.min_size)

    def _encode(self, total, random):
        format_ = self._format(total.shape)
        if format_ is None:
            return total
        encode = traced_once(_encoded, format_)
        return layerwise(lambda x: encode(x, random))(total)

    def _decode(self, name, part, leaf):
        format_ = self._format(leaf.shape)
        if format_ is None:
            return part if self.format.container is None else part.codes
        try:
            return layerwise(traced_once(_decoded, format_, leaf.shape))(part)
        except (AttributeError, ValueError) as error:
            raise ValueError(
                f"accumulate_gradients: the accumulator of params{name} is not one of "
                f"{format_}: was this state made with another format?"
            ) from error


def _encoded(format_: MomentFormat, total, random):
    return format_.encode(total, random, 0)


def _decoded(format_: MomentFormat, shape: tuple[int, ...], stored):
    return format_.decode(stored, shape)


def _widened(name: str, grad, param):
    check_grad(name, grad, param)
    return StoredLeaf(name, param, None, grad=grad).wide_grad()


def _zeros(leaf) -> jax.Array:
    if trees.is_quantized(leaf):
        return jnp.zeros(leaf.shape, jnp.float32)
    return jnp.zeros_like(leaf, jnp.float32)


def _random(names, leaves, seed, count):
    random = random_of_leaves(names, leaves, seed, count)
    return [accumulator_draws(bits) for bits in random]
