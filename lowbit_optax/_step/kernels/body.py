"""What a fused kernel computes for one leaf, on rows of its arrays.

grad, param, residual, moments --> join, decode, program, split, encode
schedule, count, global norm ----> scalars -------^
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._jaxprs.leaf_program import Program, Ref, decode_scalar, scalar_value
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import Draws, RandomBits, moment_draws
from lowbit_optax._numerics.relative import product, quotient
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step.error_feedback import fed
from lowbit_optax._step.kernels.rows import MomentRows, WeightRows
from lowbit_optax._step.leaf import StoredLeaf
from lowbit_optax.formats.base import WeightFormat, residual_bits_read
from lowbit_optax.formats.quantized_weights import QuantizedFields, result_of
from pallas_kernels.fused_update import Leaf, Operand, Result

KEYS = 2
"""How many random keys a leaf's row of the table of scalars begins with."""


@dataclasses.dataclass(frozen=True)
class LeafBody:
    """The update of one leaf, on rows of its arrays.

    It is static and hashable, so that equal leaves share one kernel. If moments have
    scales, it is a :class:`pallas_kernels.BlockBody`. Values per block are the weight's
    first, if it is a QuantizedTensor, and then those of the moments in :attr:`scaled`.

    Args:
      program: from (gradient, master, moments) to (result, moments), in float32. The
        result is the updated master. It is the update instead if the weight format adds
        updates by itself, or if a float32 leaf's update is asked for.
      weight, moments: how they are stored.
      landing: how the new parameter takes the old one's place.
      is_guarded: whether the first scalar after the keys is the factor of a guard, by
        which the gradients are multiplied.
      when: column of the scalar that tells whether the step happens; None if it does.
      unchanged_if: the truth value that tells whether this step leaves the weight as it
        is stored; None where no condition does.
      takes_error: the index of the moment that takes what storing the weight has lost.
        The program's result is then the update, and its last outputs are ``rate`` and
        ``growth`` of :class:`lowbit_optax._step.error_feedback.Feedback`.
    """

    program: Program
    weight: WeightRows
    moments: tuple[MomentRows, ...]
    landing: Landing
    is_guarded: bool = False
    when: int | None = None
    unchanged_if: Ref | None = None
    takes_error: int | None = None

    def with_factors(self) -> "LeafBody":
        """The same, with constant factors of moments moved into their units."""
        program, moments = self.program, list(self.moments)
        first = program.inputs - len(moments)
        related = {x.relative_to for x in moments}
        for i in self.scaled:
            is_alone = moments[i].relative_to is None and i not in related
            if is_alone and moments[i].codec.is_linear_in_units:
                found = program.without_factor(first + i)
                if found is not None:
                    program, factor = found
                    moments[i] = dataclasses.replace(moments[i], factor=factor)
        return dataclasses.replace(self, program=program, moments=tuple(moments))

    @property
    def scaled(self) -> list[int]:
        """The moments that have a scale per block, those relative to others last."""
        scaled = [i for i, x in enumerate(self.moments) if x.has_scales]
        return sorted(scaled, key=self._relative)

    def _relative(self, i: int) -> bool:
        return self.moments[i].relative_to is not None

    def arrays(self, leaf: StoredLeaf, parts: Sequence) -> Leaf:
        """What a kernel reads and writes.

        Args:
          leaf: whose body it is.
          parts: its moments as they are stored.
        """
        quantized, param = self.weight.quantized, leaf.param
        operands = [Operand(leaf.grad)]
        if quantized is None:
            operands.append(Operand(param))
        else:
            operands.append(Operand(param.codes, param.bits))
        if self.weight.has_residual:
            operands.append(Operand(leaf.residual, self._format.width or None))
        for moment, part in zip(self.moments, parts, strict=True):
            if moment.has_scales:
                operands.append(Operand(part.codes, moment.blocks.bits))
            else:
                operands.append(Operand(part))
        of_param = {1}
        if quantized is not None:
            of_param.add(len(operands))
            operands.append(Operand(param.scales, block_size=param.block_size))
        for i in self.scaled:
            size = self.moments[i].blocks.block_size
            operands.append(Operand(parts[i].scales, block_size=size))
        # Every operand but the gradient has a result that overwrites it. If updates are
        # returned, the old parameter is still needed, and its result is a new array.
        kept = frozenset() if self.landing.is_direct else of_param
        results = [
            Result(x.array.dtype, x.bits, None if n in kept else n, x.block_size)
            for n, x in enumerate(operands)
            if n > 0
        ]
        return Leaf(tuple(operands), tuple(results), param.shape)

    def stored(self, leaf: StoredLeaf, arrays: Sequence) -> tuple:
        """``(result, residual, moments)`` as they are stored, from a kernel's results.

        Args:
          leaf: whose body it is.
          arrays: the results of :meth:`arrays`, in their order.
        """
        written = iter(arrays)
        new = next(written)
        residual = next(written) if self.weight.has_residual else None
        moments = [next(written) for _ in self.moments]
        if self.weight.quantized is not None:
            new = dataclasses.replace(leaf.param, codes_v2=new, scales_v2=next(written))
            new = result_of(leaf.param, new, self.landing)
        elif not self.weight.passes_through:
            new = self.landing.result(leaf.param, new)
        for i in self.scaled:
            moments[i] = self.moments[i].blocks.container(moments[i], next(written))
        return new, residual, moments

    @property
    def rounds(self) -> list[list[int]]:
        """The block sizes of the maxima. A second round has relative moments'."""
        first = (
            [] if self.weight.quantized is None else [self.weight.quantized.block_size]
        )
        second = []
        for i in self.scaled:
            moment = self.moments[i]
            sizes = second if self._relative(i) else first
            sizes += [moment.blocks.block_size] * moment.codec.maxima
        return [sizes for sizes in (first, second) if sizes]

    @property
    def kept(self) -> int:
        """How many numbers per element wait for the maxima over their block.

        A moment that is relative to another waits twice: for both maxima.
        """
        has_weight = self.weight.quantized is not None or self.takes_error is not None
        return len(self.scaled) + sum(map(self._relative, self.scaled)) + has_weight

    def before(self, block_values):
        """The stored scales, prepared for decoding."""
        prepared = []
        for owner, scale in zip(self._owners, block_values, strict=False):
            if owner is None:
                prepared.append(self._quantized.prepare(scale))
            else:
                prepared.append(self.moments[owner].codec.prepare(to_float32(scale)))
        return tuple(prepared)

    def statistics(self, number, values, scalars, index, multiply_add, before, after):
        """The arrays whose maxima per block determine the new scales of a round."""
        has_relative = any(map(self._relative, self.scaled))
        is_second = has_relative and number == len(self.rounds) - 1
        own = [i for i in self.scaled if self._relative(i) == is_second]
        seconds = {i: self.moments[i].relative_to for i in own}
        seconds = {i: j for i, j in seconds.items() if j is not None}
        param, weight, moments, random = self._new(
            not is_second and self.weight.quantized is not None,
            sorted({*own, *seconds.values()}),
            values,
            scalars,
            index,
            multiply_add,
            before,
        )
        keys = [self._quantized.magnitude_key(x) for x in weight]
        prepared, draws = self._by_owner(after), self._draws(param, random)
        of_seconds = {j: moments[j] for j in seconds.values()}
        stored = self._encoded(of_seconds, prepared, draws, multiply_add)
        for i in own:
            moment = moments[i]
            if i in seconds:
                j = seconds[i]
                root = self.moments[j].decoded(stored[j], prepared.get(j), multiply_add)
                moment = quotient(moment, root)
            keys += self.moments[i].codec.keys(moment)
        return keys

    def after(self, maxima, block_values, scalars):
        """``(new scales, the same prepared for encoding)``."""
        keys, scales = list(maxima), []
        for owner, old in zip(self._owners, block_values, strict=True):
            if owner is None:
                new = self._quantized.scale_of(keys.pop(0), old)
            else:
                codec = self.moments[owner].codec
                own, keys = keys[: codec.maxima], keys[codec.maxima :]
                if not own:  # that of a relative moment comes in the second round
                    break
                new = codec.scale_of_keys(own)
            scales.append(self._unless_unchanged(owner, new, old, scalars))
        return scales, self.before(scales)

    def __call__(self, values, scalars, index, multiply_add, before=(), after=()):
        """The new parameter, residual and moments."""
        param, residual, (result, *moments) = self._run(
            self.program, values, scalars, multiply_add, before
        )
        random, prepared = (
            RandomBits(scalars[0], scalars[1], index),
            self._by_owner(after),
        )
        new, new_residual = self.weight.stored(
            param, residual, result, prepared.get(None), random, self.landing
        )
        if self.takes_error is not None:
            *moments, rate, growth = moments
            error = self._format.error(param, residual, result, new, new_residual)
            taker = self.takes_error
            moments[taker] = fed(moments[taker], error, rate, growth)
        stored = self._encoded(
            dict(enumerate(moments)), prepared, self._draws(param, random), multiply_add
        )
        unchanged = param
        if self.weight.passes_through and not self.landing.is_direct:
            unchanged = jnp.full(new.shape, -0.0, new.dtype)  # it is the update
        results: list = [self._unless_unchanged(None, new, unchanged, scalars)]
        if self.weight.has_residual:
            results.append(
                self._unless_unchanged(None, new_residual, residual, scalars)
            )
        old = values[len(values) - len(stored) :]
        return results + [
            self._unless_unchanged(i, stored[i], old[i], scalars)
            for i in range(len(stored))
        ]

    @property
    def _format(self) -> WeightFormat:
        return typing.cast(WeightFormat, self.weight.format)

    @property
    def _quantized(self) -> QuantizedFields:
        return typing.cast(QuantizedFields, self.weight.quantized)

    @property
    def _owners(self) -> list[int | None]:
        """What the values per block belong to: None for the weight, and moments."""
        return [*([] if self.weight.quantized is None else [None]), *self.scaled]

    def _by_owner(self, per_scale: Sequence) -> dict:
        """Values per block by what they belong to, as far as they are known."""
        return dict(zip(self._owners, per_scale, strict=False))

    def _new(
        self, with_weight: bool, wanted, values, scalars, index, multiply_add, before
    ):
        """New moments in float32, before they are stored.

        Args:
          with_weight: whether the weight is wanted as well.
          wanted: which moments.

        Returns:
          ``(param, the weight if it is wanted, moments by number, random bits)``.
        """
        takes_error = self.takes_error in wanted
        outputs = [*([0] if with_weight else []), *(i + 1 for i in wanted)]
        program = self.program.only(outputs + ([0, -2, -1] if takes_error else []))
        param, residual, results = self._run(
            program, values, scalars, multiply_add, before
        )
        count = len(outputs) - len(wanted)
        weight, moments = (
            results[:count],
            dict(zip(wanted, results[count:], strict=False)),
        )
        random = RandomBits(scalars[0], scalars[1], index)
        if takes_error:
            update, rate, growth = results[len(outputs) :]
            stored = self.weight.stored(
                param, residual, update, None, random, self.landing
            )
            error = self._format.error(param, residual, update, *stored)
            taker = self.takes_error
            moments[taker] = fed(moments[taker], error, rate, growth)
        return param, weight, moments, random

    def _run(self, program: Program, values, scalars, multiply_add, before):
        """Decode the operands and run a program.

        Returns:
          ``(param, residual, the program's outputs)``.
        """
        grad, param, *rest = values
        residual = rest.pop(0) if self.weight.has_residual else None
        prepared = self._by_owner(before)
        is_wide = not (is_narrow(grad.dtype) or is_narrow(param.dtype))
        if self.weight.quantized is not None or not is_wide:
            grad = grad.astype(jnp.float32)
        if self.is_guarded:
            grad = grad * decode_scalar(scalars[KEYS], np.dtype(np.float32))
        master = self.weight.master(param, residual, prepared.get(None))
        moments = self._decoded(rest, prepared, multiply_add)
        rows = [grad, master, *moments]
        return param, residual, program.run(rows, scalars[KEYS:], multiply_add)

    def _decoded(self, stored: Sequence[jax.Array], prepared, multiply_add) -> list:
        """All moments in float32, times their factors, from what is stored."""
        decoded = []
        for i, (moment, x) in enumerate(zip(self.moments, stored, strict=True)):
            own = prepared.get(i)
            if moment.factor is not None:
                own = moment.codec.times(own, moment.factor)
            decoded.append(moment.decoded(x, own, multiply_add))
        return [
            x if moment.relative_to is None else product(x, decoded[moment.relative_to])
            for moment, x in zip(self.moments, decoded, strict=True)
        ]

    def _encoded(
        self, moments: Mapping[int, jax.Array], prepared, draws: Draws, multiply_add
    ) -> dict[int, jax.Array]:
        """What is stored of new moments, by number; those relative to others last."""
        stored: dict[int, jax.Array] = {}
        for i in sorted(moments, key=self._relative):
            moment, second = moments[i], self.moments[i].relative_to
            if second is not None:
                root = self.moments[second].decoded(
                    stored[second], prepared.get(second), multiply_add
                )
                moment = quotient(moment, root)
            stored[i] = self.moments[i].encoded(
                moment, prepared.get(i), draws, multiply_add
            )
        return stored

    def _draws(self, param: jax.Array, random: RandomBits) -> Draws:
        return moment_draws(random, residual_bits_read(self.weight.format, param))

    def _unless_unchanged(self, owner: int | None, new, old, scalars):
        """What is new of the weight (None) or a moment, unless a condition keeps it."""
        ref = self.unchanged_if if owner is None else self.moments[owner].unchanged_if
        if ref is None or new is None:
            return new
        is_unchanged = scalar_value(ref, scalars[KEYS:])
        return jnp.where(jnp.broadcast_to(is_unchanged, new.shape), old, new)
