"""Trees of parameters beside trees of state, and errors that name the leaf."""

import contextlib
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lowbit_optax.formats import quantized_tensor as tensors

PyTree = typing.Any
PyTreeDef = typing.Any


def named_leaves(tree: PyTree) -> tuple[list[str], list, PyTreeDef]:
    """Paths, leaves and structure of a tree; a path reads like ``['dense']['bias']``.

    A QuantizedTensor is one leaf.

    >>> named_leaves({"w": 1, "b": None})[:2]
    (["['w']"], [1])
    """
    with_path, treedef = jax.tree_util.tree_flatten_with_path(tree, is_quantized)
    names = [jax.tree_util.keystr(path) for path, _ in with_path]
    return names, [leaf for _, leaf in with_path], treedef


def parts_of(
    names: Sequence[str],
    treedef: PyTreeDef,
    tree: PyTree,
    what: str,
) -> list:
    """The parts of ``tree`` that stand at the leaves of the parameters' structure.

    Args:
      names, treedef: of the parameters, from :func:`named_leaves`.
      tree: of the same structure; at a leaf it may hold anything (None included).
      what: its name, for the error.

    Raises:
      ValueError: naming the first leaf where the structures part.
    """
    try:
        return treedef.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        # None may stand at a leaf, and is not missing.
        with_path = jax.tree_util.tree_flatten_with_path(tree, lambda x: x is None)[0]
        given = {jax.tree_util.keystr(path) for path, _ in with_path}
        missing = [name for name in names if name not in given]
        extra = sorted(given - set(names))
        where = f"missing at {missing[0]}" if missing else "different"
        if not missing and extra:
            where = f"at {extra[0]}, where params have no leaf"
        raise ValueError(
            f"{what} must have the structure of params: {what} are {where}. "
            f"Given {jax.tree.structure(tree)}, accepted {treedef}"
        ) from error


def abstract(tree: PyTree) -> PyTree:
    """Shapes and dtypes of the arrays of a tree; other leaves stay as they are.

    >>> abstract({"w": jnp.ones((2, 3)), "name": "x"})["name"]
    'x'
    """

    def leaf(x):
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x

    return jax.tree.map(leaf, tree)


def is_float(leaf) -> bool:
    """Whether a leaf is a real floating-point array."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_quantized(leaf) -> bool:
    """Whether a leaf is a weight that has to be dequantised to be read."""
    return tensors.is_quantized(leaf)


def check_quantized(leaf) -> None:
    """Raise unless the parts of a quantised weight belong together."""
    tensors.check_parts(leaf)


@contextlib.contextmanager
def naming(name: str):
    """Within it, errors about a quantised weight's parts name its leaf."""
    try:
        yield
    except (ValueError, AttributeError) as error:
        raise ValueError(f"params{name}: {error}") from error
