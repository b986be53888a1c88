"""State fields get the right format, in optax's states and in user-defined ones."""

import functools
import itertools
import re
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import lowbit_optax
from lowbit_optax import block_quantized, cast
from lowbit_optax._numerics.random_bits import Draws, DrawsToNearest, random_bits
from lowbit_optax._step.moments import decoded, encoded
from lowbit_optax.formats.block_quantized import QuantizedMoment
from lowbit_optax.formats.moment_fields import is_coarser
from lowbit_optax.states.checkpoints import storage_formats

pytestmark = pytest.mark.standard_promotion

ADAM = {"mu": "signed", "nu": "second"}
SIGNED = {"mu": "signed"}
EXP_AVG = {"exp_avg": "signed", "exp_avg_sq": "second"}
SLOW = {"m1": "signed", "m2": "float32", "nu": "second"}
CENTERED = {"mu": "float32", "nu": "float32"}
ADAN = {"m": "signed", "v": "signed", "n": "second", "g": "float32"}
FIELDS = {
    "adabelief": (optax.adabelief(1e-3), SIGNED | {"nu": "second"}),
    "adadelta": (optax.adadelta(1e-3), {"e_g": "second", "e_x": "second"}),
    "adagrad": (optax.adagrad(1e-3), {"sum_of_squares": "float32"}),
    "adamw": (optax.adamw(1e-3), ADAM),
    "adan": (optax.adan(1e-3), ADAN),
    "ademamix": (contrib.ademamix(1e-3), SLOW),
    "amsgrad": (optax.amsgrad(1e-3), ADAM | {"nu_max": "float32"}),
    "dadapt_adamw": (contrib.dadapt_adamw(1.0), EXP_AVG | {"grad_sum": "float32"}),
    "dog": (contrib.dog(1.0), {"init_params": "float32"}),
    "dowg": (contrib.dowg(1.0), {"init_params": "float32"}),
    "lion": (optax.lion(1e-3), SIGNED),
    "momo_adam": (contrib.momo_adam(1e-3), EXP_AVG),
    "muon": (contrib.muon(1e-3), {"mu": "linear"}),
    "novograd": (optax.novograd(1e-3), SIGNED),
    "prodigy": (
        contrib.prodigy(1.0), EXP_AVG | {"params0": "float32", "grad_sum": "float32"}
    ),
    "rmsprop": (optax.rmsprop(1e-3), {"nu": "second"}),
    "rmsprop, centered": (optax.rmsprop(1e-3, centered=True), CENTERED),
    "schedule_free": (
        contrib.schedule_free_adamw(1e-2), {"z": "float32", "nu": "second"}
    ),
    "sgd": (optax.sgd(0.1, momentum=0.9), {"trace": "signed"}),
    "simplified": (
        contrib.simplified_ademamix(1e-3), {"m": "float32", "n": "second"}
    ),
    "yogi": (optax.yogi(1e-3), ADAM),
}  # fmt: skip
FORMATS = {
    None: {
        "signed": "8-bit signed 'companded'",
        "second": "8-bit unsigned 'float'",
        "linear": "8-bit signed 'linear'",
    },
    lowbit_optax.block_quantized(4): {
        "signed": "4-bit signed 'companded'",
        "second": "4-bit unsigned 'sqrt'",
        "linear": "4-bit signed 'linear'",
    },
}
SHAPE = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)


def stored(inner, moments):
    """Describes how each state field stores arrays of the parameter's shape."""
    tx = lowbit_optax.lowbit(inner, moments=moments, weights=lowbit_optax.extra_bits())
    pattern = re.compile(r"float32\[64, 128\](?: in (\d-bit \w+ '\w+').*)?")
    found = {}
    for path, text in storage_formats(tx, SHAPE).items():
        match = pattern.fullmatch(text)
        if match and "inner_state" in path:
            found[path.split(".")[-1]] = match[1] or "float32"
    return found


@pytest.mark.parametrize("name", FIELDS)
def test_known_state_fields_are_stored_in_suitable_formats(name):
    inner, fields = FIELDS[name]
    for moments, formats in FORMATS.items():
        wanted = {field: formats.get(kind, kind) for field, kind in fields.items()}
        assert stored(inner, moments) == wanted


ASKED_FOR = {
    "nu_max": optax.amsgrad(1e-3),
    "sum_of_squares": optax.adagrad(1e-3),
    "nu": optax.rmsprop(1e-3, centered=True),
}


@pytest.mark.parametrize("field", ASKED_FOR)
def test_requested_second_moments_are_stored_without_a_sign(field):
    found = stored(ASKED_FOR[field], {field: lowbit_optax.block_quantized(8)})
    assert found[field] == "8-bit unsigned 'float'"


def test_the_momentum_of_sm3_is_stored_with_a_sign():
    found = stored(optax.sm3(1e-3), {"nu": lowbit_optax.block_quantized(8)})
    assert found["nu"].startswith("8-bit signed")


def custom_momentum():
    """A user-defined transformation whose state has a field with a known name."""

    def init(params):
        return {"mu": jax.tree.map(jnp.zeros_like, params)}

    def update(updates, state, params=None):
        mu = jax.tree.map(lambda m, g: m + g, state["mu"], updates)
        return jax.tree.map(lambda m: -1e-3 * m, mu), {"mu": mu}

    return optax.GradientTransformation(init, update)


def test_other_states_stay_float32_unless_fields_are_named():
    report = lambda inner, moments: lowbit_optax.memory_report(
        lowbit_optax.lowbit(inner, moments=moments), {"w": SHAPE}
    ).leaves[0]
    eight = lowbit_optax.block_quantized(8)
    for moments in (None, eight):
        assert report(custom_momentum(), moments).float32_moments == ("mu",)
    assert report(optax.adagrad(1e-3), {"sum_of_squares": eight}).float32_moments == ()
    by_name = report(optax.adam(1e-3), {"mu": "float32", "nu": eight})
    assert by_name.float32_moments == ("mu",)


def test_a_moment_dtype_together_with_a_format_raises_an_error():
    narrow = optax.adamw(1e-3, mu_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"'mu'.*bfloat16.*mu_dtype"):
        lowbit_optax.lowbit(narrow).init({"w": jnp.ones((64, 64))})
    nu = {"nu": lowbit_optax.block_quantized(8)}
    state = lowbit_optax.lowbit(narrow, moments=nu).init({"w": jnp.ones((64, 64))})
    assert state.inner_state[0].mu["w"].dtype == jnp.bfloat16


PARAMS = {"w": jnp.ones((64, 64), jnp.bfloat16)}


def transformation(state_class):
    """Adam with the field names of ``state_class``."""
    adam = optax.scale_by_adam()

    def update(updates, state, params=None):
        del params
        updates, new = adam.update(updates, optax.ScaleByAdamState(*state))
        return updates, state_class(*new)

    init = lambda params: state_class(*adam.init(params))
    return optax.GradientTransformation(init, update)


def new_class():
    class State(typing.NamedTuple):
        steps: typing.Any
        fast: typing.Any
        squares: typing.Any

    return State


def stepped(state_class, moments=None):
    tx = lowbit_optax.lowbit(transformation(state_class), moments=moments)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    return tx, lowbit_optax.step(tx, PARAMS, tx.init(PARAMS), grads)[1].inner_state


def test_undeclared_moments_stay_float32():
    _, state = stepped(new_class())
    assert state.fast["w"].dtype == state.squares["w"].dtype == jnp.float32


def test_registered_moments_are_stored_as_optaxs_own():
    state_class = new_class()
    lowbit_optax.formats.register_moments(
        state_class, averages=("fast", "squares"), second_moments=("squares",)
    )
    tx, state = stepped(state_class)
    adam = lowbit_optax.lowbit(optax.scale_by_adam())
    formats = storage_formats(tx, PARAMS)
    wanted = storage_formats(adam, PARAMS)
    for field, like in (("fast", "mu"), ("squares", "nu")):
        assert isinstance(getattr(state, field), QuantizedMoment)
        assert (
            formats[f"state.inner_state.{field}['w']"]
            == wanted[f"state.inner_state.{like}['w']"]
        )


def test_storing_an_undeclared_second_moment_with_a_sign_warns():
    moments = {"squares": lowbit_optax.block_quantized(8)}
    with pytest.warns(UserWarning, match="'squares' of State is stored with a sign"):
        stepped(new_class(), moments)
    state_class = new_class()
    lowbit_optax.formats.register_moments(state_class, second_moments=("squares",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx, _ = stepped(state_class, moments)
    formats = storage_formats(tx, PARAMS)
    assert "unsigned" in formats["state.inner_state.squares['w']"]


EIGHT, FOUR, BFLOAT16 = block_quantized(8), block_quantized(4), cast("bfloat16")
ADAMW, ADAN = optax.adamw(1e-3), optax.adan(1e-3)
FACTORED = optax.chain(lowbit_optax.scale_by_factored_adam(), optax.scale(-1e-3))
COARSER = {
    "4 and 8 bits": (ADAMW, {"mu": FOUR, "nu": EIGHT}),
    "4 bits and float32": (ADAMW, {"mu": FOUR}),
    "4 bits and bfloat16": (ADAMW, {"mu": FOUR, "nu": BFLOAT16}),
    "4 bits in larger blocks": (
        ADAMW, {"mu": block_quantized(4, block_size=64), "nu": FOUR}
    ),
    "linear and float": (ADAMW, {"mu": block_quantized(8, code="linear"), "nu": EIGHT}),
    "float8 and bfloat16": (ADAMW, {"mu": cast("float8_e5m2"), "nu": BFLOAT16}),
    "float8 and 4 bits": (ADAMW, {"mu": cast("float8_e4m3fn"), "nu": FOUR}),
    "maxima": (optax.amsgrad(1e-3), FOUR),
    "differences": (ADAN, {"m": EIGHT, "v": FOUR, "n": EIGHT}),
    "of a chain": (optax.chain(optax.trace(0.9), ADAMW), {"mu": FOUR, "nu": EIGHT}),
    "lpmm": (optax.adam(1e-3), {"mu": block_quantized(4, code="dynamic"), "nu": EIGHT}),
}  # fmt: skip


@pytest.mark.parametrize(("inner", "moments"), COARSER.values(), ids=COARSER)
def test_a_first_moment_coarser_than_its_second_raises_an_error(inner, moments):
    tx = lowbit_optax.lowbit(inner, moments=moments)
    message = (
        r"moment '(mu|v)' of params\['w'\].*coarser than '(nu|nu_max|n)'.*factored"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.init, PARAMS)
    jax.eval_shape(
        tx.init, {"small": jnp.ones(8)} if "float8" not in str(moments) else {}
    )


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
@pytest.mark.parametrize("inner", [ADAMW, optax.rmsprop(1e-3), optax.amsgrad(1e-3)])
def test_second_moments_without_small_values_raise_an_error(inner, dtype):
    tx = lowbit_optax.lowbit(inner, moments={"nu": cast(dtype)})
    with pytest.raises(ValueError, match=f"'nu'.*{dtype}.*cast\\('bfloat16'\\)"):
        jax.eval_shape(tx.init, PARAMS)


FINE_ENOUGH = {
    "float8 of normalized gradients": (FACTORED, {"mu": cast("float8_e5m2")}),
    "float8 that is not divided": (optax.lion(1e-3), cast("float8_e5m2")),
    "equal": (ADAMW, FOUR),
    "finer": (ADAMW, {"mu": EIGHT, "nu": FOUR}),
    "8 bits and float32": (ADAMW, {"mu": EIGHT}),
    "bfloat16": (ADAMW, {"mu": BFLOAT16}),
    "float16": (ADAMW, {"mu": cast("float16"), "nu": EIGHT}),
    "large blocks": (ADAMW, {"mu": block_quantized(8, block_size=2048), "nu": EIGHT}),
    "divided gradients": (FACTORED, {"mu": FOUR, "nu": EIGHT}),
    "not divided": (optax.lion(1e-3), FOUR),
    "of other leaves": (contrib.muon(1e-3), {"mu": FOUR}),
}


@pytest.mark.parametrize(("inner", "moments"), FINE_ENOUGH.values(), ids=FINE_ENOUGH)
def test_other_pairs_of_moments_are_accepted(inner, moments):
    jax.eval_shape(lowbit_optax.lowbit(inner, moments=moments).init, PARAMS)


FIRST = [None, BFLOAT16, EIGHT, FOUR, *(
    block_quantized(bits, code=code)
    for bits, code in ((8, "linear"), (8, "dynamic"), (4, "dynamic"))
)]  # fmt: skip
SECOND = [None, BFLOAT16, EIGHT, FOUR, block_quantized(8, code="companded")]


@functools.partial(jax.jit, static_argnums=(0, 1))
def averages(format_, decay, inputs):
    """The running averages in each step if they are stored in a format."""

    def step(stored, now):
        number, x = now
        (random,) = random_bits(jnp.uint32(7), number, [1])
        new = decay * decoded(stored, format_, x.shape) + (1 - decay) * x
        return encoded(new, format_, Draws(random)), new

    zeros = encoded(jnp.zeros_like(inputs[0]), format_, DrawsToNearest())
    numbers = jnp.arange(len(inputs), dtype=jnp.uint32)
    return jax.lax.scan(step, zeros, (numbers, inputs))[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("large", [30, 1000])
def test_coarser_first_moments_make_updates_too_long_and_others_do_not(large):
    rows = np.arange(32)[:, None] % 8 == 3
    draws = np.random.default_rng(0).standard_normal((200, 32, 32), np.float32)
    grads = jnp.asarray(np.where(rows, large * draws, draws))
    named = lambda x, *field: x and x.for_field(*field)
    firsts = [named(x, "mu", False) for x in FIRST]
    seconds = [named(x, "nu", True) for x in SECOND]
    mu = [averages(x, 0.9, grads) for x in firsts]
    nu = [averages(x, 0.999, grads**2) for x in seconds]
    size = lambda mu, nu: jnp.linalg.norm((mu / jnp.sqrt(nu))[50:, ~rows[:, 0]])
    for i, j in itertools.product(range(len(FIRST)), range(len(SECOND))):
        longer = size(mu[i], nu[j]) / size(mu[0], nu[0])
        if not is_coarser(firsts[i], seconds[j]):
            assert longer < 1.4, (firsts[i], seconds[j])
        elif large == 1000:
            assert longer > 2.0, (firsts[i], seconds[j])


def test_a_class_of_the_users_with_a_name_of_optax_is_unknown():
    class ScaleByAdamState(typing.NamedTuple):
        mu: typing.Any
        nu: typing.Any

    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    init = lambda params: ScaleByAdamState(zeros(params), zeros(params))
    update = lambda updates, state, params: (updates, state)
    tx = lowbit_optax.lowbit(optax.GradientTransformation(init, update), min_size=0)
    state = tx.init(jnp.ones((8, 8), jnp.bfloat16)).inner_state
    assert state.mu.dtype == state.nu.dtype == jnp.float32
