"""Describe how the arrays of a run are stored, in text for a checkpoint."""

import typing
from collections.abc import Mapping

import jax

from lowbit_optax._step import trees
from lowbit_optax._tables import some
from lowbit_optax._types import PyTree, Transformation
from lowbit_optax.states.decoded import Recorded, recorded_nodes
from pallas_kernels.layout import VERSION


def storage_formats(tx: Transformation, params: PyTree) -> dict[str, str]:
    """Describe the format of each stored array, as text for a checkpoint.

    Packed words do not record their format: codes of two formats may have the same
    shape and dtype, and Orbax casts arrays of another dtype. Therefore, save the result
    next to the arrays, for example as JSON, and call :func:`check_storage_formats`
    before you restore.

    Args:
      tx: an optax transformation, which may contain :func:`lowbit_optax.lowbit`
        anywhere.
      params: tree of arrays or ShapeDtypeStructs.

    Returns:
      A dict from paths to descriptions, with the version of the storage layout. It does
      not contain options that affect only later steps, such as seeds and rounding.

    Raises:
      ValueError, TypeError: the errors of ``tx.init``.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)}
    >>> found = storage_formats(lowbit_optax.lowbit_sgd(0.1, 0.9), params)
    >>> found["params['w']"]
    'bfloat16[64, 64], nearest_8_bits_v2 uint32[16, 64]'
    >>> found["state.inner_state[0].trace['w']"]
    "float32[64, 64] in 8-bit signed 'companded' codes, blocks of 32, bfloat16 scales"
    """
    by_name = trees.by_path(params)
    found = {"layout": str(VERSION)}
    for name, leaf in by_name.items():
        found[f"params{name}"] = trees.describe(leaf)
        if trees.is_quantized(leaf):
            found[f"params{name}"] += f" in {leaf.stored_as}"
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
    """Raise an error unless a checkpoint and a run store arrays in the same formats.

    Args:
      stored: result of :func:`storage_formats` when the checkpoint was saved.
      tx, params: transformation and parameters of the run that restores it.

    Raises:
      ValueError: if formats differ. The message names the first arrays that differ.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> saved = storage_formats(lowbit_optax.kahan_sgd(0.1), params)
    >>> check_storage_formats(saved, lowbit_optax.extra_bits_sgd(0.1), params)
    Traceback (most recent call last):
    ValueError: check_storage_formats: the checkpoint and this run must store the same
    formats: params['w'] is bfloat16[64, 64], compensation bfloat16[64, 64] in the
    checkpoint and bfloat16[64, 64], nearest_most_bits_v2 uint32[32, 64] in this run.
    ...
    """
    wanted = storage_formats(tx, params)
    differ = [
        f"{name} is {stored.get(name, 'nothing')} in the checkpoint and "
        f"{wanted.get(name, 'nothing')} in this run"
        for name in wanted | dict(stored)
        if stored.get(name) != wanted.get(name)
    ]
    if not differ:
        return
    raise ValueError(
        "check_storage_formats: the checkpoint and this run must store the same "
        f"formats: {some(differ)}. Restore with the transformation of the checkpoint, "
        "and then call lowbit_optax.convert"
    )


def _add_lowbit(
    found: dict[str, str], where: str, node: Recorded, by_name: Mapping[str, typing.Any]
) -> None:
    """Add the descriptions of the residuals and moments of one ``lowbit`` to found."""
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
