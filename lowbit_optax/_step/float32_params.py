"""The parameters that stay float32 when a model is cast, and a warning if most do.

``from_master`` and other functions with a ``keep_float32`` argument call
:func:`is_bias_or_norm`. :func:`warn_of_wide_params` warns in ``init``, because weight
formats do not store float32 parameters in fewer bits.
"""

import inspect
import math
import re
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._arguments import brief, check_type
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import context, trees
from lowbit_optax._step.plan import warn_once
from lowbit_optax._types import PyTree
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.quantized_weights import QuantizedWeights

KeepFloat32 = Callable[[str, typing.Any], bool] | None
"""``keep_float32(path, leaf) -> bool``; if None, no parameter stays float32."""

_NORM = re.compile(r"norm(?!al)|^ln(_|\d|$)")

_MOST_VECTORS = 1024
"""Leaves with more vectors along their last axis are matrices in all but name."""


def is_bias_or_norm(path: str, leaf) -> bool:
    """Return whether a leaf belongs to a bias or a normalization.

    This is the default of ``keep_float32``. It returns True for leaves with fewer than
    two axes. It also returns True for leaves of at most 1,024 vectors whose name ends
    with ``bias`` or is ``scale``, or whose name or innermost module contains ``norm``
    or is similar to ``ln_1``. These include biases of attention layers with an axis of
    heads and an axis of features, and scales that are stacked over layers. Such leaves
    use a small part of a model's memory. The function returns False for matrices,
    convolutions and embeddings, also inside a normalization: leaves of other modules,
    such as ``['norm1']['linear']['kernel']``, and leaves named ``kernel``.

    Args:
      path: path of the leaf, as ``jax.tree_util.keystr`` returns it.
      leaf: an array or a ShapeDtypeStruct.

    >>> import jax.numpy as jnp
    >>> is_bias_or_norm("['query']['bias']", jnp.ones((8, 64)))
    True
    >>> is_bias_or_norm("['layers']['ln_1']['weight']", jnp.ones((12, 64)))
    True
    >>> is_bias_or_norm("['query']['kernel']", jnp.ones((512, 8, 64)))
    False
    """
    # Paths in nnx end with .value.
    words = [x for x in re.findall(r"\w+", path.lower()) if x != "value"]
    name = words[-1] if words else ""
    is_named = name.endswith("bias") or name == "scale"
    is_named = is_named or (name != "kernel" and any(map(_NORM.search, words[-2:])))
    return leaf.ndim < 2 or (is_named and math.prod(leaf.shape[:-1]) <= _MOST_VECTORS)


def param_dtypes(
    params: PyTree,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    keep_float32: KeepFloat32 = is_bias_or_norm,
) -> PyTree:
    """Return the dtypes that :func:`lowbit_optax.from_master` gives to parameters.

    Args:
      params: tree of arrays or ShapeDtypeStructs, usually float32.
      dtype, keep_float32: see :func:`lowbit_optax.from_master`.

    Returns:
      A tree of dtypes with the structure of ``params``.

    Raises:
      TypeError: if ``dtype`` is not a floating-point dtype, or a leaf is not an array.

    >>> import jax.numpy as jnp
    >>> param_dtypes({"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)})
    {'bias': dtype('float32'), 'kernel': dtype(bfloat16)}
    """
    return narrowed_dtypes("param_dtypes: dtype", params, dtype, keep_float32)


def narrowed_dtypes(what: str, params, dtype, keep_float32: KeepFloat32):
    """Return a tree with the dtype of each parameter after the cast to ``dtype``.

    Args:
      what: the name of ``dtype``, for errors.
      params: tree of arrays or ShapeDtypeStructs.
      dtype: the new dtype of floating-point leaves.
      keep_float32: see :data:`KeepFloat32`.
    """
    narrow = float_dtype(what, dtype)
    accepted = "a function (path, leaf) -> bool, or None"
    function = what.partition(":")[0]
    check_type(f"{function}: keep_float32", keep_float32, Callable | None, accepted)

    def choose(name: str, leaf) -> np.dtype:
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "ndim"):
            raise TypeError(f"{what}: params{name} must be an array, got {brief(leaf)}")
        is_kept = keep_float32 is not None and keep_float32(name, leaf)
        is_narrowed = trees.is_float(leaf) and not is_kept
        return narrow if is_narrowed else leaf.dtype

    names, leaves, treedef = trees.named_leaves(params)
    return treedef.unflatten(map(choose, names, leaves))


def narrowed_shapes(what: str, params, dtype, keep_float32: KeepFloat32):
    """Return the shapes of parameters with the dtypes of :func:`narrowed_dtypes`."""
    dtypes = narrowed_dtypes(what, params, dtype, keep_float32)
    shape = lambda leaf, dtype: jax.ShapeDtypeStruct(leaf.shape, dtype)
    return jax.tree.map(shape, params, dtypes)


def dtypes_of(what: str, params, dtype, keep_float32: KeepFloat32):
    """Return ``dtype`` if it is a tree, and :func:`narrowed_dtypes` otherwise.

    For a tree of dtypes, ``keep_float32`` has no effect.
    """
    is_one = jax.tree_util.treedef_is_leaf(jax.tree.structure(dtype))
    return narrowed_dtypes(what, params, dtype, keep_float32) if is_one else dtype


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
