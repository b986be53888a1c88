"""Any optax transformation on quantised weights: dequantise, update, quantise.

QuantizedTensor --dequantize--> master --> inner.update --> master + update
     ^                                                          |
     +---- modular difference <---- quantize, steps anew -------+
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import optax

from lowbit_optax import trees
from lowbit_optax.float_layouts import is_narrow
from lowbit_optax.lpmm import quantized_tensor as tensors
from lowbit_optax.moments import MomentPlan, Moments
from lowbit_optax.random_bits import RandomBits, leaf_number, random_bits
from lowbit_optax.rounding import to_float32
from lowbit_optax.wrapper import LowbitTransformation, apply_updates


class QuantizedState(typing.NamedTuple):
    """State of :func:`quantized`.

    Args:
      count: uint32 scalar, steps taken; with ``seed`` it is all the random state.
      seed: uint32 scalar.
      inner_state: the inner transformation's state, its moments in their formats.
    """

    count: jax.Array
    seed: jax.Array
    inner_state: typing.Any


def quantized(
    inner: optax.GradientTransformation,
    *,
    moments: Moments = None,
    rounding: tensors.Rounding = "stochastic",
    seed: int | None = None,
    min_size: int | None = None,
) -> LowbitTransformation:
    """Run an optax transformation in float32 on :class:`QuantizedTensor` parameters.

        theta_t = Q(theta_{t-1} + u_t),  u_t from the inner transformation

    Args:
      inner: any optax transformation. It sees arrays at the places of quantised
        weights.
      moments: formats of its moments, as in :func:`lowbit_optax.lowbit`.
      rounding: of the weights: ``"stochastic"``, with E[Q(x)] = x, or ``"nearest"``,
        under which updates below half a step are lost.
      seed: of stochastic rounding, 0 if None.
      min_size: moments with fewer elements stay float32; 4096 if None.

    Returns:
      A transformation whose ``update`` needs ``params``, takes gradients with arrays at
      the places of QuantizedTensors, and returns QuantizedTensors of uint32 differences
      there, modulo 2^32: ``optax.apply_updates`` lands exactly. Other float leaves are
      updated as the inner transformation says. A weight that is not finite becomes NaN.

    Raises:
      TypeError, ValueError: for arguments, parameters or gradients that are not as
        above; errors about a leaf name its path.

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> params = lowbit_optax.quantize_params({"w": jnp.ones((64, 64))}, bits=12)
    >>> tx = quantized(optax.lion(1e-2))
    >>> grads = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> params["w"].dequantize()[0, 0]
    Array(0.9897461, dtype=float32)
    """
    tensors.check_choices(12, tensors.DEFAULT_GROUP, rounding)
    seed = 0 if seed is None else seed
    min_size = 4096 if min_size is None else min_size
    tensors.check_int("seed", seed, 0, 2**32 - 1)
    tensors.check_int("min_size", min_size, 0)
    config = Quantized(
        optax.with_extra_args_support(inner),
        moments,
        rounding,
        seed,
        min_size,
    )
    return LowbitTransformation(config.init, config.update, config)


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """The choices of one :func:`quantized` call, and the functions made of them."""

    inner: optax.GradientTransformationExtraArgs
    moments: Moments
    rounding: tensors.Rounding
    seed: int
    min_size: int

    def init(self, params: optax.Params) -> QuantizedState:
        """The state of a tree of parameters."""
        if params is None:
            raise ValueError("lpmm: init needs params")
        names, leaves, treedef = tensors.named_leaves(params)
        masters = _masters(names, leaves)
        count, seed = jnp.zeros([], jnp.uint32), jnp.asarray(self.seed, jnp.uint32)
        inner_state = self.inner.init(treedef.unflatten(masters))
        plan = self._plan(names, masters, inner_state)
        random = _random(names, seed, count)
        return QuantizedState(count, seed, plan.encode(inner_state, random))

    def update(self, updates, state, params=None, **extra_args):
        """As in optax: ``(updates that land exactly, new state)``."""

        def difference(old, new, update):
            if not tensors.is_quantized(old):
                return update
            return jax.tree.map(lambda a, b: b - a, old, new)

        return self._advance(updates, state, params, difference, extra_args)

    def step(self, grads, state, params, **extra_args):
        """``(new params, new state)`` without differences."""

        def new_param(old, new, update):
            if tensors.is_quantized(old):
                return new
            return apply_updates(old, update)

        return self._advance(grads, state, params, new_param, extra_args)

    def inner_update(self, grads, state, params, **extra_args):
        """Refused: quantised weights have no leaf in which an update could cancel."""
        del grads, state, params, extra_args
        raise TypeError("quantised weights have no report of cancelled updates")

    def _advance(self, grads, state, params, result, extra_args):
        if params is None:
            raise ValueError(
                "lpmm: update needs params; call tx.update(grads, state, params)"
            )
        if not isinstance(state, QuantizedState):
            raise TypeError(
                f"lpmm: state is a {type(state).__name__}, not a QuantizedState; was "
                "it made by this transformation's init?"
            )
        names, leaves, treedef = tensors.named_leaves(params)
        masters = _masters(names, leaves)
        given = trees.beside(names, treedef, grads, "grads")
        wide = list(map(widened, names, given, leaves))
        expected = jax.eval_shape(self.inner.init, treedef.unflatten(masters))
        plan = self._plan(names, masters, expected)
        random = _random(names, state.seed, state.count)
        updates, inner_state = self.inner.update(
            treedef.unflatten(wide),
            plan.decode(state.inner_state),
            treedef.unflatten(masters),
            **extra_args,
        )
        updates = trees.beside(names, treedef, updates, "inner updates")
        is_stochastic = self.rounding == "stochastic"
        results = []
        for leaf, master, update, bits in zip(
            leaves, masters, updates, random, strict=True
        ):
            new = None
            if tensors.is_quantized(leaf):
                new = master + update.astype(jnp.float32)
                new = tensors.requantize(new, leaf, bits if is_stochastic else None)
            results.append(result(leaf, new, update))
        return treedef.unflatten(results), QuantizedState(
            optax.safe_increment(state.count),
            state.seed,
            plan.encode(inner_state, random),
        )

    def _plan(self, names, masters, inner_state) -> MomentPlan:
        expected = trees.abstract(inner_state)
        return MomentPlan(
            self.inner, self.moments, names, masters, expected, self.min_size
        )


def widened(name: str, grad, param):
    """A leaf's gradient in float32, after checks.

    Raises:
      TypeError, ValueError: naming the leaf, for a gradient that is not a float array
        of the parameter's shape.
    """
    if isinstance(grad, tensors.QuantizedTensor):
        raise TypeError(
            f"lpmm: gradient of params{name} is a QuantizedTensor; accepted is an "
            f"array of shape {param.shape}, see lowbit_optax.lpmm.value_and_grad"
        )
    if not hasattr(grad, "dtype"):
        raise TypeError(f"lpmm: gradient of params{name} is {grad!r}, not an array")
    if not trees.is_float(param):
        return grad
    if not trees.is_float(grad):
        raise TypeError(
            f"lpmm: gradient of params{name} is {grad.dtype}; accepted are real "
            "floating-point dtypes"
        )
    if grad.shape != param.shape:
        raise ValueError(
            f"lpmm: gradient of params{name} has shape {grad.shape}; its parameter has "
            f"{param.shape}"
        )
    return to_float32(grad)


def _masters(names, leaves) -> list:
    """What the inner transformation sees: float32 arrays; other leaves as they are."""
    masters = []
    for name, leaf in zip(names, leaves, strict=True):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise TypeError(f"lpmm: params{name} is {leaf!r}, not an array")
        if tensors.is_quantized(leaf):
            leaf = tensors.read(name, leaf, jnp.float32)
        elif trees.is_float(leaf) and is_narrow(leaf.dtype):
            leaf = to_float32(leaf)
        masters.append(leaf)
    return masters


def _random(names: list[str], seed, count) -> list[RandomBits]:
    return random_bits(seed, count, [leaf_number(name) for name in names])
