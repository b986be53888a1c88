"""``plan``: the formats that fit into the memory of a device."""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax._arguments import (
    check_number,
    check_static_int,
    check_transformation,
    check_type,
)
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._step.engine import InexactWeightsError
from lowbit_optax._step.float32_params import (
    KeepFloat32,
    is_bias_or_norm,
    narrowed_shapes,
)
from lowbit_optax._step.moments import Moments, NoSuchMomentError
from lowbit_optax._step.stepper import with_extra_args
from lowbit_optax._tables import Table, Tabular
from lowbit_optax._types import PyTree
from lowbit_optax.aliases.adamw import sr_adamw
from lowbit_optax.aliases.factored import factored_adamw
from lowbit_optax.formats import (
    block_quantized,
    cast,
    extra_bits,
    kahan,
    quantized_weights,
    stochastic_rounding,
)
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.lpmm import quantize_params
from lowbit_optax.reports.memory import MemoryReport, memory_report
from lowbit_optax.states.masters import from_master
from lowbit_optax.transformations.lowbit import lowbit

_ANY_RATE = 1e-3  # memory does not depend on the learning rate

_ACTIVATIONS = """\
Activations count only if you pass their bytes as other_bytes. step_memory compiles a
step and includes them."""

_RESERVED = 0.75  # the share of a GPU's memory that JAX allocates by default

_OTHERS = """\
Optimizers with a factored second moment, such as optax.adafactor, need less; see
docs/other_optimizers.md."""


@dataclasses.dataclass(frozen=True)
class _Formats:
    """The formats of a row. ``plan`` uses the first ``moments`` the optimizer has.

    A row with ``adamw`` uses this function of the learning rate instead of
    ``optax.adamw``, and does not exist for other optimizers.
    """

    name: str
    weights: WeightFormat | None
    moments: tuple[Moments, ...] = ("float32",)
    bits: int | None = None
    adamw: Callable[[typing.Any], optax.GradientTransformationExtraArgs] | None = None


_DYNAMIC = block_quantized(8, code="dynamic", block_size=2048)
_LPMM = (
    {"mu": _DYNAMIC, "nu": block_quantized(8)},
    {"trace": _DYNAMIC},
    block_quantized(8),
)

_into_mu = functools.partial(sr_adamw, error_feedback="mu", moments=block_quantized(8))

# From the least to the most lossy: first by bits of weights, then by bits of moments.
_CHOICES = (
    _Formats("float32", None),
    _Formats("extra_bits", extra_bits()),
    _Formats("kahan", kahan(), (cast(jnp.bfloat16),)),
    _Formats("lowbit", extra_bits(8), (block_quantized(8),)),
    _Formats("factored_adamw", extra_bits(8), adamw=factored_adamw),
    _Formats("error into mu", stochastic_rounding(), adamw=_into_mu),
    _Formats(
        "factored_adamw, bits=0",
        stochastic_rounding(),
        adamw=functools.partial(factored_adamw, bits=0),
    ),
    _Formats("lpmm, 12 bits", quantized_weights(), _LPMM, bits=12),
    _Formats("lpmm, 8 bits", quantized_weights(), _LPMM, bits=8),
)


@dataclasses.dataclass(frozen=True, repr=False)
class PlannedFormats:
    """A row of a :class:`Plan`: formats, their memory, and how to train with them.

    Args:
      name: the name of the formats.
      report: the memory of parameters, optimizer state and gradients.
      params: shapes and dtypes of the parameters in these formats.
      dtype: the dtype of gradients of quantized weights.
      devices, other_bytes, device_bytes: see :func:`plan`.
      make: a function ``learning_rate -> transformation``.
      init: a function ``(transformation, float32 weights) -> (params, state)``.
    """

    name: str
    report: MemoryReport
    params: PyTree
    dtype: np.dtype
    devices: int
    other_bytes: int
    device_bytes: int
    make: Callable[[typing.Any], optax.GradientTransformationExtraArgs]
    init: Callable[[optax.GradientTransformation, PyTree], tuple[PyTree, typing.Any]]

    def bytes_per_device(self, release: bool) -> int:
        """Return the peak number of bytes on a device, including ``other_bytes``."""
        total = self.report.step_peak(release)
        return -(-total // self.devices) + self.other_bytes

    def fits(self, release: bool) -> bool:
        """Return whether ``bytes_per_device`` is within the budget."""
        return self.bytes_per_device(release) <= self.device_bytes

    @property
    def needs_release(self) -> bool:
        """Whether the formats fit with gradient release, but not without it."""
        return self.fits(release=True) and not self.fits(release=False)

    def __repr__(self) -> str:
        size = f"{self.report.bytes_per_param:.2f} bytes per parameter"
        release = ", with release" if self.needs_release else ""
        return f"PlannedFormats({self.name!r}, {size}{release})"


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Tabular):
    """The result of :func:`plan`; ``print`` it.

    Args:
      rows: all formats for this optimizer, from the least to the most lossy.
    """

    rows: tuple[PlannedFormats, ...]

    @property
    def best(self) -> PlannedFormats | None:
        """The least lossy row that fits; None if no row does."""
        return next((row for row in self.rows if row.fits(release=True)), None)

    def __getitem__(self, name: str) -> PlannedFormats:
        """Return the row with this name.

        Raises:
          KeyError: if there is no such row. The message lists the names.
        """
        names = [row.name for row in self.rows]
        if name not in names:
            raise KeyError(f"plan: name must be among {', '.join(names)}, got {name!r}")
        return self.rows[names.index(name)]

    def table(self) -> Table:
        """Return bytes per parameter and per device, with a row for each format."""
        head = ("formats", "weights", "state", "gradients", "released", "GiB", "with")
        title = "bytes per parameter, then GiB per device without and with release"
        rows = [(*head, "fits"), *map(_cells, self.rows)]
        least = int(_RESERVED * self.rows[0].device_bytes)
        reserved = [dataclasses.replace(x, device_bytes=least) for x in self.rows]
        on_gpus = (
            f"JAX uses {_RESERVED:.0%} of a GPU's memory, unless you set "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION:\n{Plan(tuple(reserved))._verdict()}"
        )
        return Table(title, rows, [self._verdict(), on_gpus, _ACTIVATIONS])

    def _verdict(self) -> str:
        budget = _gib(self.rows[0].device_bytes)
        best = self.best
        if best is None:
            least = min(row.bytes_per_device(release=True) for row in self.rows)
            none = f"none fits into {budget} GiB; the smallest needs {_gib(least)} GiB"
            return f"{none}.\n{_OTHERS}"
        release = " with release" if best.needs_release else ""
        return f"least lossy format that fits into {budget} GiB: {best.name}{release}"


def plan(
    params: PyTree,
    device_bytes: float,
    *,
    optimizer: Callable[[typing.Any], optax.GradientTransformation] = optax.adamw,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    keep_float32: KeepFloat32 = is_bias_or_norm,
    other_bytes: float = 0,
    devices: int = 1,
    stacked: Callable[[str], bool] | None = None,
) -> Plan:
    """Find the formats that fit into the memory of a device, and the least lossy one.

        (params + state + gradients) / devices + other_bytes <= device_bytes

    The bytes of parameters and state are the same as in :func:`memory_report`.
    Gradients have the dtypes of parameters. Quantized weights have gradients and
    dequantized copies in ``dtype``. With :mod:`lowbit_optax.release`, only the
    gradients of the two largest leaves count; training results are the same.

    Rows are ordered from the least to the most lossy format: first by bits of weights,
    then by bits of moments. docs/accuracy.md compares their losses with float32's, and
    docs/choosing.md describes when each format fails. The plan leaves out formats whose
    moments the optimizer does not have, or whose weights it does not support, as with
    Prodigy. It has rows with rounding errors in ``mu``, and rows with
    :func:`lowbit_optax.factored_adamw`, which is another optimizer than AdamW, only if
    ``optimizer`` is ``optax.adamw``. All other rows have the given optimizer.

    Args:
      params: tree of arrays or ShapeDtypeStructs, such as from ``jax.eval_shape``.
      device_bytes: the memory of one device in bytes. JAX uses 75% of a GPU's memory by
        default. If you do not set the environment variable
        ``XLA_PYTHON_CLIENT_MEM_FRACTION``, pass ``0.75 * 80e9`` for 80 GB.
      optimizer: a function ``learning_rate -> optax transformation``.
      dtype: the dtype of narrow parameters.
      keep_float32: selects parameters that stay float32; see :func:`from_master`.
        Quantized weights follow :func:`quantize_params` instead.
      other_bytes: bytes on each device for activations, batches and the program.
      devices: the number of devices that share parameters, state and gradients evenly.
      stacked: a function ``path -> bool`` that returns True for leaves whose first axis
        is a stack of layers that a scan loops over. With release, only one layer of
        their gradients counts.

    Returns:
      A :class:`Plan`. ``print`` it, and train with ``plan.best`` or ``plan[name]``.

    Raises:
      TypeError: if ``optimizer`` is not a function that returns a transformation, if a
        leaf is not an array, or if ``dtype`` is not a float dtype.
      ValueError: if a number is out of range.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> shapes = {"w": jax.ShapeDtypeStruct((32768, 32768), jnp.float32)}
    >>> planned = plan(shapes, device_bytes=8 * 2**30)
    >>> planned.best.name, planned.best.needs_release
    ('lowbit', False)
    >>> round(planned.best.report.bytes_per_param, 3)
    5.125
    >>> tx = planned.best.make(3e-4)
    >>> weights = {"w": jnp.ones((64, 64))}
    >>> params, state = planned.best.init(tx, weights)
    >>> params["w"].dtype
    dtype(bfloat16)
    """
    _check_bytes("device_bytes", device_bytes, 2**20)
    _check_bytes("other_bytes", other_bytes, 0)
    check_static_int("plan", "devices", devices, 1)
    accepted = "a function of the learning rate, such as optax.adamw"
    check_type("plan: optimizer", optimizer, Callable, accepted)
    result = "the result of optimizer, a function of the learning rate,"
    check_transformation("plan", result, optimizer(_ANY_RATE))
    what = "plan: dtype"
    dtype = float_dtype(what, dtype)
    # This also checks the parameters, with errors that name the leaf.
    shapes_in = lambda dtype: narrowed_shapes(what, params, dtype, keep_float32)
    narrow, wide = shapes_in(dtype), shapes_in(jnp.float32)
    is_real = all(map(jnp.isrealobj, jax.tree.leaves(wide)))
    rows = []
    for choice in _CHOICES:
        if choice.adamw is not None and optimizer is not optax.adamw:
            continue
        if choice.bits is not None and not is_real:  # which quantize_params refuses
            continue
        shapes = wide if choice.weights is None else narrow
        if choice.bits is not None:
            quantize = functools.partial(quantize_params, bits=choice.bits)
            shapes = jax.eval_shape(quantize, wide)
        for moments in choice.moments:
            make = functools.partial(_transformation, optimizer, choice, moments)
            try:
                report = memory_report(
                    make(_ANY_RATE), shapes, grad_dtype=dtype, stacked=stacked
                )
            except (NoSuchMomentError, InexactWeightsError):
                continue
            init = functools.partial(_started, choice, dtype, keep_float32)
            given = shapes, dtype, devices, int(other_bytes), int(device_bytes)
            rows.append(PlannedFormats(choice.name, report, *given, make, init))
            break
    return Plan(tuple(rows))


def _transformation(optimizer, choice: _Formats, moments: Moments, learning_rate):
    if choice.adamw is not None:
        return choice.adamw(learning_rate)
    inner = optimizer(learning_rate)
    if choice.weights is None:
        return with_extra_args(inner)
    return lowbit(inner, weights=choice.weights, moments=moments)


def _started(choice: _Formats, dtype, keep_float32: KeepFloat32, tx, weights):
    """Return parameters and state that start from float32 weights."""
    if choice.bits is not None:
        weights = quantize_params(weights, bits=choice.bits)
    elif choice.weights is not None:
        return from_master(tx, weights, dtype, keep_float32)
    return weights, tx.init(weights)


def _cells(row: PlannedFormats) -> tuple[str, ...]:
    total = row.report.total
    size = max(total.size, 1)
    weights = total.params + total.residual
    gradients = row.report.gradients, row.report.released_gradients
    per = (weights, total.total - weights, *gradients)
    fits = "yes" if row.fits(release=False) else "no"
    return (
        row.name,
        *(f"{part / size:.2f}" for part in per),
        _gib(row.bytes_per_device(release=False)),
        _gib(row.bytes_per_device(release=True)),
        "released" if row.needs_release else fits,
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _check_bytes(name: str, value, least: int) -> None:
    accepted = f"a number of bytes, at least {least}, such as 80e9"
    check_number("plan", name, value, lambda x: least <= x < float("inf"), accepted)
