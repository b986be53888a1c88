"""Precision assignments: which tensors are in which format."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lowbit_optax._numerics.float_format import FloatFormat
from lowbit_optax.precision.plan import PrecisionPlan, Tensor


@dataclasses.dataclass(frozen=True)
class Formats:
    """The formats that an assignment chooses between.

    Args:
      low, high: formats of forward tensors.
      low_backward, high_backward: formats of their cotangents; None takes those of the
        forward tensors.

    >>> print(HFP8)
    low fp(4,3,4) / fp(5,2)+infinity, high fp(6,9) / fp(6,9)+infinity
    """

    low: FloatFormat
    high: FloatFormat
    low_backward: FloatFormat | None = None
    high_backward: FloatFormat | None = None

    def __post_init__(self):
        for name in ("low", "high"):
            if getattr(self, f"{name}_backward") is None:
                object.__setattr__(self, f"{name}_backward", getattr(self, name))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, FloatFormat):
                raise TypeError(
                    f"Formats: {field.name} is {value!r}; accepted is a FloatFormat"
                )

    def __str__(self):
        return (
            f"low {self.low} / {self.low_backward}, "
            f"high {self.high} / {self.high_backward}"
        )


HFP8 = Formats(
    low=FloatFormat(4, 3, 4),
    low_backward=FloatFormat(5, 2, overflow="infinity"),
    high=FloatFormat(6, 9),
    high_backward=FloatFormat(6, 9, overflow="infinity"),
)
"""Sun et al. 2019: 8 bits, in one format forward and another backward, and 16 bits.

Cotangents that overflow become infinite, so that loss scaling notices them and skips
the step.
"""

FLOAT8 = Formats(
    low=FloatFormat.of("float8_e4m3fn"),
    low_backward=FloatFormat(5, 2, specials="ieee", overflow="infinity"),
    high=FloatFormat.of("bfloat16"),
)
"""Micikevicius et al. 2022: the float8 dtypes that GPUs multiply, and bfloat16.

Forward tensors past 448 become 448; cotangents that overflow become infinite.
"""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Assignment:
    """A format for each tensor and each cotangent of a loss.

    As a pytree it holds two arrays, which :func:`promote` changes. As an argument of a
    jitted step it can be promoted without compiling the step again.

    Args:
      plan: the tensors, from :func:`trace`.
      formats: the low and the high formats.
      low: bool[tensors], whether the forward tensor is in the low format.
      low_backward: bool[tensors], whether its cotangent is.
    """

    plan: PrecisionPlan
    formats: Formats
    low: jax.Array | np.ndarray
    low_backward: jax.Array | np.ndarray

    def tree_flatten(self):
        """Two arrays; the plan and the formats are static."""
        return (self.low, self.low_backward), (self.plan, self.formats)

    @classmethod
    def tree_unflatten(cls, static, arrays):
        return cls(*static, *arrays)

    @property
    def low_ratio(self) -> jax.Array:
        """The share of all elements, of tensors and cotangents, that are low.

            size({t : t is low}) / size(all t), in [0, 1]

        Returns:
          float32 scalar.

        References:
          Lee et al. 2023, section 3.2, "ratio_lo".
        """
        # Divided before the sum, because float32 counts only to 2^24.
        total = max(self.plan.size, 1)
        forward = jnp.asarray(self.plan.sizes / total, jnp.float32)
        backward = jnp.asarray(self.plan.backward_sizes / total, jnp.float32)
        zero = jnp.float32(0)
        return jnp.sum(jnp.where(self.low, forward, zero)) + jnp.sum(
            jnp.where(self.low_backward, backward, zero)
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write everything to a JSON file, for :func:`load`."""
        document = {
            "formats": dataclasses.asdict(self.formats),
            "products": self.plan.products,
            "opaque": list(self.plan.opaque),
            "tensors": [
                dataclasses.asdict(tensor)
                | {"low": bool(low), "low_backward": bool(low_backward)}
                for tensor, low, low_backward in zip(
                    self.plan.tensors,
                    np.asarray(self.low),
                    np.asarray(self.low_backward),
                    strict=True,
                )
            ],
        }
        text = json.dumps(document, indent=1)
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")

    def __str__(self) -> str:
        """A table, one line per tensor, group by group."""
        if isinstance(self.low, Tracer):
            return f"Assignment of {len(self.plan.tensors)} tensors, traced"
        rows = [("group", "tensor", "shape", "forward", "backward")]
        formats = self.formats
        low, low_backward = np.asarray(self.low), np.asarray(self.low_backward)
        for i, tensor in sorted(
            enumerate(self.plan.tensors), key=lambda numbered: numbered[1].group
        ):
            shape = "x".join(map(str, tensor.shape))
            times = f" x {tensor.repeats}" if tensor.repeats > 1 else ""
            backward = (
                formats.low_backward if low_backward[i] else formats.high_backward
            )
            rows.append(
                (
                    str(tensor.group),
                    tensor.name,
                    shape + times,
                    str(formats.low if low[i] else formats.high),
                    str(backward) if tensor.backward_size else "",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        ratio = float(self.low_ratio)
        lines.append(f"{ratio:.3f} of {self.plan.size} elements in low precision")
        if self.plan.opaque:
            lines.append(f"not rounded inside of: {', '.join(self.plan.opaque)}")
        return "\n".join(lines)


def load(path: str | os.PathLike) -> Assignment:
    """Read an assignment that :meth:`Assignment.save` wrote.

    Args:
      path: of the JSON file.

    Returns:
      The :class:`Assignment`, with numpy arrays.

    Raises:
      ValueError: if the file does not hold an assignment.

    >>> import jax.numpy as jnp, tempfile
    >>> from lowbit_optax import precision
    >>> plan = precision.trace(lambda w, x: jnp.sum(x @ w), *2 * [jnp.ones((2, 2))])
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     precision.uniform(plan).save(file.name)
    ...     load(file.name).plan == plan
    True
    """
    try:
        document = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        formats = {
            name: FloatFormat(**fields) for name, fields in document["formats"].items()
        }
        tensors, low, low_backward = [], [], []
        for fields in document["tensors"]:
            low.append(fields.pop("low"))
            low_backward.append(fields.pop("low_backward"))
            fields["shape"] = tuple(fields["shape"])
            fields["read_by"] = tuple(fields["read_by"])
            tensors.append(Tensor(**fields))
        plan = PrecisionPlan(
            tuple(tensors), document["products"], tuple(document["opaque"])
        )
        return Assignment(
            plan, Formats(**formats), np.array(low, bool), np.array(low_backward, bool)
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: not an assignment that Assignment.save wrote "
            f"({type(error).__name__}: {error})"
        ) from error


def check_same(assignment: Assignment, found: Sequence[Tensor]) -> None:
    """Refuse an assignment of another loss.

    Args:
      assignment: from :func:`lowbit_optax.precision.demote` and its like.
      found: the tensors of the loss that it is applied to.

    Raises:
      ValueError: naming the first tensor that is another one.
    """
    planned = assignment.plan.tensors
    for i in range(max(len(planned), len(found))):
        now, then = (ts[i] if i < len(ts) else None for ts in (found, planned))
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
