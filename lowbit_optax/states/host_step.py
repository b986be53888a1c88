"""Run a step on a state in host memory, with two groups of leaves on the device.

::

    state of group 3 ---> device           after group 1 is back in host memory
    update of group 3                      while group 4 is copied to the device
    new state of group 3 ---> host memory

The ordinary step is traced, with a copy to the device of each array of the state and a
copy of each new array to host memory. Then the equations that each group needs are run
group by group. Values that need no state in host memory, such as a global norm, random
keys and counts, are computed once for all groups.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.core import Tracer
from jax.extend import core

from lowbit_optax._jaxprs.barriers import tied
from lowbit_optax._jaxprs.coming_autodiff import in_todays_terms
from lowbit_optax._jaxprs.graph import (
    CALLS,
    Call,
    Node,
    called_jaxpr,
    evaluate,
    inline,
    is_by_platform,
    with_outputs,
)
from lowbit_optax._step import context
from lowbit_optax.states.host_memory import is_on_host, on_device, placed_like
from lowbit_optax.states.state_leaves import state_leaves
from pallas_kernels.operations import ClosedJaxpr

GROUP_BYTES = 2**26
"""The state of a group is not larger, unless the group is a single leaf. PCIe copies
64 MiB in 1 to 3 ms, and a copy of a few MiB would already use its full bandwidth."""


def step_by_group(step: Callable, params, state, grads) -> tuple:
    """Run a step whose state is at least partly in host memory.

    Outside of ``jax.jit``, the whole state is copied to the device.

    Args:
      step: a function ``(params, state, grads) -> (params, state)``.
      params, state, grads: the arguments of the step.

    Returns:
      ``(params, state)``, with each array of the state where it was before.
    """

    def whole(params, state, grads):
        new, new_state = step(params, jax.tree.map(on_device, state), grads)
        return new, jax.tree.map(placed_like, new_state, state)

    arguments = params, state, grads
    flat = jax.tree.leaves(arguments)
    if not any(isinstance(x, Tracer) for x in flat):
        return whole(*arguments)
    with context.changed(alone=True):
        closed, shapes = jax.make_jaxpr(whole, return_shape=True)(*arguments)
    if closed.effects:
        return whole(*arguments)
    owners = [x.owner if is_on_host(x.leaf) else None for x in state_leaves(params, state)]
    before, after = len(jax.tree.leaves(params)), len(jax.tree.leaves(grads))
    owners = [*[None] * before, *owners, *[None] * after]

    def run_for(platform: str | None) -> Callable:
        return functools.partial(_by_group, closed, owners, platform)

    platforms = {name: run_for(name) for name in sorted(_platforms(closed.jaxpr))}
    default = run_for(None)
    if platforms:
        results = lax.platform_dependent(*flat, default=default, **platforms)
    else:
        results = default(*flat)
    return jax.tree.structure(shapes).unflatten(results)


def _platforms(jaxpr) -> set[str]:
    """Return the platforms for which a jaxpr contains branches."""
    found: set[str] = set()
    for eqn in map(in_todays_terms, jaxpr.eqns):
        for names in eqn.params.get("branches_platforms") or ():
            found.update(names or ())
        found.update(*map(_platforms, core.jaxprs_in_params(eqn.params)))
    return found


def _by_group(
    closed: ClosedJaxpr,
    owners: Sequence[str | None],
    platform: str | None,
    *arguments: jax.Array,
) -> list:
    """Return the results of a jaxpr, computed group by group.

    Args:
      closed: the jaxpr.
      owners: for each argument in host memory, the path of its parameter.
      platform: the platform for which the program is compiled; None for platforms
        without branches of their own.
      *arguments: the arguments of the jaxpr.
    """
    inputs = [Node(var.aval) for var in closed.jaxpr.invars]
    pairs = zip(inputs, owners, strict=True)
    needs = {node: frozenset([owner]) for node, owner in pairs if owner is not None}
    host = list(needs)
    outputs = _Reader(platform, needs).read(closed, inputs)
    known: dict[Node, typing.Any] = dict(zip(inputs, arguments, strict=True))
    written: list[list] = [[], []]
    for group in _groups(host, outputs, needs):
        own = [node for node in host if needs[node] <= group]
        arrays, _ = tied(([known[node] for node in own], written[-2]))
        known.update(zip(own, arrays, strict=True))
        of_group = [x for x in outputs if x in needs and needs[x] <= group]
        written.append(evaluate(of_group, known))
    return evaluate(outputs, known)


_Needs = dict[Node, frozenset[str]]


def _groups(
    host: Sequence[Node], outputs: Sequence[Node], needs: _Needs
) -> list[frozenset[str]]:
    """Return the groups of parameters, as sets of paths.

    If a result needs the state of several parameters, they are all in the last group.
    """
    sizes: dict[str, int] = {}
    for node in host:
        (owner,) = needs[node]
        size = node.aval.size * node.aval.dtype.itemsize
        sizes[owner] = sizes.get(owner, 0) + size
    several = [needs[x] for x in outputs if x in needs and len(needs[x]) > 1]
    last = frozenset().union(*several)
    groups: list[list[str]] = []
    held = GROUP_BYTES
    for owner, size in sizes.items():
        if owner in last:
            continue
        if held + size > GROUP_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(owner)
        held += size
    return [*map(frozenset, groups), *([last] if last else [])]


@dataclasses.dataclass(eq=False)
class _Reader:
    """Reads a jaxpr as a graph in which the updates of different leaves are separate.

    Functions that update several leaves are inlined, and conditionals that select a
    platform are replaced by its branch. All other equations stay as they are, so that
    XLA computes the same numbers as in an ordinary step.

    Args:
      platform: see :func:`_by_group`.
      needs: for each node that is computed from state in host memory, the paths of its
        parameters. New nodes are added to it.
    """

    platform: str | None
    needs: _Needs
    count: int = 0

    def read(self, closed: ClosedJaxpr, inputs: Sequence[Node]) -> list[Node]:
        """Return the results of a jaxpr."""
        return inline(closed, inputs, self._equation)

    def _equation(self, eqn, operands: list[Node]) -> Sequence[Node]:
        primitive, params = eqn.primitive, eqn.params
        if is_by_platform(primitive, params):
            places = params["branches_platforms"]
            chosen = (n for n, x in enumerate(places) if x is None or self.platform in x)
            return self.read(params["branches"][next(chosen)], operands[1:])
        needs = frozenset().union(*(self.needs.get(x, ()) for x in operands))
        if len(needs) > 1 and primitive in CALLS:
            return self.read(called_jaxpr(params), operands)
        if len(needs) > 1 and primitive.name == "optimization_barrier":
            return operands
        call = Call(primitive, params, tuple(operands), self.count, context=eqn.ctx)
        self.count += 1
        results = with_outputs(call, (var.aval for var in eqn.outvars))
        if needs:
            self.needs.update(dict.fromkeys(results, needs))
        return results
