"""``dtypes`` of ``from_master`` and ``convert``: one of all leaves, or a tree."""

import typing

import jax

from lowbit_optax._step import trees


def of_leaves(function: str, dtypes: typing.Any, name: str, params: typing.Any) -> list:
    """What ``dtypes`` has for each leaf of the parameters, in their order.

    Args:
      function: for the error.
      dtypes: a tree that is a prefix of ``params``, of anything.
      name, params: tree of parameters, in which a QuantizedTensor is one leaf, and
        its name for the error.

    Raises:
      ValueError: if it is not a prefix.
    """

    def below(kind, part):
        return jax.tree.map(lambda _: kind, part, is_leaf=trees.is_quantized)

    is_leaf = lambda x: x is None or trees.is_quantized(x)
    try:
        spread = jax.tree.map(below, dtypes, params, is_leaf=is_leaf)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{function}: dtypes must have the structure of {name}, or of a prefix of "
            f"it: {error}"
        ) from error
    return jax.tree.structure(params, is_leaf=trees.is_quantized).flatten_up_to(spread)
