"""A traced loss, and the values in it that belong to each leaf of the parameters."""

import dataclasses
import itertools
import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from lowbit_optax._jaxprs.graph import Node
from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax._step import trees
from lowbit_optax.formats import quantized_tensor as tensors
from lowbit_optax.lpmm.gradients import with_stand_in


@dataclasses.dataclass(frozen=True, eq=False)
class ParamLeaf:
    """A leaf of the parameters, and its values in the traced loss.

    Args:
      name: the path of the leaf.
      value: an array or a QuantizedTensor.
      nodes: the values of ``arguments`` in the traced loss.
      gradient: the shape and dtype of the gradient. For integers, the leaf's dtype.
    """

    name: str
    value: typing.Any
    nodes: tuple[Node, ...]
    gradient: jax.ShapeDtypeStruct

    @property
    def arguments(self) -> list[jax.Array]:
        """The arrays of the leaf, then zeros that stand in for a QuantizedTensor."""
        arrays = jax.tree.leaves(self.value)
        return [*arrays, self.zero_gradient()] if self.is_quantized else arrays

    @property
    def gradient_value(self) -> Node | None:
        """The value with respect to which the loss is differentiated.

        It is the array itself, or the array that stands in for a QuantizedTensor. None
        for integers, which have no gradient.
        """
        return self.nodes[-1] if trees.is_inexact(self.value) else None

    @property
    def is_quantized(self) -> bool:
        """Whether the leaf is quantized."""
        return tensors.is_quantized(self.value)

    def zero_gradient(self) -> jax.Array:
        """Return zeros like the gradient; for an array, with the array's sharding."""
        if self.is_quantized:
            return jnp.zeros(self.gradient.shape, self.gradient.dtype)
        return jnp.zeros_like(self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLoss:
    """A traced loss and its arguments.

    Args:
      program: the program, whose inputs are the arrays of ``(params, args, kwargs)``.
      leaves: the leaves of the parameters.
      treedef: the structure of the parameters.
      other_arguments: the arrays in args and kwargs.
      result: the structure of the results.
      has_effects: whether the loss has side effects, such as printing.
    """

    program: LossProgram
    leaves: list[ParamLeaf]
    treedef: typing.Any
    other_arguments: list
    result: typing.Any
    has_effects: bool

    def tree_of(self, found: Mapping[str, typing.Any]):
        """Return a tree with the structure of the parameters from values by path."""
        return self.treedef.unflatten([found[x.name] for x in self.leaves])

    @property
    def arguments(self) -> list:
        """The arguments of the program."""
        arrays = [x for leaf in self.leaves for x in leaf.arguments]
        return arrays + self.other_arguments


def trace_loss(
    loss_fn: Callable, has_aux: bool | None, dtype, params, args, kwargs
) -> TracedLoss:
    """Trace a loss once.

    Args:
      loss_fn, has_aux: see :func:`lowbit_optax.release.value_and_update`.
      dtype: the dtype of the gradients of QuantizedTensors.
      params, args, kwargs: arguments of the loss. Leaves of args and kwargs that are
        not arrays, such as flags, are passed to the loss without tracing.

    Raises:
      TypeError: if a leaf of the parameters is not an array, or if the result of the
        loss does not match ``has_aux``.
    """
    check_params(params)
    names, values, treedef = trees.named_leaves(params)
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
    check_result(shapes, has_aux)
    inputs, leaves = iter(program.inputs), []
    for name, value, gradient in zip(names, values, gradients, strict=True):
        count = len(jax.tree.leaves(value)) + tensors.is_quantized(value)
        nodes = tuple(itertools.islice(inputs, count))
        leaves.append(ParamLeaf(name, value, nodes, gradient))
    result, has_effects = jax.tree.structure(shapes), bool(closed.effects)
    return TracedLoss(program, leaves, treedef, other_arguments, result, has_effects)


def _is_array(x) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def check_params(params, accepts_quantized: bool = True) -> None:
    """Raise a TypeError unless the leaves are real arrays or QuantizedTensors."""
    for name, x in trees.by_path(params).items():
        is_real = _is_array(x) and not jnp.issubdtype(x.dtype, jnp.complexfloating)
        if not is_real or tensors.is_quantized(x) > accepts_quantized:
            accepted = "a real array" + " or a QuantizedTensor" * accepts_quantized
            found = trees.describe(x) if _is_array(x) else repr(x)
            raise TypeError(f"release: params{name} must be {accepted}, got {found}")


def check_result(shapes, has_aux: bool | None) -> None:
    """Raise a TypeError unless a loss returned a real scalar, or one and ``aux``.

    If ``has_aux`` is None, both are accepted.
    """
    if has_aux is None:
        has_aux = isinstance(shapes, tuple)
    if has_aux and not (isinstance(shapes, tuple) and len(shapes) == 2):
        raise TypeError(
            f"release: loss_fn must return (loss, aux) with has_aux=True, got {shapes}"
        )
    loss: typing.Any = shapes[0] if has_aux else shapes
    is_real = _is_array(loss) and jnp.issubdtype(loss.dtype, jnp.floating)
    if not is_real or loss.shape != ():
        raise TypeError(
            f"release: the loss must be a real scalar, got {loss}; if loss_fn returns "
            "(loss, aux), pass has_aux=True"
        )
