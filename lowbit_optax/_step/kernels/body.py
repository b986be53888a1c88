"""What a fused kernel computes for one leaf, on rows of its arrays.

grad, param, residual, moments --> join, decode, program, split, encode
schedule, count, global norm ----> scalars -------^
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._jaxprs.leaf_program import Program, Ref, decode_scalar, scalar_value
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import RandomBits, moment_draws
from lowbit_optax._numerics.relative import product_by, quotient
from lowbit_optax._numerics.straight_through import straight_through
from lowbit_optax._step.error_feedback import ahead_of, fed
from lowbit_optax._step.kernels.rows import MomentRows, WeightRows
from lowbit_optax._step.leaf import StoredLeaf
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.quantized_weights import result_of
from pallas_kernels.fused_update import Leaf, Operand, Result

KEYS = 2
"""How many random keys a leaf's row of the table of scalars begins with."""


@dataclasses.dataclass(frozen=True)
class LeafBody:
    """The update of one leaf, on rows of its arrays.

    It is static and hashable, so that equal leaves share one kernel. If anything has
    scales, it is a :class:`pallas_kernels.BlockBody`.

    Args:
      program: from (gradient, master, moments) to (result, moments), in float32. The
        result, which is output 0, is the updated master. It is the update instead if
        the weight format adds updates by itself, or if a float32 leaf's update is asked
        for. After the moments it reads what is computed outside.
      weight, moments: how they are stored.
      landing: how the new parameter takes the old one's place.
      is_guarded: whether the first scalars after the keys are those of a guard: the
        factor of the gradients, and whether the step happens.
      from_stored: the program of the result alone, if the result is computed from the
        rounded moments that are stored. Its rows are these moments, decoded, and then
        the rows of ``program``, whose output 0 is not used.
      phase: the scalar that is the phase of moments that are rounded evenly; None if no
        moment is.
      takes_error: which output is the moment that takes what storing the weight has
        lost. The result is then the update, and the last outputs are ``rate``,
        ``growth`` and ``reach`` of :class:`lowbit_optax._step.error_feedback.Feedback`.
      is_differentiable: whether what rounds has derivatives. A kernel cannot contain
        their rules.
    """

    program: Program
    weight: WeightRows
    moments: tuple[MomentRows, ...]
    landing: Landing
    is_guarded: bool = False
    phase: Ref | None = None
    takes_error: int | None = None
    from_stored: Program | None = None
    is_differentiable: bool = False

    @property
    def when(self) -> int | None:
        """Column of the scalar that is zero in a skipped step; None without a guard."""
        return KEYS + 1 if self.is_guarded else None

    @property
    def differentiable(self) -> "LeafBody":
        """The same with derivatives, for XLA; see :mod:`.straight_through`."""
        return dataclasses.replace(self, is_differentiable=True)

    def arrays(self, leaf: StoredLeaf, parts: Sequence, outside: Sequence = ()) -> Leaf:
        """What a kernel reads and writes of a leaf, whose moments are these parts.

        ``outside`` are the arrays that are computed outside; without them the leaf is
        what is stored of it.
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
        # Every operand but the gradient has a result that overwrites it. If updates are
        # returned, the old parameter is still needed, and its result is a new array.
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
        operands += [_read_only(x, leaf.param.shape) for x in outside]
        return Leaf(
            tuple(operands), tuple(results), leaf.param.shape, sharding=leaf.sharding
        )

    def stored(self, leaf: StoredLeaf, arrays: Sequence) -> tuple:
        """``(result, residual, moments)`` of a leaf, from what a kernel has written."""
        count = len(arrays) - len(self._scaled)
        scales = dict(zip(self._scaled, arrays[count:], strict=True))
        new, *moments = arrays[:count]
        residual = moments.pop(0) if self.weight.has_residual else None
        if self.weight.has_scales:
            new = dataclasses.replace(leaf.param, codes_v2=new, scales_v2=scales[0])
            new = result_of(leaf.param, new, self.landing)
        elif not self.weight.passes_through:
            new = self.landing.result(leaf.param, new)
        for i, moment in enumerate(self.moments):
            if moment.has_scales:
                moments[i] = moment.blocks.container(moments[i], scales[i + 1])
        return new, residual, moments

    @property
    def block_sizes(self) -> list[int]:
        """The block sizes of the maxima, which determine the scales."""
        scaled = self._by_maxima.values()
        return [rows.blocks.block_size for rows in scaled for _ in range(rows.maxima)]

    @property
    def kept(self) -> int:
        """How many numbers per element wait for the maxima over their block.

        A relative moment counts twice: its quotient takes a root.
        """
        relative = sum(x.relative_to is not None for x in self._scaled.values())
        return len(self._scaled) + relative + (self.takes_error is not None)

    def before(self, block_values):
        """The stored scales, prepared for decoding."""
        pairs = zip(self._scaled.values(), block_values, strict=False)
        return tuple(rows.prepare(scale) for rows, scale in pairs)

    def statistics(self, values, scalars, index, multiply_add, before, after=None):
        """The arrays whose maxima per block determine the next scales.

        With ``from_stored`` the weight's maxima need the moments' scales first.
        """
        scaled = self._scaled
        if self.from_stored is not None:
            is_first = after is None and len(scaled) > 1
            scaled = {n: x for n, x in scaled.items() if bool(n) == is_first}
        references = {x.relative_to for x in scaled.values() if x.relative_to}
        wanted = scaled.keys() | references
        takes_error = self.takes_error in wanted
        if takes_error:
            wanted |= {0, *self._of_feedback}
        if self.from_stored is not None and 0 in wanted:
            wanted |= set(range(len(self._rows)))
        opened = self._opened(values, scalars, multiply_add, before)
        new = self._new(sorted(wanted), opened, scalars, multiply_add)
        random = RandomBits(scalars[0], scalars[1], index)
        if takes_error:
            self._feed(new, opened[0], opened[1], random, multiply_add)
        if self.from_stored is not None and 0 in wanted:
            self._encoded(new, opened, scalars, random, multiply_add, after)
        return [
            key
            for n, rows in scaled.items()
            for key in rows.keys(_quotient(rows, new, n))
        ]

    def after(self, maxima, block_values):
        """``(new scales, the same prepared for encoding)``.

        A scale whose maxima are not known yet is left out, and None as prepared.
        """
        maxima, olds, scales = list(maxima), self._by_number(block_values), {}
        for n, rows in self._by_maxima.items():
            if maxima:
                scales[n] = rows.scale_of(maxima[: rows.maxima], olds[n])
                del maxima[: rows.maxima]
        prepared = tuple(
            self._scaled[n].prepare(scales[n]) if n in scales else None for n in olds
        )
        return [scales[n] for n in olds if n in scales], prepared

    def __call__(self, values, scalars, index, multiply_add, before=(), after=()):
        """The new parameter, residual and moments."""
        opened = self._opened(values, scalars, multiply_add, before)
        param, residual, _ = opened
        outputs = range(len(self.program.outputs))
        new = self._new(outputs, opened, scalars, multiply_add)
        random = RandomBits(scalars[0], scalars[1], index)

        def stored_weight():
            if self.takes_error is not None:
                return self._feed(new, param, residual, random, multiply_add)
            how = new[0], random, multiply_add, self._by_number(after).get(0)
            return self._stored(param, residual, *how)

        # Kernels may use more registers in another order.
        first = stored_weight() if self.from_stored is None else None
        moments = self._encoded(new, opened, scalars, random, multiply_add, after)
        result, new_residual = first or stored_weight()
        residuals = [new_residual] if self.weight.has_residual else []
        return [result, *residuals, *moments]

    def _encoded(self, new: dict, opened, scalars, random, multiply_add, after) -> list:
        """The new moments in their stored form.

        With ``from_stored`` it also adds the result to ``new``, as output 0.
        """
        prepared = self._by_number(after or ())
        phase = self.phase and scalar_value(self.phase, scalars[KEYS:])
        draws = moment_draws(random, self.weight.spare_stream, phase)
        stored = []
        for n, rows in enumerate(self.moments, 1):
            moment = _quotient(rows, new, n), prepared.get(n)
            encode = functools.partial(rows.encoded, multiply_add=multiply_add)
            stored.append(self._rounding(rows, encode)(*moment, draws))
        if self.from_stored is not None:
            decoded = self._decoded(stored, prepared, multiply_add)
            rows = [*decoded, *opened[2]]
            new[0] = self.from_stored.run(rows, scalars[KEYS:], multiply_add)[0]
        return stored

    @property
    def _rows(self) -> tuple[WeightRows | MomentRows, ...]:
        return self.weight, *self.moments

    @property
    def _scaled(self) -> dict[int, WeightRows | MomentRows]:
        """What has a scale per block, by output."""
        return {n: x for n, x in enumerate(self._rows) if x.has_scales}

    @property
    def _by_maxima(self) -> dict[int, WeightRows | MomentRows]:
        """The same in the order of the maxima that determine the scales."""
        if self.from_stored is None:
            return self._scaled
        return dict(sorted(self._scaled.items(), key=lambda item: not item[0]))

    @property
    def _format(self) -> WeightFormat:
        return typing.cast(WeightFormat, self.weight.format)

    @property
    def _of_feedback(self) -> tuple[int, int, int]:
        """The outputs of the program that a moment needs to take an error."""
        first = len(self._rows)
        return first, first + 1, first + 2

    def _by_number(self, per_scale: Sequence) -> dict:
        """Values per block by output, as far as they are known."""
        return dict(zip(self._scaled, per_scale, strict=False))

    def _opened(self, values, scalars, multiply_add, before) -> tuple:
        """``(param, residual, rows of the program)``."""
        grad, param, *rest = values
        residual = rest.pop(0) if self.weight.has_residual else None
        prepared = self._by_number(before)
        rest, outside = rest[: len(self.moments)], rest[len(self.moments) :]
        # First: in another order LPMM's kernel takes more registers.
        moments = self._decoded(rest, prepared, multiply_add)
        is_wide = not (is_narrow(grad.dtype) or is_narrow(param.dtype))
        if self.weight.has_scales or not is_wide:
            grad = grad.astype(jnp.float32)
        if self.is_guarded:
            grad = grad * decode_scalar(scalars[KEYS], np.dtype(np.float32))
        join = self._rounding(self.weight, self.weight.master)
        master = join(param, residual, prepared.get(0))
        return param, residual, [grad, master, *moments, *outside]

    def _new(self, outputs: Iterable[int], opened, scalars, multiply_add) -> dict:
        """Some outputs of the program, by number."""
        program = self.program.only(outputs)
        results = program.run(opened[2], scalars[KEYS:], multiply_add)
        return dict(zip(outputs, results, strict=True))

    def _feed(self, new: dict, param, residual, random, multiply_add):
        """Store the weight, and add what that has lost to the moment that takes it."""
        rate, growth, reach = (new[n] for n in self._of_feedback)
        moment = new[self.takes_error]
        how = new[0], random, multiply_add, None, ahead_of(moment, reach)
        stored = self._stored(param, residual, *how)
        error = self._format.error(param, residual, new[0], *stored)
        feed = self._rounding(self.weight, fed)
        new[self.takes_error] = feed(moment, error, rate, growth)
        return stored

    def _stored(
        self, param, residual, result, random, multiply_add, prepared, ahead=None
    ):
        """The new parameter and residual, see :meth:`.WeightRows.stored`."""

        def store(result, param, residual, random, prepared, ahead):
            how = prepared, random, self.landing, multiply_add, ahead
            return self.weight.stored(param, residual, result, *how)

        def tangent(result, param, *_):
            is_sum = self._format.stores_sum
            return result if is_sum else result + param.astype(result.dtype)

        store = self._rounding(self.weight, store, tangent)
        return store(result, param, residual, random, prepared, ahead)

    def _rounding(
        self,
        rows: WeightRows | MomentRows,
        function: Callable,
        *tangent: Callable,
    ) -> Callable:
        """A function that rounds the values of these rows, with its derivative."""
        has_rule = self.is_differentiable and rows.format and not rows.has_scales
        return straight_through(function, *tangent) if has_rule else function

    def _decoded(self, stored: Sequence, prepared: dict, multiply_add) -> list:
        """All moments in float32, from what is stored."""
        decoded = []
        for n, (moment, x) in enumerate(zip(self.moments, stored, strict=True), 1):
            decode = functools.partial(moment.decoded, multiply_add=multiply_add)
            decoded.append(self._rounding(moment, decode)(x, prepared.get(n)))
        for n, moment in enumerate(self.moments):
            number = moment.relative_to
            if number is not None:
                second = self.moments[number - 1]
                given = stored[number - 1], prepared.get(number), multiply_add
                decoded[n] = product_by(decoded[n], second.radicand(*given))
        return decoded


def _quotient(rows: WeightRows | MomentRows, new: Mapping, n: int) -> jax.Array:
    """New output n, or its quotient by the root of the one it is relative to."""
    second = rows.relative_to
    return new[n] if second is None else quotient(new[n], new[second])


def _read_only(array: jax.Array, shape: tuple[int, ...]) -> Operand:
    """An operand of a leaf's shape, or with one element along some axes."""
    lengths = enumerate(zip(array.shape, shape, strict=True))
    return Operand(array, repeated=tuple(axis for axis, (n, m) in lengths if n != m))
