"""Functions that read trees of parameters and state, and describe them in errors."""

import contextlib
import textwrap
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lowbit_optax._arguments import brief
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax.formats.quantized_tensor import is_quantized

OTHER_STATE = (
    "The state belongs to a parameter of another shape, or to another transformation"
)

STATIC: typing.Any = {"static": True}
"""The metadata of a dataclass field that contains no arrays."""

PyTree = typing.Any
PyTreeDef = typing.Any


def named_leaves(tree: PyTree) -> tuple[list[str], list, PyTreeDef]:
    """Return paths, leaves and structure of a tree; a quantized weight is one leaf.

    A path is a string such as ``['dense']['bias']``.

    >>> named_leaves({"w": 1, "b": None})[:2]
    (["['w']"], [1])
    """
    with_path, treedef = jax.tree_util.tree_flatten_with_path(tree, is_quantized)
    names = [jax.tree_util.keystr(path) for path, _ in with_path]
    return names, [leaf for _, leaf in with_path], treedef


def by_path(tree: PyTree) -> dict[str, typing.Any]:
    """Return the leaves of a tree, keyed by path; see :func:`named_leaves`."""
    names, leaves, _ = named_leaves(tree)
    return dict(zip(names, leaves, strict=True))


def parts_of(names: Sequence[str], treedef: PyTreeDef, tree: PyTree, what: str) -> list:
    """Return the subtrees of ``tree`` at the positions of the parameters' leaves.

    A subtree can be anything, including None. ``what`` names ``tree`` in errors.
    """
    try:
        return treedef.flatten_up_to(tree)
    except (ValueError, TypeError):
        where = first_difference(names, tree)
        given, wanted = map(_shortened, (jax.tree.structure(tree), treedef))
        # The error of JAX prints all arrays of the tree.
        raise ValueError(
            f"{what} must have the structure of params ({where}), got {given} instead "
            f"of {wanted}"
        ) from None


def first_difference(names: Sequence[str], tree: PyTree) -> str:
    """Describe where a tree has other leaves than those with the given paths.

    >>> first_difference(["['a']", "['b']"], {"b": 1})
    "missing at ['a']"
    """
    # A part can be None, so None does not count as missing.
    with_path = jax.tree_util.tree_flatten_with_path(tree, lambda x: x is None)[0]
    given = {jax.tree_util.keystr(path) for path, _ in with_path}
    missing = [name for name in names if name not in given]
    extra = sorted(given - set(names))
    if missing:
        return f"missing at {missing[0]}"
    return f"additional leaf at {extra[0]}" if extra else "different node types"


def _shortened(x) -> str:
    return textwrap.shorten(str(x), 300, placeholder=" ...")


def leaves_of_prefix(what: str, prefix, params) -> list:
    """Return the entry of a prefix tree for each leaf of the parameters, in order.

    Args:
      what: the name of the prefix, for errors.
      prefix: a tree of anything, in which None and a QuantizedTensor are leaves.
      params: tree of parameters, in which a QuantizedTensor is one leaf.

    Raises:
      ValueError: if ``prefix`` is not a prefix of ``params``.

    >>> leaves_of_prefix("dtypes", {"a": 1, "b": 2}, {"a": [3, 4], "b": 5})
    [1, 1, 2]
    """
    treedef = jax.tree.structure(params, is_leaf=is_quantized)
    like = treedef.unflatten(range(treedef.num_leaves))
    is_leaf = lambda x: x is None or is_quantized(x)
    try:
        return treedef.flatten_up_to(jax.tree.broadcast(prefix, like, is_leaf=is_leaf))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{what} must have the structure of params, or of a prefix of it: "
            f"{_shortened(error)}"
        ) from None


def all_of(kind, tree: PyTree) -> list:
    """Return the nodes of a tree that are instances of ``kind``, one or several types.

    >>> all_of(dict, [{"w": 1}, 2])
    [{'w': 1}]
    """
    is_one = lambda x: isinstance(x, kind)
    return list(filter(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def abstract(tree: PyTree) -> PyTree:
    """Return a tree with ShapeDtypeStructs instead of its arrays.

    Dtypes are canonicalized as in JAX: float64 becomes float32 unless 64-bit types are
    enabled.

    >>> abstract({"w": jnp.ones((2, 3)), "name": "x"})["name"]
    'x'
    """

    def leaf(x):
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            return x
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(x.shape, dtype)

    return jax.tree.map(leaf, tree)


def is_float(leaf) -> bool:
    """Return whether a leaf is a real floating-point array or a quantized weight."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_inexact(leaf) -> bool:
    """Return whether a leaf is trained: a real or complex array or a quantized weight.

    Integers, booleans and PRNG keys are not. No step changes them.
    """
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_narrow_array(leaf) -> bool:
    """Return whether a leaf has a narrow float dtype, such as bfloat16."""
    return hasattr(leaf, "dtype") and is_narrow(leaf.dtype)


def describe(x) -> str:
    """Describe the dtype and shape of an array, or of the fields of a NamedTuple.

    >>> describe(jnp.ones((2, 3), jnp.bfloat16)), describe(None)
    ('bfloat16[2, 3]', 'none')
    """
    if isinstance(x, tuple) and hasattr(x, "_asdict"):
        fields = typing.cast(typing.Any, x)._asdict()
        parts = (f"{key}: {describe(part)}" for key, part in fields.items())
        return f"{type(x).__name__}({', '.join(parts)})"
    if x is None:
        return "none"
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype is None or shape is None:
        return f"a {type(x).__name__}"
    return f"{dtype}{list(shape)}"


def outline(state) -> str:
    """Return the names of the types in a state, such as a chain's state, for errors.

    >>> import optax
    >>> outline(optax.sgd(0.1, momentum=0.9).init(jnp.ones(3)))
    '(TraceState, EmptyState)'
    """
    if isinstance(state, tuple) and not hasattr(state, "_fields"):
        return f"({', '.join(map(outline, state))})"
    return type(state).__name__


def check_plain(function: str, name: str, leaf) -> None:
    """Raise a TypeError unless a leaf is an array that is not quantized yet."""
    if is_quantized(leaf):
        raise TypeError(
            f"{function}: params{name} must not be quantized yet, got a "
            f"{type(leaf).__name__}. Dequantize it first"
        )
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(f"{function}: params{name} must be an array, got {brief(leaf)}")


@contextlib.contextmanager
def naming(name: str):
    """Add the path of a quantized weight to errors inside the ``with`` block."""
    try:
        yield
    except (ValueError, AttributeError) as error:
        raise ValueError(f"params{name}: {error}") from error
