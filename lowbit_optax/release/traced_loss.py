"""A loss traced at its arguments, and where the parameters' leaves are in it."""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax._jaxprs.program import trace as trace_program
from lowbit_optax.formats import quantized_tensor as tensors
from lowbit_optax.lpmm.gradients import with_stand_in


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """A leaf of the parameters, and its values in the traced loss.

    Args:
      name: its path.
      value: an array or QuantizedTensor.
      parts: numbers of the values that are its arrays.
      slot: number of the value that its gradient is taken of; None if it has none.
      gradient: shape and dtype of its gradient; its own if it has none.
    """

    name: str
    value: typing.Any
    parts: tuple[int, ...]
    slot: int | None
    gradient: jax.ShapeDtypeStruct

    @property
    def arrays(self) -> list[jax.Array]:
        return jax.tree.leaves(self.value)

    @property
    def is_quantized(self) -> bool:
        return tensors.is_quantized(self.value)

    def with_arrays(self, arrays: Sequence):
        """Its value with other arrays, of one layer or of all."""
        return jax.tree.unflatten(jax.tree.structure(self.value), arrays)

    def no_gradient(self) -> jax.Array:
        """Zeros in the place of its gradient."""
        if self.is_quantized:
            return jnp.zeros(self.gradient.shape, self.gradient.dtype)
        return jnp.zeros_like(self.value)  # placed like it


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A loss traced at given arguments.

    Args:
      program: of ``(params, args, kwargs)``, flat.
      leaves: of the parameters.
      treedef: theirs.
      rest: the arrays among args and kwargs.
      shapes: the result, as a tree.
    """

    program: LossProgram
    leaves: list[Leaf]
    treedef: jax.tree_util.PyTreeDef
    rest: list
    shapes: typing.Any

    def tree(self, of: Callable[[Leaf], typing.Any]):
        """A tree like the parameters."""
        return self.treedef.unflatten([of(leaf) for leaf in self.leaves])

    def result(self, flat: Sequence):
        """The loss, or ``(loss, aux)``, from its arrays."""
        return jax.tree.unflatten(jax.tree.structure(self.shapes), flat)


def trace(loss_fn: Callable, has_aux: bool, dtype, params, args, kwargs) -> Traced:
    """Trace a loss once.

    Args:
      loss_fn, has_aux: as in :func:`lowbit_optax.release.value_and_update`.
      dtype: of the gradients of QuantizedTensors.
      params, args, kwargs: its arguments. What is no array in args and kwargs stays
        as it is, a flag for instance.
    """
    names, values, treedef = tensors.named_leaves(params)
    seen, gradients = [], []
    for name, value in zip(names, values, strict=True):
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            raise TypeError(f"release: params{name} is {value!r}, not an array")
        is_quantized = tensors.is_quantized(value)
        like = dtype if is_quantized else value.dtype
        gradients.append(jax.ShapeDtypeStruct(value.shape, like))
        seen.append(with_stand_in(value, gradients[-1]) if is_quantized else value)
    given, structure = jax.tree.flatten((args, kwargs))
    rest = [x for x in given if _is_array(x)]

    def loss(params, rest):
        arrays = iter(rest)
        args, kwargs = structure.unflatten(
            next(arrays) if _is_array(x) else x for x in given
        )
        return loss_fn(params, *args, **kwargs)

    program, shapes = trace_program(loss, treedef.unflatten(seen), rest)
    _check_result(shapes, has_aux)
    inputs = iter(program.inputs)
    leaves = []
    for name, value, like in zip(names, values, gradients, strict=True):
        parts = tuple(next(inputs) for _ in jax.tree.leaves(value))
        slot = parts[0] if jnp.issubdtype(value.dtype, jnp.inexact) else None
        if tensors.is_quantized(value):
            slot = next(inputs)
        leaves.append(Leaf(name, value, parts, slot, like))
    return Traced(program, leaves, treedef, rest, shapes)


def _is_array(x) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _check_result(shapes, has_aux: bool) -> None:
    if has_aux and not (isinstance(shapes, tuple) and len(shapes) == 2):
        raise TypeError(
            f"release: with has_aux the loss must return (loss, aux), not {shapes}"
        )
    loss = shapes[0] if has_aux else shapes
    is_real = hasattr(loss, "dtype") and jnp.issubdtype(loss.dtype, jnp.floating)
    if not is_real or loss.shape != ():
        raise TypeError(
            f"release: the loss must be a real scalar, and is {loss}. If the function "
            "returns (loss, aux), say has_aux=True"
        )
