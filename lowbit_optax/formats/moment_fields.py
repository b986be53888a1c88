"""A table of the moments in optimizer states.

Each step changes a running average only a little, so its low-bit rounding noise
averages out. It does not average out in other arrays with the shape of a parameter:
weights (``z`` of schedule-free, the initial weights of ``prodigy``, ``dog`` and
``dowg``), sums that only grow (Adagrad), maxima (AMSGrad), the last gradient (Adan),
and the two averages of centered RMSProp, which uses the root of their difference.

It does not average out in averages that are slow by design either: ``m`` of simplified
AdEMAMix, and ``m2`` of AdEMAMix. After n steps, their noise is root(n / 2) times the
noise of a single rounding, which is 2 or 3 percent with 8 bits.
"""

import dataclasses
import math
from collections.abc import Iterable

from lowbit_optax.formats.base import MomentFormat


@dataclasses.dataclass(frozen=True)
class MomentFields:
    """The moments among the fields of one class of states.

    Args:
      averages: fields that are running averages, which low-bit formats can store.
      second_moments: fields that are never negative and whose root divides the update.
      orthogonalized: averages of matrices whose updates have the same size in all
        directions. Noise in weak directions matters, so the codes have equal steps.
      normalized: averages of gradients that the root of a second moment has divided.
        The root divides all other averages.
      start: the field of the initial weights, for optimizers that learn their step size
        from the distance to them. Their first steps are so short that rounding errors
        look like a large distance.
    """

    averages: tuple[str, ...] = ()
    second_moments: tuple[str, ...] = ()
    orthogonalized: tuple[str, ...] = ()
    normalized: tuple[str, ...] = ()
    start: str | None = None

    def is_second_moment(self, field: str) -> bool | None:
        """Return whether a field is never negative, or None if this is unknown."""
        if field in self.second_moments:
            return True
        if field in {*self.averages, *self.normalized, *_FIRST_MOMENTS}:
            return False
        return True if self is _UNKNOWN and field in _SECOND_MOMENTS else None

    def divides(self, second: str, first: str) -> bool:
        """Return whether the root of one field divides another one in the update."""
        is_first = self.is_second_moment(first) is False
        is_divided = is_first and first not in self.normalized
        return is_divided and bool(self.is_second_moment(second))


# If a state is not in the table, these names have the same meaning as in optax.
_FIRST_MOMENTS = frozenset({"mu", "m", "m1", "m2", "trace", "exp_avg", "g"})
_SECOND_MOMENTS = frozenset(
    {"nu", "nu_max", "v", "n", "sum_of_squares", "e_g", "e_x", "exp_avg_sq"}
)

_UNKNOWN = MomentFields()
_ADAM = MomentFields(("mu", "nu"), ("nu",))
_EXP_AVG = ("exp_avg", "exp_avg_sq")

# The keys are names, because optax does not export all of these classes. COCOB and
# MADGRAD also store their initial weights, but only add to them.
_OPTAX = {
    "DAdaptAdamWState": MomentFields(_EXP_AVG, ("exp_avg_sq",)),
    "DoGState": MomentFields(start="init_params"),
    "DoWGState": MomentFields(start="init_params"),
    "EmaState": MomentFields(("ema",)),
    "MechanicState": MomentFields(start="x0"),
    "MomoAdamState": MomentFields(_EXP_AVG, ("exp_avg_sq",)),
    "MomoState": MomentFields(("exp_avg",)),
    "MuonState": MomentFields(("mu",), orthogonalized=("mu",)),
    "ProdigyState": MomentFields(_EXP_AVG, ("exp_avg_sq",), start="params0"),
    "FactoredState": MomentFields(second_moments=("v_row", "v_col", "v")),
    "ScaleByAdaDeltaState": MomentFields(("e_g", "e_x"), ("e_g", "e_x")),
    "ScaleByAdamState": _ADAM,
    "ScaleByAdanState": MomentFields(("m", "v", "n"), ("n",)),
    "ScaleByAdemamixState": MomentFields(("m1", "nu"), ("nu",)),
    "ScaleByAmsgradState": MomentFields(("mu", "nu"), ("nu", "nu_max")),
    "ScaleByBeliefState": MomentFields(("mu", "nu"), ("nu",)),
    "ScaleByLionState": MomentFields(("mu",)),
    "ScaleByNovogradState": MomentFields(("mu",), ("nu",)),
    "ScaleByRmsState": MomentFields(("nu",), ("nu",)),
    "ScaleByRmsWithCountState": MomentFields(("nu",), ("nu",)),
    "ScaleByRssState": MomentFields(second_moments=("sum_of_squares",)),
    "ScaleByRStdDevState": MomentFields(second_moments=("nu",)),
    "ScaleByRStdDevWithCountState": MomentFields(second_moments=("nu",)),
    # Its second moments are the largest squares along each axis.
    "ScaleBySM3State": MomentFields(second_moments=("mu",), normalized=("nu",)),
    "ScaleBySimplifiedAdEMAMixState": MomentFields(("n",), ("n",)),
    "ScaleByYogiState": _ADAM,
    # Its second moment estimates a Hessian, which may be negative.
    "SophiaState": MomentFields(("mu",)),
    "TraceState": MomentFields(("trace",)),
}
_DECLARED: dict[type, MomentFields] = {}


def register_moments(
    state_class: type,
    *,
    averages: Iterable[str] = (),
    second_moments: Iterable[str] = (),
    orthogonalized: Iterable[str] = (),
    normalized: Iterable[str] = (),
) -> None:
    """Declare the moments in the state of a transformation that is not from optax.

    ``lowbit`` then stores them like the moments of optax's states, even if ``moments``
    does not name them: running averages get low-bit formats, and second moments are
    stored without a sign and never as zero.

    Args:
      state_class: the class of the state, a NamedTuple or a dataclass.
      averages: names of fields that are running averages of gradients or of squared
        gradients: trees of float32 arrays with the structure of the parameters.
      second_moments: names of fields that are never negative.
      orthogonalized: names of averages of matrices whose updates have the same size in
        all directions, as in Muon. They get linear codes.
      normalized: names of averages of gradients that are divided by the root of the
        second moment before they are averaged, as in
        :func:`lowbit_optax.scale_by_factored_adam`. Their format may be coarser than
        the format of the second moment. ``init`` raises an error for other averages.

    Raises:
      TypeError: if ``state_class`` is not a class with fields.
      ValueError: if it does not have a field with one of the names.

    >>> import typing
    >>> class MyState(typing.NamedTuple):
    ...     fast: typing.Any
    ...     squares: typing.Any
    >>> register_moments(
    ...     MyState, averages=("fast", "squares"), second_moments=("squares",)
    ... )
    """
    fields = getattr(state_class, "_fields", None)
    if fields is None and dataclasses.is_dataclass(state_class):
        fields = tuple(x.name for x in dataclasses.fields(state_class))
    if not isinstance(state_class, type) or fields is None:
        raise TypeError(
            "register_moments: state_class must be a NamedTuple class or a dataclass, "
            f"such as optax.ScaleByAdamState, got {state_class!r}"
        )
    fields_of_kind = averages, second_moments, orthogonalized, normalized
    averages, second_moments, orthogonalized, normalized = map(tuple, fields_of_kind)
    for name in (*averages, *second_moments, *orthogonalized, *normalized):
        if name not in fields:
            raise ValueError(
                f"register_moments: {state_class.__name__} has no field {name!r}; its "
                f"fields are {', '.join(fields)}"
            )
    declared = MomentFields(averages, second_moments, orthogonalized, normalized)
    _DECLARED[state_class] = declared


def is_coarser(first: MomentFormat | None, second: MomentFormat | None) -> bool:
    """Return whether updates are wrong if the root of one moment divides another.

    The two formats lose values below a share of the largest value. Updates of gradients
    that are up to 1,000 times smaller than their neighbors become too long if the
    first moment loses much larger values than the root of the second moment. Formats
    without scales lose values below a fixed size, which is too large for gradients of
    any size in float8. None stands for float32.

    >>> from lowbit_optax.formats import block_quantized
    >>> four = block_quantized(4)
    >>> mu, nu = four.for_field("mu", False), four.for_field("nu", True)
    >>> is_coarser(mu, nu), is_coarser(mu, None)
    (False, True)
    """
    if first is not None and not first.has_scales:
        return first.smallest_share > 1e-6
    size = lambda format_: getattr(format_, "block_size", 1)
    # In larger blocks, a large value has more neighbors.
    is_larger = size(first) > size(second)
    root = 0.0 if second is None or is_larger else math.sqrt(second.smallest_share)
    return first is not None and first.smallest_share > max(1e-3, 1.5 * root)


def fields_of(state_class: type | None) -> MomentFields:
    """Return the moments among the fields of a class of states.

    >>> import optax
    >>> fields_of(optax.ScaleByAdamState).second_moments
    ('nu',)
    >>> fields_of(optax.contrib.ScheduleFreeState).averages
    ()
    """
    if state_class is None:
        return _UNKNOWN
    if state_class in _DECLARED:
        return _DECLARED[state_class]
    is_optaxs = state_class.__module__.split(".")[0] == "optax"
    return _OPTAX.get(state_class.__name__, _UNKNOWN) if is_optaxs else _UNKNOWN
