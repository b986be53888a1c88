"""``plan``: the formats that fit into a device's memory, and what each may lose."""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax._arguments import check_number
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._step.engine import InexactWeightsError
from lowbit_optax._step.kept_float32 import (
    KeepFloat32,
    is_bias_or_norm,
    narrowed_shapes,
)
from lowbit_optax._step.moment_slots import Moments, NoSuchMomentError
from lowbit_optax._tables import Table, Tabular
from lowbit_optax._types import PyTree, Transformation
from lowbit_optax.formats import (
    block_quantized,
    cast,
    extra_bits,
    kahan,
    quantized_weights,
)
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.lpmm import quantize_params
from lowbit_optax.reports.memory import MemoryReport, memory_report
from lowbit_optax.states.masters import from_master
from lowbit_optax.transformations.lowbit import lowbit

_ANY_RATE = 1e-3  # the memory does not depend on it

_ACTIVATIONS = """\
Activations are not counted, except what you pass as other_bytes; step_memory compiles a
step and counts them."""


@dataclasses.dataclass(frozen=True)
class _Formats:
    """A choice of formats: of the moments, the first that the optimizer has."""

    name: str
    weights: WeightFormat | None
    moments: tuple[Moments, ...] = ("float32",)
    bits: int | None = None


_DYNAMIC = block_quantized(8, code="dynamic", block_size=2048)
_LPMM = (
    {"mu": _DYNAMIC, "nu": block_quantized(8)},
    {"trace": _DYNAMIC},
    block_quantized(8),
)

_four_bit_mu = lambda nu: ({"mu": block_quantized(4), "nu": block_quantized(nu)},)

# In the order of what they can lose: bits of weights, then of moments.
_CHOICES = (
    _Formats("float32", None),
    _Formats("extra_bits", extra_bits()),
    _Formats("kahan", kahan(), (cast(jnp.bfloat16),)),
    _Formats("lowbit", extra_bits(8), (block_quantized(8),)),
    _Formats("lowbit, 4-bit mu", extra_bits(8), _four_bit_mu(8)),
    _Formats("lowbit, low", extra_bits(8), _four_bit_mu(6)),
    _Formats("lowbit, 4-bit mu, nu", extra_bits(8), _four_bit_mu(4)),
    _Formats("lpmm, 12 bits", quantized_weights(), _LPMM, bits=12),
    _Formats("lpmm, 8 bits", quantized_weights(), _LPMM, bits=8),
)


@dataclasses.dataclass(frozen=True, repr=False)
class PlannedFormats:
    """One row of a :class:`Plan`: formats, their memory, and how to train with them.

    Args:
      name: of the formats.
      report: of parameters, optimizer state and gradients.
      params: shapes and dtypes of the parameters in these formats.
      dtype: of quantised weights' gradients.
      devices, other_bytes, device_bytes: as for :func:`plan`.
      make: ``learning_rate -> transformation``.
      init: ``(transformation, float32 weights) -> (params, state)``.
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
        """Parameters, state, gradients and ``other_bytes`` on each device."""
        total = self.report.step_peak(release)
        return -(-total // self.devices) + self.other_bytes

    def fits(self, release: bool) -> bool:
        """Whether that is within the budget."""
        return self.bytes_per_device(release) <= self.device_bytes

    @property
    def needs_release(self) -> bool:
        """Whether it fits with the step in the backward pass, and only so."""
        return self.fits(release=True) and not self.fits(release=False)

    def __repr__(self) -> str:
        per_param = self.report.bytes_per_param
        return f"PlannedFormats({self.name!r}, {per_param:.2f} bytes per parameter)"


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Tabular):
    """The table that :func:`plan` makes; ``print`` it.

    Args:
      rows: all choices for this optimizer, the least lossy first.
    """

    rows: tuple[PlannedFormats, ...]

    @property
    def best(self) -> PlannedFormats | None:
        """The least lossy row that fits; None if no row does."""
        return next((row for row in self.rows if row.fits(release=True)), None)

    def __getitem__(self, name: str) -> PlannedFormats:
        """The row of this name.

        Raises:
          KeyError: if there is none, with the names that there are.
        """
        names = [row.name for row in self.rows]
        if name not in names:
            raise KeyError(f"plan: no formats {name!r}; there are {', '.join(names)}")
        return self.rows[names.index(name)]

    def table(self) -> Table:
        """Bytes per parameter and per device, with a row for each choice of formats."""
        head = ("formats", "weights", "state", "gradients", "released", "GiB", "with")
        title = "bytes per parameter, and GiB per device without and with release"
        rows = [(*head, "fits"), *map(_cells, self.rows)]
        return Table(title, rows, [self._verdict(), _ACTIVATIONS])

    def _verdict(self) -> str:
        budget = _gib(self.rows[0].device_bytes)
        best = self.best
        if best is None:
            least = min(row.bytes_per_device(release=True) for row in self.rows)
            return f"none fits into {budget} GiB: the smallest takes {_gib(least)} GiB"
        release = " with release" if best.needs_release else ""
        return f"the least lossy that fits into {budget} GiB: {best.name}{release}"


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
    """Which formats fit into a device's memory, and the least lossy of them.

        (params + state + gradients) / devices + other_bytes <= device_bytes

    Parameters and state are those of :func:`memory_report` for each choice's own
    transformation. Gradients have the parameters' dtypes, and ``dtype`` for quantised
    weights, which are also dequantised. With :mod:`lowbit_optax.release` two leaves'
    gradients are counted, of the largest ones; it changes no number of the training.

    Rows are in the order of what they can lose, bits of weights before bits of moments.
    In what docs/accuracy.md has trained to the end of a schedule, ``lowbit``, 4 bits of
    both moments and 12 bits end 0.002 to 0.005 nats above float32, whose seeds spread
    by 0.002, and low moments below it; docs/choosing.md says when each fails. Choices
    whose moments the optimizer does not have, as ``mu`` and ``nu``, are left out, and
    those whose weights it does not take, as of Prodigy.

    Args:
      params: tree of arrays or ShapeDtypeStructs, such as ``jax.eval_shape`` of a
        model's ``init``.
      device_bytes: the budget of one device.
      optimizer: ``learning_rate -> optax transformation``.
      dtype: of the parameters that are narrowed.
      keep_float32: which are not; see :func:`from_master`. Quantised weights follow
        :func:`quantize_params` instead.
      other_bytes: what a device holds besides: activations, batches, the program.
      devices: over how many parameters, state and gradients are sharded evenly.
      stacked: ``path -> bool``: whether the leaf's first axis is a stack of layers that
        a scan goes through, so that the gradient of one layer counts.

    Returns:
      A :class:`Plan`. ``print`` it; train with ``plan.best``, or ``plan[name]``.

    Raises:
      TypeError: if ``optimizer`` is not a function that makes transformations, or a
        leaf is not an array, or ``dtype`` is not a floating-point dtype.
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
    _check_numbers(device_bytes, other_bytes, devices)
    _check_optimizer(optimizer)
    dtype = float_dtype("plan: dtype", dtype)
    # Narrowed here for its checks, whose errors name the leaf.
    shapes_in = lambda dtype: narrowed_shapes(
        "plan: dtype", params, dtype, keep_float32
    )
    narrow, wide = shapes_in(dtype), shapes_in(jnp.float32)
    rows = []
    for choice in _CHOICES:
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
            row = PlannedFormats(
                choice.name,
                report,
                params=shapes,
                dtype=dtype,
                devices=devices,
                other_bytes=int(other_bytes),
                device_bytes=int(device_bytes),
                make=make,
                init=functools.partial(_started, choice, dtype, keep_float32),
            )
            rows.append(row)
            break
    return Plan(tuple(rows))


def _transformation(optimizer, choice: _Formats, moments: Moments, learning_rate):
    inner = optimizer(learning_rate)
    if choice.weights is None:
        return optax.with_extra_args_support(inner)
    return lowbit(inner, weights=choice.weights, moments=moments)


def _started(
    choice: _Formats,
    dtype: np.dtype,
    keep_float32: KeepFloat32,
    tx: Transformation,
    weights: PyTree,
):
    """Parameters and state at the start, from float32 weights."""
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


def _check_numbers(device_bytes, other_bytes, devices) -> None:
    for name, value, least in (
        ("device_bytes", device_bytes, 2**20),
        ("other_bytes", other_bytes, 0),
    ):
        accepted = f"a number of bytes from {least}, such as 80e9"
        is_accepted = lambda x, least=least: least <= x < float("inf")
        check_number("plan", name, value, is_accepted, accepted)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"plan: devices must be a positive int, got {devices!r}")


def _check_optimizer(optimizer) -> None:
    made = optimizer(_ANY_RATE) if callable(optimizer) else None
    if not hasattr(made, "init") or not hasattr(made, "update"):
        raise TypeError(
            f"plan: optimizer is {optimizer!r}; accepted is a function of the learning "
            "rate that makes an optax transformation, such as optax.adamw or "
            "lambda rate: optax.sgd(rate, 0.9)"
        )
