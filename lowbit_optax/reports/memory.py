"""``memory_report``: the memory of parameters, optimizer state and gradients."""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._arguments import check_transformation, check_type
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees
from lowbit_optax._step.float32_params import (
    KeepFloat32,
    is_bias_or_norm,
    narrowed_shapes,
)
from lowbit_optax._step.wrapped import ChangedUpdateError, is_direct
from lowbit_optax._tables import Table, Tabular, some
from lowbit_optax._types import PyTree, Transformation
from lowbit_optax.reports import bars
from lowbit_optax.states.state_leaves import (
    StateLeaf,
    is_scalar_of_the_state,
    state_leaves,
)

_PARTS = ("params", "residual", "moments", "accumulators", "other")

# The fields in which accumulate_gradients and MultiSteps store sums of gradients.
_ACCUMULATORS = ("accumulators", "acc_grads")

# If float32 leaves have at least this share of the parameters, the report warns.
_NOTABLE_SHARE = 0.1

_LIVE_GRADIENTS = 2

_NOT_DIRECT = """\
lowbit_optax.step needs temporary memory for updates, because a wrapper around lowbit
computes with them. Put the wrapper inside lowbit if you can. Replace optax.MultiSteps
with accumulate_gradients, or leave it around lowbit."""


_CHANGED = """\
wrong: a transformation after or around lowbit changes the updates of {},
which are already rounded, so weights and residuals will not match. Put it inside, as in
lowbit(optax.chain(optax.adamw(1e-3), optax.scale(0.5)))."""


@dataclasses.dataclass(frozen=True)
class LeafMemory:
    """The number of bytes of each part of a leaf.

    Args:
      name, shape, dtype: the path, shape and dtype of the parameter.
      params, residual, moments, other: the bytes of each part.
      accumulators: the bytes of sums of gradients, from ``accumulate_gradients``.
      float32_master: bytes with optax and a float32 master; see :func:`memory_report`.
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
        """The sum of all parts, in bytes."""
        return sum(getattr(self, part) for part in _PARTS)

    @property
    def float32_moments(self) -> tuple[str, ...]:
        """The fields of the optimizer state that store a float32 moment of the leaf."""
        return tuple(name for name, dtype in self.moment_dtypes if dtype == "float32")


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport(Tabular):
    """The result of :func:`memory_report`; ``print`` it.

    Args:
      leaves: an entry for each leaf of the parameters.
      total: the sum of the leaves, and of other state such as counts.
      steps_directly: whether ``lowbit_optax.step`` writes new parameters without
        computing updates; None if ``tx`` contains no transformation of this package.
      changed_updates: paths of parameters that ``tx`` trains wrongly, because a wrapper
        changes updates of ``lowbit`` that are already rounded.
      gradients, released_gradients: the bytes of gradients, and of dequantized copies
        of quantized weights, without and with :mod:`lowbit_optax.release`.
    """

    leaves: tuple[LeafMemory, ...]
    total: LeafMemory
    steps_directly: bool | None = None
    changed_updates: tuple[str, ...] = ()
    gradients: int = 0
    released_gradients: int = 0

    def step_peak(self, release: bool = False) -> int:
        """Return the bytes of parameters, state and gradients during a step.

        With ``release``, only the gradients of the two largest leaves count. The sum
        does not include activations and batches; :func:`step_memory` compiles a step
        and includes them. If you call ``update`` and ``apply_updates`` instead of
        ``step``, add 2 bytes per parameter of the largest leaf.
        """
        gradients = self.released_gradients if release else self.gradients
        return self.total.total + gradients

    def plot(self, ax: typing.Any = None):
        """Draw bytes per parameter as stacked bars, compared with a float32 master.

        Args:
          ax: matplotlib axes to draw on. If None, new axes are created.

        Returns:
          The axes.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        return bars.draw(self, ax)

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter for parameters and optimizer state, without gradients."""
        return self.total.total / max(self.total.size, 1)

    @property
    def float32_params(self) -> int:
        """The number of parameters in float32 leaves, to which formats do not apply."""
        return sum(leaf.size for leaf in self.leaves if leaf.dtype == "float32")

    def table(self) -> Table:
        """Return bytes per parameter, with a row for each leaf and a total."""
        saved = self.total.float32_master - self.total.total
        summary = (
            f"{self.total.total:,} bytes for parameters and optimizer state, without "
            f"gradients;\noptax with a float32 master needs "
            f"{self.total.float32_master:,} ({saved:,} more)"
        )
        notes = [summary, *_float32_moments_notes(self.leaves), *self._notes()]
        return Table("bytes per parameter", self._rows(), notes, totals=1)

    def _rows(self) -> list[list[str]]:
        is_some = lambda part: any(getattr(leaf, part) for leaf in self.leaves)
        shown = [*_PARTS[:3], *filter(is_some, _PARTS[3:]), "total"]
        rows = [["leaf", "parameters", "dtype", *shown, "f32 master"]]
        for leaf in (*self.leaves, self.total):
            parts = (getattr(leaf, part) for part in (*shown, "float32_master"))
            per_parameter = (f"{part / max(leaf.size, 1):.3f}" for part in parts)
            rows.append([leaf.name, f"{leaf.size:,}", leaf.dtype, *per_parameter])
        return rows

    def _notes(self) -> list[str]:
        notes = []
        wide = [leaf.name for leaf in self.leaves if leaf.dtype == "float32"]
        if 0 < self.float32_params < self.total.size:
            notes.append(
                f"parameters stored in float32: {some(wide)}\n(without keep_float32, "
                "from_master casts no vectors, biases and normalizations)"
            )
        share = self.float32_params / max(self.total.size, 1)
        if share >= _NOTABLE_SHARE:
            wide = sum(leaf.total for leaf in self.leaves if leaf.dtype == "float32")
            notes.append(
                f"{share:.0%} of the parameters are float32, so the weight format does "
                f"not reduce their memory.\nThey and their state need {wide:,} of the "
                "bytes. from_master casts float32 weights to\na narrow "
                "dtype, and stores their low bits in the weight format."
            )
        if self.changed_updates:
            notes.append(_CHANGED.format(some(self.changed_updates)))
        elif self.steps_directly is False:
            notes.append(_NOT_DIRECT)
        return notes


def _float32_moments_notes(leaves: tuple[LeafMemory, ...]) -> list[str]:
    """Return notes on the moments that are stored in float32, with reasons."""
    fields_of: dict[tuple[str, ...], list[str]] = {}
    for field in dict.fromkeys(x for leaf in leaves for x in leaf.float32_moments):
        names = tuple(leaf.name for leaf in leaves if field in leaf.float32_moments)
        fields_of.setdefault(names, []).append(field)
    notes = []
    for names, fields in fields_of.items():
        others = (leaf for leaf in leaves if leaf.name not in names)
        in_others = {field for leaf in others for field, _ in leaf.moment_dtypes}
        note = f"moments stored in float32: {', '.join(fields)} of "
        if in_others.isdisjoint(fields):
            note += "all leaves (without a moment format)"
        else:
            note += f"{some(names)} (too small for their moment format)"
        notes.append(note)
    return notes


def memory_report(
    tx: Transformation,
    params: PyTree,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    keep_float32: KeepFloat32 = is_bias_or_norm,
    grad_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    stacked: Callable[[str], bool] | None = None,
) -> MemoryReport:
    """Report the bytes per parameter of each part and leaf, without allocating a state.

    Args:
      tx: an optax transformation, which may contain :func:`lowbit_optax.lowbit`.
      params: tree of arrays or ShapeDtypeStructs. A QuantizedTensor is one leaf.
      dtype: the dtype to which :func:`from_master` will cast ``params``, if they are
        float32. If None, the report uses their own dtypes.
      keep_float32: selects parameters that stay float32; see :func:`from_master`.
      grad_dtype: the dtype of gradients and dequantized copies of quantized weights.
        Other gradients have the dtype of their parameter.
      stacked: a function ``path -> bool`` that returns True for leaves whose first axis
        is a stack of layers that a scan loops over. With release, only one layer of
        their gradients counts.

    Returns:
      A :class:`MemoryReport`. ``print`` or ``plot`` it. The column "f32 master" is for
      training with optax and the same inner transformation: parameters, a float32
      master for narrow parameters, and float32 moments and accumulators. For a
      QuantizedTensor, it counts float32 parameters. Notes below the table list the
      moments that are stored in float32. They also warn you if many parameters are
      float32, if a wrapper around ``lowbit`` prevents the fast path of
      :func:`lowbit_optax.step`, or if it changes updates that are already rounded.

    Raises:
      TypeError: if ``tx`` is not a transformation, if ``params`` is the state of an
        optimizer, or if ``dtype`` or ``grad_dtype`` is not a float dtype.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    >>> report = memory_report(lowbit_optax.extra_bits_adamw(1e-3, bits=8), params)
    >>> round(report.bytes_per_param, 2), report.leaves[0].float32_moments
    (11.0, ('mu', 'nu'))
    >>> round(report.step_peak() / report.total.size, 2)
    13.0
    """
    check_transformation("memory_report", "tx", tx)
    grad_dtype = float_dtype("memory_report: grad_dtype", grad_dtype)
    if dtype is not None:
        params = narrowed_shapes("memory_report: dtype", params, dtype, keep_float32)
    params = trees.abstract(params)
    by_name = trees.by_path(params)
    state = jax.eval_shape(tx.init, params)
    owned: dict[str, list[StateLeaf]] = {name: [] for name in by_name}
    loose = 0
    for part in state_leaves(params, state):
        owner = part.owner
        if owner is None or is_scalar_of_the_state(part, by_name[owner].shape):
            loose += _nbytes(part.leaf)
        else:
            owned[owner].append(part)
    rows = [_row(name, leaf, owned[name]) for name, leaf in by_name.items()]
    sums: dict[str, typing.Any] = {
        part: sum(getattr(row, part) for row in rows)
        for part in (*_PARTS, "float32_master")
    }
    sums["other"] += loose
    size = sum(row.size for row in rows)
    total = LeafMemory("total", (size,), "", **sums)
    sizes = gradient_bytes(params, grad_dtype, stacked)
    steps_directly, changed = False, ()
    try:
        steps_directly = is_direct(tx, params, state, {})
    except ChangedUpdateError as error:
        changed = error.names
    gradients = sum(whole for whole, _ in sizes), released(one for _, one in sizes)
    return MemoryReport(tuple(rows), total, steps_directly, changed, *gradients)


def gradient_bytes(
    params: PyTree, dtype: np.dtype, stacked: Callable[[str], bool] | None
) -> list[tuple[int, int]]:
    """Return the bytes of each leaf's gradient, without release and with release."""
    check_type("stacked", stacked, Callable | None, "a function path -> bool, or None")
    sizes = []
    for name, leaf in trees.by_path(params).items():
        whole = _nbytes(leaf) if trees.is_inexact(leaf) else 0
        if trees.is_quantized(leaf):
            whole = 2 * leaf.size * dtype.itemsize  # with the dequantized copy
        is_stack = stacked is not None and leaf.shape and stacked(name)
        sizes.append((whole, whole // max(leaf.shape[0], 1) if is_stack else whole))
    return sizes


def released(sizes: Iterable[int]) -> int:
    """Return the peak number of bytes of gradients with release."""
    return sum(sorted(sizes, reverse=True)[:_LIVE_GRADIENTS])


def _row(name: str, param, parts: list[StateLeaf]) -> LeafMemory:
    """Return the entry of a parameter, given the parts of its state."""
    size, dtype = math.prod(param.shape), param.dtype
    stored = size * dtype.itemsize
    # Training with optax needs a float32 master for narrow parameters.
    float32_master = stored + (4 * size if is_narrow(dtype) else 0)
    dtype_name = dtype.name
    if trees.is_quantized(param):
        stored, dtype_name = param.nbytes, param.stored_in
    held: dict[str, typing.Any] = dict.fromkeys(_PARTS[1:], 0)
    moment_dtypes = []
    for part in parts:
        kind = {"residual": "residual", "blank": "other"}.get(part.kind or "")
        if kind is not None:
            held[kind] += _nbytes(part.leaf)
            continue
        is_sum = any(name in _ACCUMULATORS for name in part.attributes)
        held["accumulators" if is_sum else "moments"] += _nbytes(part.leaf)
        if part.kind == "scales":
            continue
        is_packed = part.kind == "codes" and part.leaf.dtype == jnp.uint32
        is_whole = is_packed or part.leaf.shape == param.shape
        # Moments with another shape, such as factored ones, count with their own size,
        # and so do complex and 64-bit moments.
        float32_master += max(4 * size if is_whole else 0, _nbytes(part.leaf))
        if is_whole and not is_sum:
            moment_dtypes.append((part.moment_field, part.leaf.dtype.name))
    held |= {"params": stored, "float32_master": float32_master}
    dtypes = tuple(moment_dtypes)
    return LeafMemory(
        name, tuple(param.shape), dtype_name, **held, moment_dtypes=dtypes
    )


def _nbytes(leaf) -> int:
    return leaf.size * leaf.dtype.itemsize
