"""A loss traced at its arguments, and where the leaves of the parameters are in it."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._jaxprs.graph import Node
from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax._step import trees
from lowbit_optax.formats import quantized_tensor as tensors
from lowbit_optax.lpmm.gradients import with_stand_in


@dataclasses.dataclass(frozen=True, eq=False)
class ParamLeaf:
    """A leaf of the parameters and its values in the traced loss.

    Args:
      name: its path.
      value: an array or a QuantizedTensor.
      array_values: the values that are its arrays.
      gradient_value: the value in which the loss is differentiated: the array
        itself, or the array that stands in for a QuantizedTensor. None for integers,
        which have no gradient.
      gradient: shape and dtype of its gradient; for integers, their own.
    """

    name: str
    value: typing.Any
    array_values: tuple[Node, ...]
    gradient_value: Node | None
    gradient: jax.ShapeDtypeStruct

    @property
    def arguments(self) -> list[jax.Array]:
        """Its arrays, and zeros for what stands in for a QuantizedTensor."""
        arrays = jax.tree.leaves(self.value)
        return [*arrays, self.zero_gradient()] if self.is_quantized else arrays

    @property
    def size(self) -> int:
        """How many elements its gradient has."""
        return math.prod(self.gradient.shape)

    @property
    def is_quantized(self) -> bool:
        """Whether it must be dequantised to be read."""
        return tensors.is_quantized(self.value)

    def zero_gradient(self) -> jax.Array:
        """Zeros of its gradient's shape and dtype; an array's are placed like it."""
        if self.is_quantized:
            return jnp.zeros(self.gradient.shape, self.gradient.dtype)
        return jnp.zeros_like(self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLoss:
    """A traced loss, and the arguments at which it was traced.

    Args:
      program: of ``(params, args, kwargs)``, flat.
      leaves: of the parameters.
      treedef: the parameters' structure.
      other_arguments: the arrays in args and kwargs.
      result_shapes: shape and dtype of the results, as a tree.
      has_effects: whether it does more than compute, such as print.
    """

    program: LossProgram
    leaves: list[ParamLeaf]
    treedef: typing.Any
    other_arguments: list
    result_shapes: typing.Any
    has_effects: bool

    def tree_of(self, found: Mapping[str, typing.Any]):
        """A tree like the parameters, with MaskedNode where nothing was found."""
        masked = optax.MaskedNode()
        return self.treedef.unflatten([found.get(x.name, masked) for x in self.leaves])

    @property
    def arguments(self) -> list:
        """The arguments of the program."""
        arrays = [x for leaf in self.leaves for x in leaf.arguments]
        return arrays + self.other_arguments

    def result(self, arrays: Sequence):
        """The loss, or ``(loss, aux)``, from its arrays."""
        return jax.tree.unflatten(jax.tree.structure(self.result_shapes), arrays)


def trace_loss(
    loss_fn: Callable, has_aux: bool, dtype, params, args, kwargs
) -> TracedLoss:
    """Trace a loss once.

    Args:
      loss_fn, has_aux: as in :func:`lowbit_optax.release.value_and_update`.
      dtype: of the gradients of QuantizedTensors.
      params, args, kwargs: arguments of the loss. Anything in args and kwargs that is
        not an array, such as a flag, is passed on as it is.

    Raises:
      TypeError: if a leaf of the parameters is not an array, or the loss does not
        return what ``has_aux`` says.
    """
    names, values, treedef = trees.named_leaves(params)
    for name, value in zip(names, values, strict=True):
        if not _is_array(value):
            raise TypeError(
                f"release: params{name} is {value!r}, not an array or QuantizedTensor"
            )
    gradients = [
        jax.ShapeDtypeStruct(x.shape, dtype if tensors.is_quantized(x) else x.dtype)
        for x in values
    ]
    traced = [
        with_stand_in(x, gradient) if tensors.is_quantized(x) else x
        for x, gradient in zip(values, gradients, strict=True)
    ]
    flat, structure = jax.tree.flatten((args, kwargs))
    other_arguments = [x for x in flat if _is_array(x)]

    def loss(params, other_arguments):
        arrays = iter(other_arguments)
        args, kwargs = structure.unflatten(
            next(arrays) if _is_array(x) else x for x in flat
        )
        return loss_fn(params, *args, **kwargs)

    tree = treedef.unflatten(traced)
    closed, shapes = jax.make_jaxpr(loss, return_shape=True)(tree, other_arguments)
    program = LossProgram(closed, parameters=len(jax.tree.leaves(traced)))
    _check_result(shapes, has_aux)
    leaves = _located(program, names, values, gradients)
    has_effects = bool(closed.effects)
    return TracedLoss(program, leaves, treedef, other_arguments, shapes, has_effects)


def _located(program: LossProgram, names, values, gradients) -> list[ParamLeaf]:
    """The leaves with their values, which are the program's first inputs."""
    inputs = iter(program.inputs)
    leaves = []
    for name, value, gradient in zip(names, values, gradients, strict=True):
        array_values = tuple(next(inputs) for _ in jax.tree.leaves(value))
        if tensors.is_quantized(value):
            gradient_value = next(inputs)
        elif jnp.issubdtype(value.dtype, jnp.inexact):
            (gradient_value,) = array_values
        else:
            gradient_value = None
        leaves.append(ParamLeaf(name, value, array_values, gradient_value, gradient))
    return leaves


def _is_array(x) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _check_result(shapes, has_aux: bool) -> None:
    if has_aux and not (isinstance(shapes, tuple) and len(shapes) == 2):
        raise TypeError(
            "release: with has_aux=True the loss must return (loss, aux); it returned "
            f"{shapes}"
        )
    loss: typing.Any = shapes[0] if has_aux else shapes
    is_real = _is_array(loss) and jnp.issubdtype(loss.dtype, jnp.floating)
    if not is_real or loss.shape != ():
        raise TypeError(
            f"release: the loss must be a real scalar; it is {loss}. If the function "
            "returns (loss, aux), give has_aux=True"
        )
