"""Run a step on a state in host memory, with the state of two groups on the device.

::

    scalars, such as a global norm, and random keys
    state of the first group ---> device
    for every group of parameters:         a loop of one iteration
        update of the group
        new state ---> host memory, and state of the next group ---> device

The ordinary step is traced, and the equations of each group run in a loop of their own.
Both copies of an iteration run at the same time. Without loops, XLA's schedulers start
the copies of later groups early and keep their state on the device, and barriers do not
prevent it, because XLA removes them before it schedules.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend import core

from lowbit_optax._jaxprs.graph import (
    CALLS,
    Call,
    Node,
    called_jaxpr,
    evaluate,
    in_todays_terms,
    inline,
    is_by_platform,
    made_of,
)
from lowbit_optax._step import context
from lowbit_optax.states.host_memory import is_on_host, on_device, placed_like
from lowbit_optax.states.state_leaves import state_leaves
from pallas_kernels.operations import ClosedJaxpr

GROUP_BYTES = 2**28
"""The state of a group is not larger, unless the group is a single leaf."""

_MOST_KEYS = 2**16


def step_by_group(step: Callable, params, state, grads) -> tuple:
    """Run a step whose state is at least partly in host memory.

    Outside of ``jax.jit``, the whole state is copied to the device.

    Args:
      step: a function ``(params, state, grads) -> (params, state)``.
      params, state, grads: the arguments of the step.

    Returns:
      ``(params, state)``, with each array of the state where it was before.
    """
    to_device = functools.partial(jax.tree.map, on_device)

    def whole(params, state, grads):
        new, new_state = step(params, to_device(state), grads)
        return new, jax.tree.map(placed_like, new_state, state)

    arguments = params, state, grads
    flat = jax.tree.leaves(arguments)
    if not any(isinstance(x, Tracer) for x in flat):
        return whole(*arguments)
    on_the_device = params, jax.eval_shape(to_device, state), grads
    with context.changed(group_of=lambda name: name):
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*on_the_device)
    # Moments that optax creates in bfloat16 become float32 in a step with float32
    # gradients. Then the state cannot be updated in place, and is copied as a whole.
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    if closed.effects or dtypes(shapes) != dtypes((params, state)):
        return whole(*arguments)
    parts = state_leaves(params, state)
    of_state = [x.owner if is_on_host(x.leaf) else None for x in parts]
    owners = [None] * len(jax.tree.leaves(params)) + of_state
    owners += [None] * (len(flat) - len(owners))

    def run_for(platform: str | None) -> Callable:
        return functools.partial(_by_group, closed, owners, platform)

    platforms = {name: run_for(name) for name in sorted(_platforms(closed.jaxpr))}
    if platforms:
        flat = lax.platform_dependent(*flat, default=run_for(None), **platforms)
    else:
        flat = run_for(None)(*flat)
    return jax.tree.structure(shapes).unflatten(flat)


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
    """Return the results of a step's jaxpr, computed group by group.

    Args:
      closed: the jaxpr. Its results have the order of its first arguments.
      owners: for each argument in host memory, the path of its parameter.
      platform: the platform for which the program is compiled; None for platforms
        without branches of their own.
      *arguments: the arguments of the jaxpr.
    """
    inputs = [Node(var.aval) for var in closed.jaxpr.invars]
    before: dict[Node, jax.Array] = dict(zip(inputs, arguments, strict=True))
    pairs = zip(inputs, owners, strict=True)
    needs = {node: frozenset([owner]) for node, owner in pairs if owner is not None}
    host = dict.fromkeys(needs)
    outputs = _Reader(platform, needs).read(closed, inputs)
    new_of = dict(zip(inputs, outputs, strict=False))
    known = {x: on_device(array) for x, array in before.items() if x not in host}
    evaluate([x for x in made_of(outputs) if x not in needs and _is_shared(x)], known)
    # XLA would inline a loop if it knew the number of iterations. On CPUs, where host
    # memory is the same memory, inlined loops give the bits of an ordinary step.
    one = jnp.int32(1)
    barrier = lax.optimization_barrier
    once = lax.platform_dependent(one, cpu=lambda x: x, default=barrier)
    groups = _groups(host, outputs, needs)
    on_chip = [on_device(before[x]) for x in host if needs[x] <= groups[0]]
    after: dict[Node, jax.Array] = {}
    for group, following in itertools.zip_longest(groups, groups[1:], fillvalue=_NONE):
        of_group = [x for x in new_of if needs.get(new_of[x], _NONE) & group]
        state = [x for x in host if needs[x] <= group]
        of_next = [x for x in host if needs[x] <= following]

        def update(_, carry, of_group=of_group, state=state, of_next=of_next):
            arrays, on_chip, _ = carry
            known_here = known | dict(zip(of_group, arrays, strict=True))
            known_here.update(zip(state, on_chip, strict=True))
            new = evaluate([new_of[x] for x in of_group], known_here)
            # The new state uses the memory of the old one, and is then copied.
            known_here.update(zip(of_group, new, strict=True))
            on_chip = [known_here[x] for x in state]
            copies = [on_device(before[x]) for x in of_next]
            return list(map(placed_like, new, arrays)), on_chip, copies

        arrays = [before[x] for x in of_group]
        # The copies for the next group overwrite these arrays.
        buffers = [jnp.zeros_like(before[x]) for x in of_next]
        carry = arrays, on_chip, buffers
        arrays, _, on_chip = lax.fori_loop(0, once, update, carry)
        after.update(zip(of_group, arrays, strict=True))
    # The order must be the same in every process, so that all compile one program.
    for node in [x for x in new_of if x not in after]:
        (value,) = evaluate([new_of[node]], known)
        after[node] = placed_like(value, before[node])
    return [after[node] for node in new_of]


def _is_shared(node: Node) -> bool:
    """Return whether to compute a value once for all groups.

    XLA must fuse other values, such as clipped gradients, with the update of their
    leaf, because products and sums in one fusion round once.
    """
    aval = node.aval
    is_keys = jnp.issubdtype(aval.dtype, jnp.integer) and aval.size <= _MOST_KEYS
    return node.call is not None and (node.is_scalar or is_keys)


_Needs = dict[Node, frozenset[str]]
_NONE: frozenset[str] = frozenset()


def _groups(
    host: Iterable[Node], outputs: Sequence[Node], needs: _Needs
) -> list[frozenset[str]]:
    """Return the groups of parameters, as sets of paths.

    If a result needs the state of several parameters, they are all in the last group.
    """
    sizes: dict[str, int] = {}
    for node in host:
        (owner,) = needs[node]
        size = node.aval.size * node.aval.dtype.itemsize
        sizes[owner] = sizes.get(owner, 0) + size
    found = [needs.get(x, _NONE) for x in outputs]
    last = _NONE.union(*(x for x in found if len(x) > 1))
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
    platform are replaced by its branch. All other equations are unchanged, so that XLA
    computes the same numbers as in an ordinary step.

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
            places = enumerate(params["branches_platforms"])
            chosen = next(n for n, x in places if x is None or self.platform in x)
            return self.read(params["branches"][chosen], operands[1:])
        needs = _NONE.union(*(self.needs.get(x, _NONE) for x in operands))
        if len(needs) > 1 and primitive in CALLS:
            return self.read(called_jaxpr(params), operands)
        if len(needs) > 1 and primitive.name == "optimization_barrier":
            return operands
        avals = [var.aval for var in eqn.outvars]
        call = Call(primitive, params, tuple(operands), self.count, avals, eqn.ctx)
        self.count += 1
        if needs:
            self.needs.update(dict.fromkeys(call.outputs, needs))
        return call.outputs
