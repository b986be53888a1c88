"""Precision assignments: the tensors of a loss, and the format of each."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lowbit_optax._arguments import check_type
from lowbit_optax._numerics.float_format import FloatFormat

Kind = typing.Literal["parameter", "input", "value", "iterated"]
"""``"iterated"`` is a value in the body of a while loop."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a loss, which may have a cotangent (its gradient).

    Args:
      name: a parameter's or input's path, or an operation, such as ``dot_general.0``.
      kind: ``"parameter"``, ``"input"``, ``"value"``, or ``"iterated"`` for a value in
        the body of a while loop. Inputs and iterated values have no cotangents.
      shape: the shape of one instance.
      repeats: the number of instances: one for each iteration of a scan, and one for a
        while loop, because the number of its iterations is unknown.
      group: the number of matrix products before it in the program.
      made_by: the index of the matrix product that computes it, or None.
      read_by: the indices of the matrix products that read it.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    repeats: int
    group: int
    made_by: int | None
    read_by: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements of the forward tensor."""
        return math.prod(self.shape) * self.repeats

    @property
    def backward_size(self) -> int:
        """The number of elements of the cotangent; 0 if the tensor has none."""
        return 0 if self.kind in ("input", "iterated") else self.size


@dataclasses.dataclass(frozen=True)
class PrecisionPlan:
    """The tensors of a loss, to which precision assignments assign formats.

    Args:
      tensors: all tensors, in the order in which the loss computes them.
      products: the number of matrix products in the loss.
      opaque: names of operations, such as a ``shard_map``, whose inner values are not
        tensors.
    """

    tensors: tuple[Tensor, ...]
    products: int
    opaque: tuple[str, ...] = ()

    @property
    def groups(self) -> list[list[int]]:
        """The indices of the tensors in each group that is not empty, in order."""
        found: dict[int, list[int]] = {}
        for number, tensor in enumerate(self.tensors):
            found.setdefault(tensor.group, []).append(number)
        return [found[group] for group in sorted(found)]

    @property
    def size(self) -> int:
        """The number of elements of all forward tensors and cotangents."""
        return int(np.sum(self.sizes) + np.sum(self.backward_sizes))

    @property
    def sizes(self) -> np.ndarray:
        """The number of elements of each forward tensor, in float64."""
        return np.array([t.size for t in self.tensors], np.float64)

    @property
    def backward_sizes(self) -> np.ndarray:
        """The number of elements of each cotangent, in float64."""
        return np.array([t.backward_size for t in self.tensors], np.float64)


@dataclasses.dataclass(frozen=True)
class Formats:
    """The low and high formats that an assignment chooses between.

    Args:
      low, high: formats for forward tensors.
      low_backward, high_backward: formats for cotangents. If None, cotangents use the
        formats of forward tensors.

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
            check_type(f"Formats: {field.name}", value, FloatFormat, "a FloatFormat")

    def forward(self, is_low: typing.Any) -> FloatFormat:
        """Return the low or high format for forward tensors."""
        return self.low if is_low else self.high

    def backward(self, is_low: typing.Any) -> FloatFormat:
        """Return the low or high format for cotangents."""
        backward = self.low_backward if is_low else self.high_backward
        return typing.cast(FloatFormat, backward)

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
"""The 8-bit and 16-bit formats of Sun et al. 2019, which differ for cotangents.

Cotangents that overflow become infinite, so loss scaling detects them.
"""

FLOAT8 = Formats(
    low=FloatFormat.of("float8_e4m3fn"),
    low_backward=FloatFormat(5, 2, specials="ieee", overflow="infinity"),
    high=FloatFormat.of("bfloat16"),
)
"""The float8 dtypes that GPUs multiply (Micikevicius et al. 2022), and bfloat16.

Forward values above 448 become 448. Cotangents that overflow become infinite.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Assignment:
    """Assigns a format to each tensor and each cotangent of a loss.

    An assignment is a pytree of the arrays ``low`` and ``low_backward``. If you pass it
    to a jitted step as an argument, :func:`promote` can change it without a
    recompilation.

    Args:
      plan: the tensors, from :func:`trace`.
      formats: the low and the high formats.
      low: bool[tensors], True for forward tensors in the low format.
      low_backward: bool[tensors], True for cotangents in the low format.
    """

    plan: PrecisionPlan = dataclasses.field(metadata={"static": True})
    formats: Formats = dataclasses.field(metadata={"static": True})
    low: jax.Array | np.ndarray
    low_backward: jax.Array | np.ndarray

    @property
    def low_ratio(self) -> jax.Array:
        """The share of elements of tensors and cotangents that are in a low format.

            size({t : t is low}) / size(all t), in [0, 1]

        Returns:
          float32 scalar.

        References:
          Lee et al. 2023, section 3.2, "ratio_lo".
        """
        # Divide before adding, because float32 represents integers only up to 2^24.
        total = max(self.plan.size, 1)
        forward = jnp.asarray(self.plan.sizes / total, jnp.float32)
        backward = jnp.asarray(self.plan.backward_sizes / total, jnp.float32)
        share = lambda low, sizes: jnp.sum(jnp.where(low, sizes, jnp.float32(0)))
        return share(self.low, forward) + share(self.low_backward, backward)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the assignment to a JSON file, which :func:`load` reads."""
        levels = self._levels()
        document = {
            "formats": dataclasses.asdict(self.formats),
            **dataclasses.asdict(self.plan),
        }
        for tensor, low, low_backward in zip(document["tensors"], *levels, strict=True):
            tensor |= {"low": low, "low_backward": low_backward}
        text = json.dumps(document, indent=1)
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")

    def __str__(self) -> str:
        """Return a table with a line for each tensor, ordered by group."""
        if isinstance(self.low, Tracer):
            return f"traced assignment of {len(self.plan.tensors)} tensors"
        rows = [("group", "tensor", "shape", "forward", "backward")]
        low, low_backward = self._levels()
        for i in itertools.chain(*self.plan.groups):
            tensor = self.plan.tensors[i]
            times = f" x {tensor.repeats}" if tensor.repeats > 1 else ""
            shape = "x".join(map(str, tensor.shape)) + times
            forward = str(self.formats.forward(low[i]))
            backward = str(self.formats.backward(low_backward[i]))
            backward = backward if tensor.backward_size else ""
            rows.append((str(tensor.group), tensor.name, shape, forward, backward))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        ratio = float(self.low_ratio)
        lines.append(f"{ratio:.3f} of the {self.plan.size} elements are low-precision")
        if self.plan.opaque:
            lines.append(f"not rounded: arrays inside {', '.join(self.plan.opaque)}")
        return "\n".join(lines)

    def _levels(self) -> tuple[list[bool], list[bool]]:
        return np.asarray(self.low).tolist(), np.asarray(self.low_backward).tolist()


def load(path: str | os.PathLike[str]) -> Assignment:
    """Read an assignment that :meth:`Assignment.save` wrote.

    Args:
      path: the path of the JSON file.

    Returns:
      The :class:`Assignment`, with numpy arrays.

    Raises:
      ValueError: if the file does not contain an assignment.

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
        levels = {
            name: np.array([fields.pop(name) for fields in document["tensors"]], bool)
            for name in ("low", "low_backward")
        }
        tensors = tuple(
            Tensor(**fields | {k: tuple(fields[k]) for k in ("shape", "read_by")})
            for fields in document["tensors"]
        )
        plan = PrecisionPlan(tensors, document["products"], tuple(document["opaque"]))
        return Assignment(plan, Formats(**formats), **levels)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            "load: the file must contain an assignment that Assignment.save wrote, got "
            f"{path} ({type(error).__name__}: {error})"
        ) from error


def check_same(assignment: Assignment, found: Sequence[Tensor]) -> None:
    """Raise an error if an assignment was made for another loss.

    Args:
      assignment: the assignment.
      found: the tensors of the loss to which it is applied.
    """
    planned = assignment.plan.tensors
    for i, (now, then) in enumerate(itertools.zip_longest(found, planned)):
        if now is None or then is None or _identity(now) != _identity(then):
            raise ValueError(
                f"apply: the assignment was made for another loss: tensor {i} is "
                f"{_describe(now)} in this loss, but {_describe(then)} in the plan"
            )
    if np.shape(assignment.low) != (len(planned),):
        raise ValueError(
            "apply: assignment.low must have one element for each of the "
            f"{len(planned)} tensors, got shape {np.shape(assignment.low)}"
        )


def _identity(tensor: Tensor):
    return tensor.name, tensor.kind, tensor.group, len(tensor.shape)


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{tensor.name} of shape {list(tensor.shape)} in group {tensor.group}"
