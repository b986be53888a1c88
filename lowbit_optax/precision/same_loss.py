"""Whether an assignment is of the loss that it is applied to."""

import numpy as np

from lowbit_optax.precision.assignment import Assignment
from lowbit_optax.precision.tensors import TracedTensors


def check_same(assignment: Assignment, found: TracedTensors) -> None:
    """Refuse an assignment of another loss.

    Args:
      assignment: from :func:`lowbit_optax.precision.demote` and its like.
      found: the tensors of the loss that it is applied to.

    Raises:
      ValueError: naming the first tensor that is another one.
    """
    planned = assignment.plan.tensors
    for i in range(max(len(planned), len(found.tensors))):
        now, then = (ts[i] if i < len(ts) else None for ts in (found.tensors, planned))
        if now is None or then is None or _identity(now) != _identity(then):
            raise ValueError(
                f"apply: the loss is not the one that was traced: tensor {i} is "
                f"{_describe(now)}, in the assignment {_describe(then)}"
            )
    if len(np.shape(assignment.low)) != 1 or len(assignment.low) != len(planned):
        raise ValueError(
            f"apply: the assignment's levels have shape {np.shape(assignment.low)} for "
            f"{len(planned)} tensors"
        )


def _identity(tensor):
    return tensor.name, tensor.kind, tensor.group, len(tensor.shape)


def _describe(tensor) -> str:
    if tensor is None:
        return "none"
    return f"{tensor.name} of shape {list(tensor.shape)} in group {tensor.group}"
