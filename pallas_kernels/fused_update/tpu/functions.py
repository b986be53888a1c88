"""Trace the functions of a body, and evaluate them with TPU operations.

Expressions that depend only on scalars, such as random keys, are computed once in each
program of the kernel. If two functions compute the same expression of the same values,
it is computed once for both.
"""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from pallas_kernels.fused_update.spec import BlockBody, Body
from pallas_kernels.fused_update.tpu.rules import RULES, by_itself, unsupported
from pallas_kernels.fused_update.tpu.tiling import REGISTER
from pallas_kernels.fused_update.tpu.values import Lazy, Narrow
from pallas_kernels.operations import ClosedJaxpr, Values, operation_of

Known = dict
"""Results of equations, keyed by primitive, parameters and inputs."""


class Function:
    """A traced function, which is evaluated with 32-bit operations.

    Args:
      function: a function from trees of arrays to a tree of arrays.
      *like: ShapeDtypeStructs of the arguments.
    """

    def __init__(self, function: Callable, *like):
        traced = jax.make_jaxpr(function, return_shape=True)
        # The jaxpr must not name the active mesh: it may be evaluated in a shard_map.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            self._closed, self.shapes = traced(*like)

    @property
    def unsupported(self) -> list[str]:
        """The operations that TPU kernels do not support."""
        return list(unsupported(self._closed.jaxpr))

    def add_known(self, scalars: Sequence[jax.Array], known: Known) -> None:
        """Compute expressions that depend only on scalars.

        Args:
          scalars: all arguments that are scalars, in order.
          known: a dict to which the results are added.
        """
        left = list(scalars)
        avals: list[typing.Any] = [x.aval for x in self._closed.jaxpr.invars]
        args = [None if aval.shape else left.pop(0) for aval in avals]
        Evaluation(known, RULES, of_scalars=True).run(self._closed, args)

    def __call__(self, evaluation: "Evaluation", *args):
        """Return the results: arrays, :class:`.Narrow` or :data:`.Lazy` values.

        Args:
          evaluation: evaluates all functions of the same values.
          *args: arguments of the function.
        """
        results = evaluation.run(self._closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluates jaxprs.

    Args:
      known: results of earlier equations. New results are added.
      rules: see :data:`.rules.RULES`.
      of_scalars: whether to compute only scalars. All other values are then None.
    """

    known: Known
    rules: Mapping
    of_scalars: bool = False

    def run(self, closed: ClosedJaxpr, args: Sequence) -> list:
        """Return the outputs of a jaxpr."""
        values = Values(closed, args)
        for eqn in closed.jaxpr.eqns:
            values.set(eqn.outvars, self._results(eqn, values.of(eqn.invars)))
        return values.of(closed.jaxpr.outvars)

    def _results(self, eqn, inputs: list) -> list:
        if eqn.primitive is p.jit_p:
            rule = None if self.of_scalars else self.rules.get(operation_of(eqn))
            if rule is None:
                return self.run(eqn.params["jaxpr"], inputs)
            return [rule(*inputs)]
        if self.of_scalars and (
            any(x is None for x in inputs) or eqn.outvars[0].aval.shape
        ):
            return [None] * len(eqn.outvars)
        key = (
            eqn.primitive,
            tuple(sorted((name, str(value)) for name, value in eqn.params.items())),
            tuple(_identity(x) for x in inputs),
        )
        if key not in self.known:
            # Keeping the inputs prevents new arrays from getting the same ids.
            rule = self.rules.get(eqn.primitive)
            result = NotImplemented if rule is None else rule(eqn, *inputs)
            if result is NotImplemented:
                result = by_itself(eqn, *inputs)
            self.known[key] = result, inputs
        return [self.known[key][0]]


def _identity(x):
    if isinstance(x, Narrow | Lazy):
        parts = dataclasses.fields(x)
        return type(x), *(_identity(getattr(x, part.name)) for part in parts)
    if isinstance(x, np.generic | np.ndarray | int | float | bool):
        array = np.asarray(x)
        return str(array.dtype), array.shape, array.tobytes()
    return id(x)


@dataclasses.dataclass(frozen=True)
class Functions:
    """The traced functions of a body.

    Args:
      run: the body itself.
      before: the method of a :class:`.BlockBody`; None for other bodies.
      rounds: ``statistics`` and ``after`` for each round of maxima.
      block_sizes: the size of the blocks for each maximum.
    """

    run: Function
    before: Function | None = None
    rounds: Sequence[tuple[Function, Function]] = ()
    block_sizes: Sequence[int] = ()

    @property
    def unsupported(self) -> list[str]:
        """The operations that TPU kernels do not support."""
        parts = [self.run, self.before, *itertools.chain(*self.rounds)]
        return [name for x in parts if x is not None for name in x.unsupported]


def traced(
    body: Body | BlockBody,
    kinds: Sequence[tuple[np.dtype, int | None]],
    scalars: int,
) -> Functions:
    """Trace a body's functions. Equal leaves share the result.

    Args:
      body: see :data:`pallas_kernels.fused_update.Body`.
      kinds: dtypes and block sizes of the leaf's operands.
      scalars: number of the body's scalars.
    """
    # This dtype depends on whether 64-bit types are enabled.
    integers = jax.dtypes.canonicalize_dtype(np.int64)
    return _traced(body, tuple(kinds), scalars, integers)


@functools.lru_cache(maxsize=1024)
def _traced(body, kinds: Sequence, scalars: int, integers: np.dtype) -> Functions:
    del integers

    def registers(dtypes):
        return [jax.ShapeDtypeStruct(REGISTER, dtype) for dtype in dtypes]

    values = registers(dtype for dtype, size in kinds if size is None)
    block_values = registers(dtype for dtype, size in kinds if size is not None)
    words = [jax.ShapeDtypeStruct((), jnp.uint32)] * scalars
    arguments = values, words, *registers([jnp.uint32])
    if not block_values:
        return Functions(Function(body, *arguments))
    before = Function(body.before, block_values)
    given, rounds, maxima = [before.shapes], [], []
    while len(maxima) < len(body.block_sizes):
        keys = Function(body.statistics, *arguments, *given)
        maxima += registers([jnp.int32] * len(keys.shapes))
        after = Function(body.after, maxima, block_values)
        given[1:] = [after.shapes[1]]
        rounds.append((keys, after))
    run_with_blocks = Function(body, *arguments, *given)
    return Functions(run_with_blocks, before, rounds, body.block_sizes)
