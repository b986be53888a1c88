"""``memory_report``: what parameters, state and gradients take, by part."""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees
from lowbit_optax.reports import bars
from lowbit_optax.states.state_leaves import StateLeaf, state_leaves
from lowbit_optax.transformations.direct import is_direct

_PARTS = ("params", "residual", "moments", "accumulators", "other")

# The fields of accumulate_gradients' state and of MultiSteps' that hold sums.
_ACCUMULATORS = ("accumulators", "acc_grads")

# From this share of the parameters on, the report says that float32 leaves cost.
_NOTABLE_SHARE = 0.1

_NAMES_SHOWN = 3

_LIVE_GRADIENTS = 2

_NOT_DIRECT = """\
lowbit_optax.step forms differences of parameters, in temporary memory, because what
stands around lowbit computes with updates; put it inside lowbit where that can be."""


@dataclasses.dataclass(frozen=True)
class LeafMemory:
    """Bytes of one leaf, by part.

    Args:
      name, shape, dtype: of the parameter.
      params, residual, moments, other: bytes of each part.
      accumulators: bytes of sums of microbatches' gradients. They are a part of their
        own because ``accumulate_gradients`` adds them, whatever the optimizer in it
        keeps.
      float32_master: bytes that optax would keep: see :func:`memory_report`.
      moment_dtypes: ``(field, dtype)`` of each moment, such as ``("nu", "uint32")`` for
        packed codes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    params: int = 0
    residual: int = 0
    moments: int = 0
    accumulators: int = 0
    other: int = 0
    float32_master: int = 0
    moment_dtypes: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """The number of parameters."""
        return math.prod(self.shape)

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(getattr(self, part) for part in _PARTS)

    @property
    def float32_moments(self) -> tuple[str, ...]:
        """The fields of the optimizer state that keep this leaf's moment in float32."""
        return tuple(name for name, dtype in self.moment_dtypes if dtype == "float32")


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The table that :func:`memory_report` makes; ``str`` prints it.

    Args:
      leaves: one entry per parameter leaf.
      total: their sum, with state that belongs to no leaf (counts) under ``other``.
      steps_directly: whether ``lowbit_optax.step`` writes new parameters without
        differences; None where no transformation of this package is in ``tx``.
      gradients, released_gradients: bytes of gradients, and of the dequantised copies
        of quantised weights, without and with :mod:`lowbit_optax.release`.
    """

    leaves: tuple[LeafMemory, ...]
    total: LeafMemory
    steps_directly: bool | None = None
    gradients: int = 0
    released_gradients: int = 0

    def step_peak(self, release: bool = False) -> int:
        """Bytes of parameters, state and gradients, which a step holds at once.

        Activations and batches come on top; :func:`step_memory` compiles a step with
        them. So do 2 bytes per parameter of the largest leaf where parameters are
        updated by ``update`` and ``apply_updates`` in place of ``step``. With release
        two leaves' gradients are counted, of the largest ones.
        """
        gradients = self.released_gradients if release else self.gradients
        return self.total.total + gradients

    def plot(self, ax: typing.Any = None):
        """Draw bytes per parameter as stacked bars, beside optax's float32 master.

        Args:
          ax: matplotlib axes to draw on; new ones if None.

        Returns:
          The axes.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        return bars.draw(self, ax)

    @property
    def bytes_per_param(self) -> float:
        """Parameters and optimizer state, without gradients."""
        return self.total.total / max(self.total.size, 1)

    @property
    def float32_params(self) -> int:
        """How many parameters are in float32 leaves, which no weight format narrows."""
        return sum(leaf.size for leaf in self.leaves if leaf.dtype == "float32")

    def __str__(self) -> str:
        saved = self.total.float32_master - self.total.total
        summary = (
            f"{self.total.total:,} bytes of parameters and optimizer state; optax with "
            f"a float32 master:\n{self.total.float32_master:,} ({saved:,} more). "
            "Gradients come on top."
        )
        notes = [*_float32_moments_notes(self.leaves), *self._float32_params_note()]
        if self.steps_directly is False:
            notes.append(_NOT_DIRECT)
        return "\n".join(["bytes per parameter", *self._table(), summary, *notes])

    def _table(self) -> list[str]:
        width = max([len("total"), *(len(leaf.name) for leaf in self.leaves)])
        header = ["leaf".ljust(width), f"{'parameters':>12}", f"{'dtype':>14}"]
        shown = ["params", "residual", "moments", "total"]
        if self.total.accumulators:
            shown.insert(3, "accumulators")
        wide = {part: max(len(part), 9) for part in shown}
        header += [f"{part:>{wide[part]}}" for part in shown] + ["f32 master"]
        lines = ["  ".join(header)]
        for leaf in (*self.leaves, self.total):
            size = max(leaf.size, 1)
            cells = [leaf.name.ljust(width), f"{leaf.size:>12,}", f"{leaf.dtype:>14}"]
            cells += [f"{getattr(leaf, p) / size:>{wide[p]}.3f}" for p in shown]
            cells.append(f"{leaf.float32_master / size:>10.3f}")
            lines.append("  ".join(cells))
        return lines

    def _float32_params_note(self) -> list[str]:
        share = self.float32_params / max(self.total.size, 1)
        if share < _NOTABLE_SHARE:
            return []
        held = sum(leaf.total for leaf in self.leaves if leaf.dtype == "float32")
        return [
            f"{share:.0%} of the parameters are float32 and pass through, which makes "
            f"the saving small:\nthey and their state take {held:,} of the bytes. "
            "from_master with param_dtypes\nnarrows float32 weights and keeps as many "
            "low bits as the weight format does."
        ]


def _float32_moments_notes(leaves: tuple[LeafMemory, ...]) -> list[str]:
    """Which moments are float32, and why where the state shows it."""
    with_field: dict[str, list[str]] = {}
    in_float32: dict[str, list[str]] = {}
    for leaf in leaves:
        for field, _ in leaf.moment_dtypes:
            with_field.setdefault(field, []).append(leaf.name)
        for field in leaf.float32_moments:
            in_float32.setdefault(field, []).append(leaf.name)
    fields_of: dict[tuple[str, ...], list[str]] = {}
    for field, names in in_float32.items():
        fields_of.setdefault(tuple(names), []).append(field)
    notes = []
    for names, fields in fields_of.items():
        of = f"float32 moments: {', '.join(fields)} of "
        if all(len(names) == len(with_field[field]) for field in fields):
            notes.append(f"{of}every leaf, which no moment format holds")
            continue
        shown = ", ".join(names[:_NAMES_SHOWN])
        more = len(names) - _NAMES_SHOWN
        shown += f" and {more} more" if more > 0 else ""
        notes.append(f"{of}{shown}, too small for their moment format")
    return notes


def memory_report(
    tx: optax.GradientTransformation,
    params: optax.Params,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    stacked: Callable[[str], bool] | None = None,
) -> MemoryReport:
    """Bytes per parameter, by part, by leaf and in total; no state is allocated.

    Args:
      tx: an optax transformation; those of :func:`lowbit_optax.lowbit` may be anywhere
        inside it.
      params: tree of arrays or ShapeDtypeStructs. A QuantizedTensor is one leaf, of its
        logical shape.
      dtype: of quantised weights' gradients and dequantised copies. Other gradients
        have their parameter's dtype.
      stacked: ``path -> bool``: whether the leaf's first axis is a stack of layers that
        a scan goes through, so that the gradient of one layer counts.

    Returns:
      A :class:`MemoryReport`; ``print`` it, or ``plot`` it. "f32 master" is the usual
      step with the same inner transformation: the parameters, a float32 master of those
      that are narrower, and float32 moments and accumulators; for a QuantizedTensor,
      float32 parameters. Below the table it says which moments are stored in float32,
      whether float32 parameters, which pass through, make the saving small, and whether
      a wrapper around ``lowbit`` keeps :func:`lowbit_optax.step` from its fast path.

    Raises:
      TypeError: if ``dtype`` is not a floating-point dtype.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    >>> report = memory_report(lowbit_optax.extra_bits_adamw(1e-3, bits=8), params)
    >>> round(report.bytes_per_param, 2), report.leaves[0].float32_moments
    (11.0, ('mu', 'nu'))
    >>> round(report.step_peak() / report.total.size, 2)
    13.0
    """
    dtype = float_dtype("memory_report: dtype", dtype)
    names, leaves, _ = trees.named_leaves(params)
    state = jax.eval_shape(tx.init, params)
    owned: dict[str, list[StateLeaf]] = {name: [] for name in names}
    shapes = {x: tuple(leaf.shape) for x, leaf in zip(names, leaves, strict=True)}
    loose = 0
    for part in state_leaves(params, state):
        if part.owner is None or _is_scalar_of_the_state(part, shapes[part.owner]):
            loose += _nbytes(part.leaf)
        else:
            owned[part.owner].append(part)
    rows = [_row(x, leaf, owned[x]) for x, leaf in zip(names, leaves, strict=True)]
    add = lambda field: sum(getattr(row, field) for row in rows)
    total = LeafMemory(
        "total",
        (add("size"),),
        "",
        params=add("params"),
        residual=add("residual"),
        moments=add("moments"),
        accumulators=add("accumulators"),
        other=loose,
        float32_master=add("float32_master"),
    )
    sizes = gradient_bytes(params, dtype, stacked)
    return MemoryReport(
        tuple(rows),
        total,
        is_direct(tx, params, state),
        gradients=sum(whole for whole, _ in sizes),
        released_gradients=released(one for _, one in sizes),
    )


def gradient_bytes(
    params: optax.Params,
    dtype: np.dtype,
    stacked: Callable[[str], bool] | None,
) -> list[tuple[int, int]]:
    """Per leaf, the bytes of its whole gradient and of what release has at a time."""
    names, leaves, _ = trees.named_leaves(params)
    found = []
    for name, leaf in zip(names, leaves, strict=True):
        if not trees.is_float(leaf):
            found.append((0, 0))
            continue
        if trees.is_quantized(leaf):
            whole = 2 * leaf.size * dtype.itemsize  # and dequantised
        else:
            whole = _nbytes(leaf)
        layers = 1
        if stacked is not None and leaf.shape and stacked(name):
            layers = max(leaf.shape[0], 1)
        found.append((whole, whole // layers))
    return found


def released(sizes: Iterable[int]) -> int:
    """The bytes of the gradients that release has at once, of those of all leaves."""
    return sum(sorted(sizes, reverse=True)[:_LIVE_GRADIENTS])


def _row(name: str, param, parts: list[StateLeaf]) -> LeafMemory:
    """A parameter's row, from the parts of the state that belong to it."""
    shape = tuple(param.shape)
    dtype, stored, usual = _parameters(param)
    residual, moments, accumulators = 0, 0, 0
    moment_dtypes = []
    for part in parts:
        size = _nbytes(part.leaf)
        if part.is_residual:
            residual += size
            continue
        is_sum = any(name in _ACCUMULATORS for name in part.attributes)
        if is_sum:
            accumulators += size
        else:
            moments += size
        if part.is_scales:
            continue
        is_packed = part.is_codes and part.leaf.dtype == jnp.uint32
        whole = is_packed or part.leaf.shape == shape
        # Moments of another shape, such as factored ones, are what they are.
        usual += 4 * math.prod(shape) if whole else size
        if whole and not is_sum:
            moment_dtypes.append((part.moment_field, part.leaf.dtype.name))
    return LeafMemory(
        name,
        shape,
        dtype,
        params=stored,
        residual=residual,
        moments=moments,
        accumulators=accumulators,
        float32_master=usual,
        moment_dtypes=tuple(moment_dtypes),
    )


def _nbytes(leaf) -> int:
    return leaf.size * leaf.dtype.itemsize


def _parameters(leaf) -> tuple[str, int, int]:
    """A leaf's dtype, its bytes, and those of the usual step, a master included."""
    size, dtype = math.prod(leaf.shape), jnp.dtype(leaf.dtype)
    usual = size * dtype.itemsize + (4 * size if is_narrow(dtype) else 0)
    if trees.is_quantized(leaf):
        return f"{leaf.bits} bits", leaf.nbytes, usual
    return dtype.name, size * dtype.itemsize, usual


def _is_scalar_of_the_state(part: StateLeaf, shape: tuple[int, ...]) -> bool:
    """Whether a state leaf at a parameter's path is a count or hyperparameter."""
    if part.is_of_a_format:
        return False
    if not jnp.issubdtype(part.leaf.dtype, jnp.floating):
        return True
    if part.leaf.shape:
        return False
    return bool(shape) or (not part.owner and "hyperparams" in part.attributes)
