"""What checkpointed functions keep apart from the rest of the program."""

from collections.abc import Collection

from pallas_kernels.jaxprs import ClosedJaxpr


def without_barriers_on(closed: ClosedJaxpr, inputs: Collection[int]) -> ClosedJaxpr:
    """The same function, whose checkpoints read some of its inputs where they are.

    What is under ``jax.checkpoint`` is computed again for its derivative. Its operands
    go through an optimization barrier first, so that XLA does not merge this with the
    first computation. But what goes through a barrier is written to memory first. For
    a slice of a stack that is a copy, where the computation could read the stack.

    Args:
      closed: the function. Only checkpoints that it calls itself are changed.
      inputs: numbers of its inputs.
    """
    free = {id(closed.jaxpr.invars[n]) for n in inputs}

    def changed(equation):
        prevented = equation.params.get("prevent_cse", False)
        if isinstance(prevented, bool):
            prevented = (prevented,) * len(equation.invars)
        each = tuple(
            barrier and id(atom) not in free
            for barrier, atom in zip(prevented, equation.invars, strict=True)
        )
        if each == prevented:
            return equation
        return equation.replace(params={**equation.params, "prevent_cse": each})

    equations = list(map(changed, closed.jaxpr.eqns))
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)
