"""``LeafBody``: the computation of a fused kernel for one leaf, on rows of its arrays.

    grad, param, residual, moments --> join, decode, program, split, encode
    schedule, count, global norm ----> scalars -------^

:func:`.plan.plan_kernels` creates the bodies, and :mod:`.launches` passes them to
``pallas_kernels.fused_update``, which calls them on rows of these arrays.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._jaxprs.elementwise import Program, decode_scalar
from lowbit_optax._numerics.bitmaps import differing
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.linear_code import QuantizedFields
from lowbit_optax._numerics.random_bits import DrawnOnce, Draws, RandomBits
from lowbit_optax._numerics.straight_through import straight_through
from lowbit_optax._step.error_feedback import fed
from lowbit_optax._step.leaf import StoredLeaf
from lowbit_optax.formats.base import MomentFormat, WeightFormat
from lowbit_optax.formats.block_quantized import BlockQuantized, QuantizedMoment
from lowbit_optax.formats.quantized_weights import QuantizedWeights, result_of
from pallas_kernels.fused_update import Leaf, Operand, Result


@dataclasses.dataclass(frozen=True)
class WeightRows:
    """How the weight of a leaf is stored.

    Args:
      format: the format for unpacked residuals; None for a leaf without a format and
        for a QuantizedTensor.
      quantized: functions that encode and decode the fields of a QuantizedTensor; None
        for other leaves.
      has_residual: whether the operands contain a residual after the parameter.
      spare_stream: see :class:`.StoredLeaf`.
    """

    format: WeightFormat | None
    quantized: QuantizedFields | None
    has_residual: bool
    spare_stream: int | None

    @classmethod
    def of(cls, leaf: StoredLeaf) -> "WeightRows":
        """Return how the weight of this leaf is stored."""
        if isinstance(leaf.format, QuantizedWeights):
            fields = leaf.format.fields_of(leaf.param)
            return cls(None, fields, False, leaf.spare_stream)
        format_ = leaf.format and leaf.format.on_fields()
        return cls(format_, None, leaf.residual is not None, leaf.spare_stream)

    @property
    def is_packed(self) -> bool:
        """Whether the parameter or the residual is packed."""
        return self.quantized is not None or bool(self.format and self.format.width)

    @property
    def has_scales(self) -> bool:
        """Whether each block is stored with a scale."""
        return self.quantized is not None

    @property
    def blocks(self) -> QuantizedFields:
        """The functions that encode and decode a weight with scales."""
        return typing.cast(QuantizedFields, self.quantized)

    def master(self, param: jax.Array, residual, prepared) -> jax.Array:
        """Return the float32 weight that the inner transformation sees.

        ``prepared`` contains the scales of a QuantizedTensor, from ``blocks.prepare``.
        """
        if self.quantized is not None:
            return self.quantized.decode(param, prepared)
        return self.format.inner_weight(param, residual) if self.format else param

    def stored(
        self,
        landing: Landing,
        result: jax.Array,
        param: jax.Array,
        residual,
        random: RandomBits,
        prepared,
        ahead: jax.Array | None,
    ) -> tuple[jax.Array, typing.Any]:
        """Return the new parameter and residual, from the result of the program.

        ``prepared`` contains the new scales of a QuantizedTensor. For ``ahead``, see
        :meth:`WeightFormat.advance`.
        """
        if self.quantized is not None:
            fields = self.quantized.encode(result, prepared, random, ahead)
            return fields, None
        if self.format is None:
            return result, residual
        if self.format.stores_sum:
            return self.format.store(param, result, random, landing)[:2]
        return self.format.advance(param, residual, result, random, landing, ahead)[:2]

    def error(self, update, master, param, residual, stored, prepared) -> jax.Array:
        """Return the update minus the change of the master; see ``stored``."""
        if self.quantized is not None:
            return update - (self.quantized.decode(stored[0], prepared) - master)
        format_ = typing.cast(WeightFormat, self.format)
        return format_.error(param, residual, update, *stored)


@dataclasses.dataclass(frozen=True)
class MomentRows:
    """How a moment of a leaf is stored.

    Args:
      format: its format; None if it is not encoded.
      number: its index among the leaf's moments with a format.
    """

    format: MomentFormat | None = None
    number: int = 0

    @property
    def has_scales(self) -> bool:
        """Whether each block is stored with a scale."""
        return self.format is not None and self.format.has_scales

    @property
    def blocks(self) -> BlockQuantized:
        """The format of a moment with scales."""
        return typing.cast(BlockQuantized, self.format)

    def decoded(self, stored: jax.Array, prepared) -> jax.Array:
        """Return the float32 value of a moment.

        ``prepared`` contains its scales, from ``blocks.prepare``; None without scales.
        """
        if self.format is None:
            return stored
        if self.has_scales:
            return self.blocks.codec.decode_fields(stored, prepared)
        return self.format.decode(stored, stored.shape)

    def encoded(self, moment: jax.Array, prepared, draws: Draws) -> jax.Array:
        """Return the stored form of a moment."""
        if self.format is None:
            return moment
        if self.has_scales:
            return self.blocks.encode_fields(moment, prepared, draws, self.number)
        return self.format.encode(moment, draws, self.number)


KEYS = 2
"""The number of random keys at the start of a leaf's row in the table of scalars."""


@dataclasses.dataclass(frozen=True)
class LeafBody:
    """The update of one leaf, on rows of its arrays.

    It is static and hashable, so that equal leaves share one kernel. If any array has
    scales, it is a :class:`pallas_kernels.BlockBody`.

    Args:
      program: maps (gradient, master, moments, arrays that XLA computes) to (result,
        moments), in float32. Output 0, the result, is the updated master. It is the
        update if the weight format adds updates itself, or if a float32 leaf returns
        its update.
      weight, moments: how they are stored.
      landing: whether the leaf's result is the new parameter or an update.
      is_guarded: whether the first scalars after the keys belong to a guard: the factor
        for the gradients, and whether the step happens.
      is_unscaled: whether the gradient was multiplied by this factor before.
      from_stored: the program for the result, if it is computed from rounded moments.
        Its inputs are these moments, decoded, followed by the inputs of ``program``,
        whose output 0 is not used.
      takes_error: index of the output to which the weight's rounding error is added, or
        None. If set, the result is the update, and the last outputs are ``rate``,
        ``growth`` and ``reach`` of
        :class:`lowbit_optax._step.error_feedback.Feedback`.
      is_differentiable: whether rounding has derivatives. Kernels do not support them.
      draws_once: whether XLA computes random words once for all results that read them.
      marks_changes: whether the last result per element is a bitmap of the weights that
        changed.
    """

    program: Program
    weight: WeightRows
    moments: tuple[MomentRows, ...]
    landing: Landing
    is_guarded: bool = False
    is_unscaled: bool = False
    takes_error: int | None = None
    from_stored: Program | None = None
    is_differentiable: bool = False
    draws_once: bool = False
    marks_changes: bool = False

    @property
    def when(self) -> int | None:
        """Column of the scalar that is zero in a skipped step; None without a guard."""
        return KEYS + 1 if self.is_guarded else None

    @property
    def differentiable(self) -> "LeafBody":
        """The same body with derivatives, for XLA; see :mod:`.straight_through`."""
        return dataclasses.replace(self, is_differentiable=True)

    @property
    def in_parts(self) -> "LeafBody":
        """The same body for parts of a leaf on a CPU."""
        return dataclasses.replace(self, draws_once=True)

    def arrays(self, leaf: StoredLeaf, parts: Sequence, outside: Sequence = ()) -> Leaf:
        """Return the arrays of a leaf and its moments that a kernel reads and writes.

        ``outside`` contains the arrays that XLA computes, if they are known.
        """
        stored = [leaf.param, *parts]
        fields = [
            Operand(x.codes, rows.blocks.bits) if rows.has_scales else Operand(x)
            for rows, x in zip(self._rows, stored, strict=True)
        ]
        residual = []
        if self.weight.has_residual:
            residual.append(Operand(leaf.residual, self._format.width or None))
        scales = [
            Operand(stored[number].scales, block_size=rows.blocks.block_size)
            for number, rows in self._scaled.items()
        ]
        operands = [Operand(leaf.grad), fields[0], *residual, *fields[1:], *scales]
        # Every operand except the gradient is overwritten by a result. If updates are
        # returned, the old parameter is still needed, so its result is a new array.
        needed = set()
        if not self.landing.is_direct:
            needed = {1}
            if self.weight.has_scales:
                needed.add(len(operands) - len(scales))
        results = [
            Result(x.array.dtype, x.bits, None if n in needed else n, x.block_size)
            for n, x in enumerate(operands)
            if n > 0
        ]
        if self.marks_changes:
            results.append(Result(np.uint8, bits=4))
        operands += [_read_only(x, leaf.param.shape) for x in outside]
        return Leaf(
            tuple(operands), tuple(results), leaf.param.shape, sharding=leaf.sharding
        )

    def stored(self, leaf: StoredLeaf, arrays: Sequence) -> tuple:
        """Return a leaf's results: ``(result, residual, moments, changed weights)``."""
        *arrays, changed = arrays if self.marks_changes else (*arrays, None)
        count = len(arrays) - len(self._scaled)
        scales = dict(zip(self._scaled, arrays[count:], strict=True))
        new, *moments = arrays[:count]
        residual = moments.pop(0) if self.weight.has_residual else None
        if self.weight.has_scales:
            new = dataclasses.replace(leaf.param, codes_v2=new, scales_v2=scales[0])
            new = result_of(leaf.param, new, self.landing)
        elif self.weight.format is not None:
            new = self.landing.result(leaf.param, new)
        for i, moment in enumerate(self.moments):
            if moment.has_scales:
                moments[i] = QuantizedMoment(moments[i], scales[i + 1])
        return new, residual, moments, changed

    @property
    def block_sizes(self) -> list[int]:
        """The block size of each maximum that determines a scale."""
        return [rows.blocks.block_size for rows in self._by_maxima.values()]

    @property
    def kept(self) -> int:
        """The number of values per element that are kept until the maxima are known."""
        return len(self._scaled) + (self.takes_error is not None)

    def before(self, block_values):
        """Convert the stored scales to the form that decoding needs."""
        pairs = zip(self._scaled.values(), block_values, strict=False)
        return tuple(rows.blocks.prepare(scale) for rows, scale in pairs)

    def statistics(self, values, scalars, index, before, after=None):
        """Return the arrays whose maxima per block determine the new scales.

        With ``from_stored``, the maxima of the weight depend on the scales of the
        moments. With ``takes_error``, the maxima of a moment may depend on the scales
        of the weight.
        """
        scaled, last = self._scaled, self._last
        if last is not None:
            is_first = after is None and len(scaled) > 1
            scaled = {n: x for n, x in scaled.items() if (n != last) == is_first}
        wanted = set(scaled)
        takes_error = self.takes_error in wanted
        from_stored = self.from_stored is not None and 0 in wanted
        if takes_error or from_stored:
            wanted = set(range(len(self.program.outputs)))
        opened = self._opened(values, scalars, before)
        new = self._new(sorted(wanted), opened, scalars)
        random = self._random(scalars, index)
        if takes_error:
            self._store_weight(new, opened, random, after or ())
        if from_stored:
            self._encoded(new, opened, scalars, random, after)
        if 0 in scaled:
            new[0] = self._to_store(new, opened)
        return [rows.blocks.magnitude_key(new[n]) for n, rows in scaled.items()]

    def after(self, maxima, block_values):
        """Return ``(new scales, the scales in the form that encoding needs)``.

        Scales with unknown maxima are omitted from the first list and None in the
        second.
        """
        olds = self._by_number(block_values)
        known = zip(self._by_maxima.items(), maxima, strict=False)
        scales = {n: rows.blocks.scale_of(x, olds[n]) for (n, rows), x in known}
        prepared = tuple(
            rows.blocks.prepare(scales[n]) if n in scales else None
            for n, rows in self._scaled.items()
        )
        return [scales[n] for n in olds if n in scales], prepared

    def __call__(self, values, scalars, index, before=(), after=()):
        """Return the new parameter, residual and moments."""
        opened = self._opened(values, scalars, before)
        outputs = range(len(self.program.outputs))
        new = self._new(outputs, opened, scalars)
        random = self._random(scalars, index)
        store = functools.partial(self._store_weight, new, opened, random, after)
        # Another order may need more registers.
        first = store() if self.from_stored is None else None
        moments = self._encoded(new, opened, scalars, random, after)
        result, new_residual = first or store()
        residuals = [new_residual] if self.weight.has_residual else []
        changed = []
        if self.marks_changes:
            changed.append(differing(opened[0], result))
        return [result, *residuals, *moments, *changed]

    def _random(self, scalars, index) -> RandomBits:
        kind = DrawnOnce if self.draws_once else RandomBits
        return kind(scalars[0], scalars[1], index)

    def _encoded(self, new: dict, opened, scalars, random, after) -> list:
        """Return the new moments in their stored form.

        With ``from_stored``, this also adds the result to ``new``, as output 0.
        """
        prepared = self._by_number(after or ())
        draws = Draws(random, spare=self.weight.spare_stream)
        stored = []
        for n, rows in enumerate(self.moments, 1):
            encode = self._rounding(rows, rows.encoded)
            stored.append(encode(new[n], prepared.get(n), draws))
        if self.from_stored is not None:
            decoded = self._decoded(stored, prepared)
            rows = [*decoded, *opened[2]]
            new[0] = self.from_stored.run(rows, scalars[KEYS:])[0]
        return stored

    @property
    def _rows(self) -> tuple[WeightRows | MomentRows, ...]:
        return self.weight, *self.moments

    @property
    def _scaled(self) -> dict[int, WeightRows | MomentRows]:
        """The weight and moments with a scale per block, keyed by output index."""
        return {n: x for n, x in enumerate(self._rows) if x.has_scales}

    @property
    def _last(self) -> int | None:
        """The row whose maxima depend on the scales of other rows, or None."""
        if self.from_stored is not None:
            return 0
        both = {0, self.takes_error} <= self._scaled.keys()
        return self.takes_error if both else None

    @property
    def _by_maxima(self) -> dict[int, WeightRows | MomentRows]:
        """The rows with scales, in the order of the maxima that determine them."""
        last = self._last
        return dict(sorted(self._scaled.items(), key=lambda item: item[0] == last))

    @property
    def _format(self) -> WeightFormat:
        return typing.cast(WeightFormat, self.weight.format)

    def _by_number(self, per_scale: Sequence) -> dict:
        """Return a dict from output index to per-block values, if they are known."""
        return dict(zip(self._scaled, per_scale, strict=False))

    def _opened(self, values, scalars, before) -> tuple:
        """Return ``(param, residual, inputs of the program)``."""
        grad, param, *rest = values
        residual = rest.pop(0) if self.weight.has_residual else None
        prepared = self._by_number(before)
        rest, outside = rest[: len(self.moments)], rest[len(self.moments) :]
        # Decode the moments first, because another order needs more registers for LPMM.
        moments = self._decoded(rest, prepared)
        is_wide = not (is_narrow(grad.dtype) or is_narrow(param.dtype))
        if self.weight.has_scales or not is_wide:
            grad = grad.astype(jnp.float32)
        if self.is_guarded and not self.is_unscaled:
            grad = grad * decode_scalar(scalars[KEYS], np.dtype(np.float32))
        join = self._rounding(self.weight, self.weight.master)
        master = join(param, residual, prepared.get(0))
        return param, residual, [grad, master, *moments, *outside]

    def _new(self, outputs: Iterable[int], opened, scalars) -> dict:
        """Return a dict from output index to result, for the given outputs."""
        program = self.program.only(outputs)
        results = program.run(opened[2], scalars[KEYS:])
        return dict(zip(outputs, results, strict=True))

    def _to_store(self, new: dict, opened) -> jax.Array:
        """Return what the weight format stores: output 0 of the program.

        If it is the update of a QuantizedTensor, return the updated master.
        """
        is_update = self.weight.has_scales and self.takes_error is not None
        return opened[2][1] + new[0] if is_update else new[0]

    def _store_weight(
        self, new: dict, opened, random, after
    ) -> tuple[jax.Array, typing.Any]:
        """Return the new parameter and residual; see :meth:`.WeightRows.stored`.

        With ``takes_error``, this also adds the rounding error to the moment in
        ``new``.
        """
        param, residual, (_, master, *_) = opened
        ahead, into = None, self.takes_error
        feedback = [*new.values()][-3:]  # rate, growth and reach
        if into is not None:
            ahead = new[into] * feedback[-1]

        def tangent(result, param, *_):
            is_sum = self._format.stores_sum
            return result if is_sum else result + param.astype(result.dtype)

        prepared = self._by_number(after).get(0)
        store = functools.partial(self.weight.stored, self.landing)
        store = self._rounding(self.weight, store, tangent)
        result = self._to_store(new, opened)
        stored = store(result, param, residual, random, prepared, ahead)
        if into is not None:
            of = master, param, residual, stored, prepared
            error = self.weight.error(new[0], *of)
            feed = self._rounding(self.weight, fed)
            new[into] = feed(new[into], error, *feedback[:-1])
        return stored

    def _rounding(
        self, rows: WeightRows | MomentRows, function: Callable, *tangent: Callable
    ) -> Callable:
        """Return ``function``, with a derivative if rounding these rows needs one."""
        has_rule = self.is_differentiable and rows.format and not rows.has_scales
        return straight_through(function, *tangent) if has_rule else function

    def _decoded(self, stored: Sequence, prepared: dict) -> list:
        """Decode all moments from their stored form to float32."""
        decoded = []
        for n, (moment, x) in enumerate(zip(self.moments, stored, strict=True), 1):
            decode = self._rounding(moment, moment.decoded)
            decoded.append(decode(x, prepared.get(n)))
        return decoded


def _read_only(array: jax.Array, shape: tuple[int, ...]) -> Operand:
    """Return a read-only operand, which is repeated along axes of length 1."""
    lengths = enumerate(zip(array.shape, shape, strict=True))
    return Operand(array, repeated=tuple(axis for axis, (n, m) in lengths if n != m))
