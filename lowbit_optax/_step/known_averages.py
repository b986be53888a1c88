"""What is known of the fields of optax's states: which are running averages, and so can
be stored in few bits, and which are weights from which a distance is measured.

Every step changes a running average a little, so the rounding noise of few bits
averages out in it. It does not average out in other arrays of a parameter's shape:
weights (``z`` of schedule-free, the initial weights of ``prodigy``, ``dog`` and
``dowg``), sums that only grow (Adagrad), maxima (AMSGrad), the last gradient (Adan),
and the two averages of centered RMSProp, which takes the root of a difference of them.

Nor does it in averages that are slow by design: ``m`` of simplified AdEMAMix, and
``m2`` of AdEMAMix. Of n steps, the noise is root(n / 2) times that of one rounding,
which is 2 or 3 percent with 8 bits.
"""

# By name, because optax does not export all of these classes.
_FIELDS = {
    "DAdaptAdamWState": ("exp_avg", "exp_avg_sq"),
    "EmaState": ("ema",),
    "MomoAdamState": ("exp_avg", "exp_avg_sq"),
    "MomoState": ("exp_avg",),
    "MuonState": ("mu",),
    "ProdigyState": ("exp_avg", "exp_avg_sq"),
    "ScaleByAdaDeltaState": ("e_g", "e_x"),
    "ScaleByAdamState": ("mu", "nu"),
    "ScaleByAdanState": ("m", "v", "n"),
    "ScaleByAdemamixState": ("m1", "nu"),
    "ScaleByAmsgradState": ("mu", "nu"),
    "ScaleByBeliefState": ("mu", "nu"),
    "ScaleByLionState": ("mu",),
    "ScaleByNovogradState": ("mu",),
    "ScaleByRmsState": ("nu",),
    "ScaleByRmsWithCountState": ("nu",),
    "ScaleBySimplifiedAdEMAMixState": ("n",),
    "ScaleByYogiState": ("mu", "nu"),
    # Its second moment estimates a Hessian, which may be negative.
    "SophiaState": ("mu",),
    "TraceState": ("trace",),
}


# Which second moments bound which averages: |mu| <= C sqrt(nu). That takes weights of
# the same gradients that fall no faster in nu than their squares fall in mu, as Adam's
# 0.999^k and 0.81^k. AdaBelief's nu is of other numbers than its mu, Novograd's of
# layers, and AdEMAMix' slow average falls more slowly than its nu.
_BOUNDS = {
    "MomoAdamState": {"exp_avg": "exp_avg_sq"},
    "ProdigyState": {"exp_avg": "exp_avg_sq"},
    "ScaleByAdamState": {"mu": "nu"},
    "ScaleByAdemamixState": {"m1": "nu"},
    "ScaleByAmsgradState": {"mu": "nu"},
    "ScaleByYogiState": {"mu": "nu"},
}


# Weights that training started from, of optimizers that learn their step size from how
# far it has come. The first steps are so short that rounding looks far beside them.
# COCOB and MADGRAD keep their start too, but count on it only.
_STARTS = {
    "DoGState": "init_params",
    "DoWGState": "init_params",
    "MechanicState": "x0",
    "ProdigyState": "params0",
}


def start_of(state_class: type) -> str | None:
    """The field of weights from which an optimizer measures how far it has come.

    >>> import optax
    >>> start_of(optax.contrib.ProdigyState), start_of(optax.ScaleByAdamState)
    ('params0', None)
    """
    return _STARTS.get(state_class.__name__) if _is_optaxs(state_class) else None


def bound_of(state_class: type | None, field: str) -> str | None:
    """The field of second moments whose roots bound the averages in a field, or None.

    >>> import optax
    >>> bound_of(optax.ScaleByAdamState, "mu")
    'nu'
    >>> bound_of(optax.ScaleByBeliefState, "mu")
    """
    if not is_running_average(state_class, field):
        return None
    name = "" if state_class is None else state_class.__name__
    return _BOUNDS.get(name, {}).get(field)


def is_running_average(state_class: type | None, field: str) -> bool:
    """Whether a field of a state of this class is known to be a running average.

    >>> import optax
    >>> is_running_average(optax.ScaleByAdamState, "mu")
    True
    >>> is_running_average(optax.contrib.ScheduleFreeState, "z")
    False
    """
    if state_class is None or not _is_optaxs(state_class):
        return False
    return field in _FIELDS.get(state_class.__name__, ())


def _is_optaxs(state_class: type) -> bool:
    return state_class.__module__.split(".")[0] == "optax"
