"""What a fused kernel computes for one leaf, on rows of its arrays.

grad, param, residual, moments --> join, decode, program, split, encode
schedule, count, global norm ----> scalars -------^
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._jaxprs import scalar_words
from lowbit_optax._jaxprs.leaf_program import Program, Ref
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import Draws, RandomBits, moment_draws
from lowbit_optax._numerics.relative import quotient
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step.error_feedback import fed
from lowbit_optax._step.moment_coder import MomentCoder, MomentHow
from lowbit_optax.formats.base import (
    BlockMomentFormat,
    WeightFormat,
    residual_bits_read,
)
from lowbit_optax.formats.quantized_weights import QuantizedFields

KEYS = 2
"""How many random keys a leaf's row of the table of scalars begins with."""


def has_scales(how: MomentHow) -> bool:
    """Whether a moment is stored with a scale per block."""
    return how is not None and isinstance(how[0], BlockMomentFormat)


@dataclasses.dataclass(frozen=True)
class LeafBody:
    """The update of one leaf, on rows of its arrays.

    It is static and hashable, so that equal leaves share one kernel. If moments have
    scales, it is a :class:`pallas_kernels.BlockBody`.

    Args:
      program: from (gradient, master, moments) to (result, moments), in float32. The
        result is the updated master. It is the update instead if the weight format adds
        updates by itself, or if a float32 leaf's update is asked for.
      format: the leaf's weight format, on unpacked residuals; None for a float32 leaf.
      quantized: the functions of its fields, if the leaf is a QuantizedTensor.
      has_residual: whether a residual follows the parameter among the operands.
      moments: per moment, its format and number; None for a moment stored uncoded.
      landing: how the new parameter takes the old one's place.
      is_guarded: whether the first scalar after the keys is the factor of a guard, by
        which the gradients are multiplied.
      when: column of the scalar that tells whether the step happens; None if it does.
      still: for the weight and for each moment, the truth value that tells whether this
        step leaves it as it is stored; None where no condition does. Empty if none are
        left alone, or all together: then ``when`` tells.
      references: for each moment, the index of that by whose root it is divided; None
        where it is not. Empty if none is.
      factors: for each moment, the constant by which the program expects it to be
        multiplied, which costs nothing in its unit; None for none. Empty if none is.
      takes_error: the index of the moment that takes what storing the weight has lost.
        The program's result is then the update, and its last outputs are ``rate`` and
        ``growth`` of :class:`lowbit_optax._step.error_feedback.Feedback`.
    """

    program: Program
    format: WeightFormat | None
    quantized: QuantizedFields | None
    has_residual: bool
    moments: tuple[MomentHow, ...]
    landing: Landing
    is_guarded: bool = False
    when: int | None = None
    still: tuple[Ref | None, ...] = ()
    references: tuple[int | None, ...] = ()
    factors: tuple[float | None, ...] = ()
    takes_error: int | None = None

    def with_factors(self) -> "LeafBody":
        """The same, with constant factors of moments moved into their units."""
        program = self.program
        factors: list[float | None] = [None] * len(self.moments)
        first = program.inputs - len(self.moments)
        for i in self.scaled:
            is_alone = i not in self.relative and i not in self.relative.values()
            if is_alone and self.moment_format(i).codec.is_linear_in_units:
                found = program.without_factor(first + i)
                if found is not None:
                    program, factors[i] = found
        return dataclasses.replace(self, program=program, factors=tuple(factors))

    @property
    def scaled(self) -> list[int]:
        """The indices of the moments that have a scale per block.

        Those that are relative to others come last.
        """
        scaled = [i for i, how in enumerate(self.moments) if has_scales(how)]
        return sorted(scaled, key=lambda i: i in self.relative)

    @property
    def relative(self) -> dict[int, int]:
        """By the indices of the moments that are relative to others, these."""
        return {i: j for i, j in enumerate(self.references) if j is not None}

    @property
    def packed(self) -> list[int]:
        """The widths of the leaf's packed fields."""
        of_weight = [] if self.quantized is None else [self.quantized.bits]
        if self.format is not None and self.format.width:
            of_weight.append(self.format.width)
        return of_weight + [self.moment_format(i).bits for i in self.scaled]

    @property
    def block_sizes(self) -> list[int]:
        """The block sizes of the scales: the weight's, if it has one, and moments'."""
        of_weight = [] if self.quantized is None else [self.quantized.block_size]
        return of_weight + [self.moment_format(i).block_size for i in self.scaled]

    @property
    def rounds(self) -> list[list[int]]:
        """Of every maximum, the block size. A second round has relative moments'."""
        first = [] if self.quantized is None else [self.quantized.block_size]
        second = []
        for i in self.scaled:
            format_ = self.moment_format(i)
            sizes = second if i in self.relative else first
            sizes += [format_.block_size] * format_.codec.maxima
        return [sizes for sizes in (first, second) if sizes]

    @property
    def kept(self) -> int:
        """How many numbers of an element wait for the maxima over its block.

        A moment that is relative to another waits twice: for both maxima.
        """
        has_weight = self.quantized is not None or self.takes_error is not None
        return len(self.scaled) + len(self.relative) + has_weight

    def before(self, block_values):
        """The stored scales, prepared for decoding."""
        of_weight, of_moments = self._split(block_values)
        codecs = (self.moment_format(i).codec for i in self.scaled)
        return tuple(
            [fields.prepare(scale) for fields, scale in of_weight]
            + [
                codec.prepare(to_float32(scale))
                for codec, scale in zip(codecs, of_moments, strict=False)
            ]
        )

    def statistics(self, number, values, scalars, index, multiply_add, before, after):
        """The arrays whose maxima per block determine the new scales of a round."""
        if number == len(self.rounds) - 1 and self.relative:
            return self._quotients(values, scalars, index, multiply_add, before, after)
        of_weight = [] if self.quantized is None else [0]
        of_moments = [i for i in self.scaled if i not in self.relative]
        random = RandomBits(scalars[0], scalars[1], index)
        outputs = self._new(
            of_weight, of_moments, values, scalars, random, multiply_add, before
        )
        weights, moments = self._split(outputs)
        return [fields.magnitude_key(weight) for fields, weight in weights] + [
            key
            for i, moment in zip(of_moments, moments, strict=True)
            for key in self.moment_format(i).codec.keys(moment)
        ]

    def _quotients(self, values, scalars, index, multiply_add, before, after):
        """The arrays of the moments that are relative to others."""
        of_moments = [i for i in self.scaled if i in self.relative]
        seconds = sorted({self.relative[i] for i in of_moments})
        numbers = [*of_moments, *seconds]
        random = RandomBits(scalars[0], scalars[1], index)
        moments = self._new([], numbers, values, scalars, random, multiply_add, before)
        moments = dict(zip(numbers, moments, strict=True))
        encoding = self._encoding(values[1], random, after, multiply_add)
        stored = {
            i: encoding.decoded(i, encoding.encoded(i, moments[i])) for i in seconds
        }
        return [
            key
            for i in of_moments
            for key in self.moment_format(i).codec.keys(
                quotient(moments[i], stored[self.relative[i]])
            )
        ]

    def _new(
        self, of_weight, of_moments, values, scalars, random, multiply_add, before
    ) -> list[jax.Array]:
        """The program's results of these numbers, and new moments of those numbers."""
        of_error = [0, -2, -1] if self.takes_error in of_moments else []
        program = self.program.only(
            [*of_weight, *(i + 1 for i in of_moments), *of_error]
        )
        param, residual, outputs = self._run(
            program, values, scalars, multiply_add, before
        )
        if not of_error:
            return outputs
        *outputs, update, rate, growth = outputs
        number = len(of_weight) + of_moments.index(self.takes_error)
        stored = self._advance(param, residual, update, random)
        error = self._error(param, residual, update, *stored)
        outputs[number] = fed(outputs[number], error, rate, growth)
        return outputs

    def _advance(self, param, residual, update, random) -> tuple:
        """The new parameter and residual."""
        format_ = typing.cast(WeightFormat, self.format)
        return format_.advance(param, residual, update, random, self.landing)[:2]

    def _error(self, param, residual, update, new, new_residual) -> jax.Array:
        format_ = typing.cast(WeightFormat, self.format)
        return format_.error(param, residual, update, new, new_residual)

    def after(self, maxima, block_values, scalars):
        """``(new scales, the same prepared for encoding)``."""
        (of_weight, keys), (old, _) = self._split(maxima), self._split(block_values)
        scales = [
            fields.scale_of(key, scale)
            for (fields, key), (_, scale) in zip(of_weight, old, strict=True)
        ]
        keys = list(keys)
        for i in self.scaled:
            codec = self.moment_format(i).codec
            own, keys = keys[: codec.maxima], keys[codec.maxima :]
            if own:  # those of relative moments come in the second round
                scales.append(codec.scale_of_keys(own))
        of_weight = [] if self.quantized is None else [0]
        numbers = of_weight + [i + 1 for i in self.scaled]
        scales = [
            self._unless_still(number, new, old, scalars)
            for number, new, old in zip(numbers, scales, block_values, strict=False)
        ]
        return scales, self.before(scales)

    def __call__(self, values, scalars, index, multiply_add, before=(), after=()):
        """The new parameter, residual and moments."""
        param, old_residual, (result, *moments) = self._run(
            self.program, values, scalars, multiply_add, before
        )
        residual, update = old_residual, result
        random = RandomBits(scalars[0], scalars[1], index)
        of_weight, _ = self._split(after)
        if of_weight:
            ((fields, prepared),) = of_weight
            new = fields.encode(result, prepared, random)
        elif self.format is None:
            new = result
        elif self.format.stores_sum:
            new, residual, _ = self.format.store(param, result, random, self.landing)
        else:
            new, residual = self._advance(param, residual, result, random)
        if self.takes_error is not None:
            *moments, rate, growth = moments
            error = self._error(param, old_residual, update, new, residual)
            taker = self.takes_error
            moments[taker] = fed(moments[taker], error, rate, growth)
        stored = self._encoding(param, random, after, multiply_add).all_of(moments)
        unchanged = param
        if not of_weight and self.format is None and not self.landing.is_direct:
            unchanged = jnp.full(new.shape, -0.0, new.dtype)  # it is the update
        new = self._unless_still(0, new, unchanged, scalars)
        residual = self._unless_still(0, residual, old_residual, scalars)
        old = values[len(values) - len(stored) :]
        stored = [
            self._unless_still(number, *pair, scalars)
            for number, pair in enumerate(zip(stored, old, strict=True), start=1)
        ]
        return [new, *([residual] if self.has_residual else []), *stored]

    def _unless_still(self, number: int, new, old, scalars):
        """What is new of the weight (number 0) or a moment, unless it stays."""
        ref = self.still[number] if self.still else None
        if ref is None or new is None:
            return new
        is_still = self._scalar(ref, scalars)
        return jnp.where(jnp.broadcast_to(is_still, new.shape), old, new)

    @staticmethod
    def _scalar(ref: Ref, scalars):
        """A scalar of the table, or a constant."""
        dtype = np.dtype(ref.dtype)
        if ref.kind == "constant":
            return jnp.asarray(np.frombuffer(ref.value, dtype)[0])
        return scalar_words.decode_scalar(scalars[KEYS + ref.number], dtype)

    def _split(self, per_scale) -> tuple[list, Sequence]:
        """What there is for each scale: ``[(fields, the weight's)]``, the moments'.

        The list is empty if the leaf is not a QuantizedTensor.
        """
        if self.quantized is None:
            return [], per_scale
        return [(self.quantized, per_scale[0])], per_scale[1:]

    def _encoding(self, param, random: RandomBits, after, multiply_add) -> MomentCoder:
        """How the new moments are stored, as far as their scales are known.

        Args:
          after: of the weight and the first of ``scaled``, from :meth:`after`.
        """
        draws = moment_draws(random, residual_bits_read(self.format, param))
        return self._coder(after, multiply_add, draws)

    def _coder(self, prepared, multiply_add, draws: Draws | None = None) -> MomentCoder:
        of_weight = 0 if self.quantized is None else 1
        prepared = dict(zip(self.scaled, prepared[of_weight:], strict=False))
        return MomentCoder(self.moments, self.relative, prepared, multiply_add, draws)

    def _run(self, program: Program, values, scalars, multiply_add, before):
        """Decode the operands and run a program.

        Returns:
          ``(param, residual, the program's outputs)``.
        """
        grad, param, *rest = values
        residual = rest.pop(0) if self.has_residual else None
        coder = self._coder(before, multiply_add)
        for i, factor in enumerate(self.factors):
            if factor is not None:
                coder = coder.times(i, factor)
        moments = coder.moments_of(rest)
        of_weight, _ = self._split(before)
        if of_weight or is_narrow(grad.dtype) or is_narrow(param.dtype):
            grad = grad.astype(jnp.float32)
        if self.is_guarded:
            factor = scalar_words.decode_scalar(scalars[KEYS], np.dtype(np.float32))
            grad = grad * factor
        if of_weight:
            ((fields, of_block),) = of_weight
            master = fields.decode(param, of_block)
        else:
            master = self.format.inner_weight(param, residual) if self.format else param
        outputs = program.run(
            [grad, master, *moments],
            lambda ref: self._scalar(ref, scalars),
            multiply_add,
        )
        return param, residual, outputs

    def moment_format(self, number: int) -> BlockMomentFormat:
        """The format of a moment that has a scale per block.

        Raises:
          TypeError: if the moment has none.
        """
        how = self.moments[number]
        if how is None or not isinstance(how[0], BlockMomentFormat):
            raise TypeError(f"moment {number} has no scales")
        return how[0]
