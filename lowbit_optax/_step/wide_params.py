"""A warning for float32 parameters, which weight formats do not store in fewer bits."""

import inspect
import math
from collections.abc import Sequence

import jax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import context, trees
from lowbit_optax._step.kept_float32 import is_bias_or_norm
from lowbit_optax._step.left_to_xla import warn_once
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.quantized_weights import QuantizedWeights

_FEWEST = 4096
"""If float32 parameters have fewer elements in total, there is no warning."""


def warn_of_wide_params(
    weights: WeightFormat, names: Sequence[str], params: Sequence
) -> None:
    """Warn once if most parameters are float32, and name functions that narrow them.

    Vectors, biases and normalizations do not count, because ``from_master`` keeps them
    in float32. ``jax.eval_shape`` of an ``init`` does not warn.
    """
    wide = {
        name: math.prod(x.shape)
        for name, x in zip(names, params, strict=True)
        if trees.is_float(x) and not is_narrow(x.dtype)
        if not trees.is_quantized(x) and not is_bias_or_norm(name, x)
    }
    size = sum(wide.values())
    floats = filter(trees.is_float, params)
    if size < _FEWEST or 2 * size <= sum(math.prod(x.shape) for x in floats):
        return
    if _is_only_shaped():
        return
    name = max(wide, key=lambda name: wide[name])
    largest = params[names.index(name)]
    fix = (
        "params, state = lowbit_optax.from_master(tx, params), or with flax "
        "lowbit_optax.training.TrainState.create(apply_fn=..., params=params, tx=tx) "
        "or lowbit_optax.training.nnx_optimizer(model, tx)"
    )
    if isinstance(weights, QuantizedWeights):
        fix = (
            "params = lowbit_optax.lpmm.quantize_params(params, bits=12) before tx.init"
        )
    warn_once(
        f"lowbit: most parameters are float32, and the largest is params{name}, "
        f"{trees.describe(largest)}. Weight formats do not change them, because they "
        f"store only parameters in fewer bits. To narrow the parameters, use {fix}. To "
        "keep them in float32 and store only the moments in fewer bits, pass "
        "warn=False"
    )


def _is_only_shaped() -> bool:
    """Return whether the caller runs under ``jax.eval_shape``, which computes nothing.

    Traced values are the same under ``jax.jit``, so this reads the calling frames.
    """
    shaped = inspect.unwrap(jax.eval_shape).__code__
    return any(frame.f_code is shaped for frame in context.calling_frames())
