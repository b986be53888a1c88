"""Any optax transformation on quantised weights: dequantise, update, quantise.

QuantizedTensor --dequantize--> master --> inner.update --> master + update
     ^                                                          |
     +---- modular difference <---- quantize, steps anew -------+
"""

import dataclasses
import typing

import jax
import optax

from lowbit_optax import formats
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import stay
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step import engine, trees
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.moments import Moments
from lowbit_optax.formats import quantized_tensor as tensors
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.plain import NoResidual
from lowbit_optax.transformation import LowbitTransformation


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
        QuantizedWeights(rounding),
        moments,
        seed,
        min_size,
        "xla",
    )
    return LowbitTransformation(config.init, config.update, config)


@dataclasses.dataclass(frozen=True)
class QuantizedWeights(WeightFormat):
    """The weight format of QuantizedTensors: the parameter is all there is."""

    container: typing.ClassVar[type] = NoResidual

    rounding: tensors.Rounding

    def widen(self, param):
        return param.dequantize()

    def store(self, param, master, random, land=stay):
        draws = random if self.rounding == "stochastic" else None
        new = tensors.requantize(master, param, draws)
        if land is stay:
            return new, None, new
        # Integers modulo 2^32 always land.
        return new, None, jax.tree.map(lambda a, b: b - a, param, new)


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized(Lowbit):
    """The step of ``Lowbit`` with QuantizedTensors for leaves.

    Other narrow leaves are rounded to nearest.
    """

    def named_leaves(self, params):
        return tensors.named_leaves(params)

    def format(self, leaf) -> WeightFormat | None:
        if tensors.is_quantized(leaf):
            return self.weights
        is_held = trees.is_float(leaf) and is_narrow(leaf.dtype)
        return formats.nearest() if is_held else None

    def gradient(self, name, grad, leaf):
        return widened(name, grad, leaf)

    def _check(self, names, leaves):
        super()._check(names, leaves)
        for name, leaf in zip(names, leaves, strict=True):
            if tensors.is_quantized(leaf):
                with tensors.naming(name):
                    tensors.check_parts(leaf)


def widened(name: str, grad, param):
    """A leaf's gradient in float32, after checks.

    Raises:
      TypeError, ValueError: naming the leaf, for a gradient that is not a float array
        of the parameter's shape.
    """
    if tensors.is_quantized(grad):
        raise TypeError(
            f"lpmm: gradient of params{name} is a QuantizedTensor; accepted is an "
            f"array of shape {param.shape}, see lowbit_optax.lpmm.value_and_grad"
        )
    grad = engine.widened(name, grad, param)
    return to_float32(grad) if trees.is_float(param) else grad
