"""How the arrays of a run are stored, in words that a checkpoint can keep."""

import typing
from collections.abc import Mapping

import jax

from lowbit_optax._step import trees
from lowbit_optax._types import PyTree, Transformation
from lowbit_optax.states.decoded import Recorded, recorded_nodes
from pallas_kernels.layout import VERSION

_SHOWN = 3


def storage_formats(tx: Transformation, params: PyTree) -> dict[str, str]:
    """How each array of parameters and state is stored, to be kept in a checkpoint.

    Packed words do not say what they stand for: codes of two kinds may have one shape
    and dtype, and Orbax casts what has another dtype. So save this beside the arrays,
    as JSON for example, and call :func:`check_storage_formats` before they are read.

    Args:
      tx: an optax transformation; those of :func:`lowbit_optax.lowbit` may be anywhere
        inside it.
      params: tree of arrays or ShapeDtypeStructs.

    Returns:
      Paths and descriptions, and the version of the storage layout. What only decides
      how later steps round (seeds, stochastic or nearest) is not in it.

    Raises:
      ValueError, TypeError: as ``tx.init``.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)}
    >>> found = storage_formats(lowbit_optax.lowbit_sgd(0.1, 0.9), params)
    >>> found["params['w']"]
    'bfloat16[64, 64], nearest_8_bits_v2 uint32[16, 64]'
    >>> found["state.inner_state[0].trace['w']"]
    "float32[64, 64] in 8-bit signed 'companded' codes, blocks of 32, bfloat16 scales"
    """
    names, leaves, _ = trees.named_leaves(params)
    found = {"layout": str(VERSION)}
    for name, leaf in zip(names, leaves, strict=True):
        found[f"params{name}"] = trees.describe(leaf)
        if trees.is_quantized(leaf):
            found[f"params{name}"] += f" in {leaf.stored_as}"
    by_name = dict(zip(names, leaves, strict=True))
    for path, node in recorded_nodes(tx, params)[0]:
        where = f"state{jax.tree_util.keystr(path)}"
        if isinstance(node, Recorded):
            _add_lowbit(found, where, node, by_name)
        else:
            found[where] = trees.describe(node)
    return found


def check_storage_formats(
    stored: Mapping[str, str], tx: Transformation, params: PyTree
) -> None:
    """Refuse a checkpoint that stores its arrays in another way than a run does.

    Args:
      stored: what :func:`storage_formats` returned when the checkpoint was saved.
      tx, params: of the run that is to go on.

    Raises:
      ValueError: naming the first arrays that differ, and how.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> saved = storage_formats(lowbit_optax.kahan_sgd(0.1), params)
    >>> check_storage_formats(saved, lowbit_optax.extra_bits_sgd(0.1), params)
    Traceback (most recent call last):
    ValueError: the checkpoint stores other formats: params['w'] is bfloat16[64, 64],
    compensation bfloat16[64, 64] there and bfloat16[64, 64], nearest_most_bits_v2
    uint32[32, 64] here. ...
    """
    wanted = storage_formats(tx, params)
    differ = [
        f"{name} is {stored.get(name, 'nothing')} there and "
        f"{wanted.get(name, 'nothing')} here"
        for name in wanted | dict(stored)
        if stored.get(name) != wanted.get(name)
    ]
    if not differ:
        return
    more = len(differ) - _SHOWN
    shown = "; ".join(differ[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    raise ValueError(
        f"the checkpoint stores other formats: {shown}. Restore it by the "
        "transformation that it was saved with; lowbit_optax.convert then makes this "
        "run's parameters and state of it"
    )


def _add_lowbit(
    found: dict[str, str], where: str, node: Recorded, by_name: Mapping[str, typing.Any]
) -> None:
    """Add what one ``lowbit`` keeps: residuals to the parameters, and its moments."""
    leaves = node.leaves("tx", by_name)
    kind = node.config.weights.residual_name
    for leaf in leaves:
        if leaf.format is None:
            continue
        residual = jax.eval_shape(leaf.format.init, trees.abstract(leaf.param))
        if residual is not None:
            found[f"params{leaf.name}"] += f", {kind} {trees.describe(residual)}"
    plan = node.plan(leaves)
    parts = jax.tree_util.tree_flatten_with_path(plan.expected)[0]
    for (path, part), storage in zip(parts, plan.storage, strict=True):
        text = trees.describe(part)
        format_ = storage and storage.format
        if format_ is not None:
            text += f" in {format_.stored_as}"
        found[f"{where}.inner_state{jax.tree_util.keystr(path)}"] = text
