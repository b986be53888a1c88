"""A warning for float32 parameters, which weight formats do not store in fewer bits."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.core import Tracer

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees
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

    Vectors, biases and normalisations do not count, because ``from_master`` keeps them
    in float32. Traced parameters do not count, so ``jax.eval_shape`` of an ``init``
    does not warn.
    """
    wide = {
        name: x
        for name, x in zip(names, params, strict=True)
        if isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Tracer)
        if trees.is_float(x) and not is_narrow(x.dtype)
        if not is_bias_or_norm(name, x)
    }
    size = sum(x.size for x in wide.values())
    floats = filter(trees.is_float, params)
    if size < _FEWEST or 2 * size <= sum(math.prod(x.shape) for x in floats):
        return
    name, largest = max(wide.items(), key=lambda item: item[1].size)
    fix = (
        "params, state = lowbit_optax.from_master(tx, params), or with flax "
        "lowbit_optax.training.TrainState.create(apply_fn=..., params=params, tx=tx, "
        "param_dtype=jnp.bfloat16) or lowbit_optax.training.nnx_optimizer(model, tx)"
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
