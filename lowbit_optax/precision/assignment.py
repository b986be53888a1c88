"""Precision assignments: the tensors of a loss, and which are in which format."""

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

from lowbit_optax._numerics.float_format import FloatFormat

Kind = typing.Literal["parameter", "input", "value", "iterated"]
"""``"iterated"`` is a value in the body of a while loop."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a loss, and with it its cotangent.

    Args:
      name: a parameter's or input's path, or the operation that makes it, numbered.
      kind: ``"parameter"``, ``"input"``, ``"value"``, or ``"iterated"`` for a value in
        the body of a while loop. Inputs have no cotangents, nor have iterated values.
      shape: of one of them.
      repeats: how many there are: a scan's body has as many as it has iterations. A
        while loop is counted as one iteration, since theirs is not known.
      group: how many matrix products are before it in the program.
      made_by: number of the matrix product whose result it is, or None.
      read_by: numbers of the matrix products that read it.
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
        """Elements of the forward tensor."""
        return math.prod(self.shape) * self.repeats

    @property
    def backward_size(self) -> int:
        """Elements of the cotangent; 0 if it has none."""
        return 0 if self.kind in ("input", "iterated") else self.size


@dataclasses.dataclass(frozen=True)
class PrecisionPlan:
    """What precision assignments of one loss are made of.

    Args:
      tensors: all of them, in the order in which they are made.
      products: how many matrix products the loss has.
      opaque: names of operations whose results are tensors, but not what they compute
        inside, such as a ``shard_map``.
    """

    tensors: tuple[Tensor, ...]
    products: int
    opaque: tuple[str, ...] = ()

    @property
    def groups(self) -> list[list[int]]:
        """Numbers of the tensors of each group, in order; empty groups are left out."""
        found: dict[int, list[int]] = {}
        for number, tensor in enumerate(self.tensors):
            found.setdefault(tensor.group, []).append(number)
        return [found[group] for group in sorted(found)]

    @property
    def size(self) -> int:
        """Elements of all forward tensors and cotangents."""
        return int(np.sum(self.sizes) + np.sum(self.backward_sizes))

    @property
    def sizes(self) -> np.ndarray:
        """Elements of each forward tensor, float64."""
        return np.array([t.size for t in self.tensors], np.float64)

    @property
    def backward_sizes(self) -> np.ndarray:
        """Elements of each cotangent, float64."""
        return np.array([t.backward_size for t in self.tensors], np.float64)


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

    def forward(self, is_low) -> FloatFormat:
        """The format of a forward tensor at a level."""
        return self.low if is_low else self.high

    def backward(self, is_low) -> FloatFormat:
        """The format of a cotangent at a level."""
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


@jax.tree_util.register_dataclass
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

    plan: PrecisionPlan = dataclasses.field(metadata={"static": True})
    formats: Formats = dataclasses.field(metadata={"static": True})
    low: jax.Array | np.ndarray
    low_backward: jax.Array | np.ndarray

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
        share = lambda low, sizes: jnp.sum(jnp.where(low, sizes, jnp.float32(0)))
        return share(self.low, forward) + share(self.low_backward, backward)

    def save(self, path: str | os.PathLike) -> None:
        """Write everything to a JSON file, for :func:`load`."""
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
        """A table, one line per tensor, group by group."""
        if isinstance(self.low, Tracer):
            return f"Assignment of {len(self.plan.tensors)} tensors, traced"
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
        lines.append(f"{ratio:.3f} of {self.plan.size} elements in low precision")
        if self.plan.opaque:
            lines.append(f"not rounded inside of: {', '.join(self.plan.opaque)}")
        return "\n".join(lines)

    def _levels(self) -> tuple[list[bool], list[bool]]:
        return np.asarray(self.low).tolist(), np.asarray(self.low_backward).tolist()


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
    for i, (now, then) in enumerate(itertools.zip_longest(found, planned)):
        if now is None or then is None or _identity(now) != _identity(then):
            raise ValueError(
                f"apply: the loss is not the one that was traced: tensor {i} is "
                f"{_describe(now)}, in the assignment {_describe(then)}"
            )
    if np.shape(assignment.low) != (len(planned),):
        raise ValueError(
            f"apply: the assignment's levels have shape {np.shape(assignment.low)} for "
            f"{len(planned)} tensors"
        )


def _identity(tensor: Tensor):
    return tensor.name, tensor.kind, tensor.group, len(tensor.shape)


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{tensor.name} of shape {list(tensor.shape)} in group {tensor.group}"
