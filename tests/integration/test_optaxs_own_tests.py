"""Optax's own tests of its optimizers and wrappers, run with this package's aliases.

`docs/integrations.md` lists the intended differences from optax. The tests of these
differences are expected to fail here, and state the reason.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from tests.helpers import optaxs_tests
from tests.helpers.optaxs_tests import ALIASES, UNWRAPPED, alias, keeping_params

# README's run leaves these out: they import much, and compile for each alias.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow_to_compile]

FLOAT32_UPDATES = "updates are float32, so that they land exactly"
SHARED_SCALE = "Lion takes signs, and 8 bits lose one average beside a larger one"

each_alias = pytest.mark.parametrize("name", ALIASES)
_alias_test = ("_src.alias_test", "AliasTest")
_common_test = ("contrib._common_test", "ContribTest")
_sharding_test = ("_src.sharding_test", "ShardingTest")


@pytest.fixture(autouse=True)
def _ours(monkeypatch):
    optaxs_tests.patch(monkeypatch)


def of(name):
    return {"opt_name": name, "opt_kwargs": ALIASES[name]}


def expected_to_fail(request, reason, error=AssertionError):
    request.applymarker(pytest.mark.xfail(reason=reason, strict=True, raises=error))


# The two tables of optimizers.

TARGETS = ["parabola", "rosenbrock", "matrix_parabola", "mixed_tensor_target"]


@each_alias
@pytest.mark.parametrize("target", TARGETS)
def test_it_finds_the_minimum(request, name, target):
    if (name, target) == ("lowbit_lion", "rosenbrock"):
        expected_to_fail(request, SHARED_SCALE)
    setup = getattr(optaxs_tests.module(_common_test[0]), f"_setup_{target}")
    arguments = of(name) | UNWRAPPED | {"target": setup, "dtype": "float32"}
    optaxs_tests.run(*_common_test, "test_optimizers", **arguments)


@pytest.mark.parametrize("name", [x for x in ALIASES if x != "lowbit_lion"])
def test_it_finds_the_minimum_of_complex_numbers_too(name):
    """Lion is excluded, because optax's Lion does not find it either."""
    setup = optaxs_tests.module(_alias_test[0])._setup_parabola
    arguments = of(name) | {"target": setup, "dtype": jnp.complex64}
    optaxs_tests.run(*_alias_test, "test_optimization", **arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optaxs_optimizers_inside_lowbit_find_the_minimum_and_compile_once(monkeypatch):
    def inside(_, name):
        make = getattr(optax, name)
        weights = lowbit_optax.extra_bits()
        return lambda **options: lowbit_optax.lowbit(make(**options), weights=weights)

    monkeypatch.setattr(optaxs_tests.module(_alias_test[0]), "_get_opt", inside)
    optaxs_tests.run_with({}, *_alias_test, "test_optimization")


STABILITY = "test_state_shape_dtype_shard_stability"
EVERY_SCHEDULE = (
    "test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such"
)
# Optax runs these tests with each of its optimizers. They pass extra arguments,
# schedules and wrappers, and check that a conditional can return the old or new state.
OF_EACH = [
    (_common_test, "test_optimizers_accept_extra_args", UNWRAPPED | {"wrap": False}),
    (_common_test, EVERY_SCHEDULE, UNWRAPPED),
    (_alias_test, "test_optimizers_can_be_wrapped_in_inject_hyperparams", {}),
    (_alias_test, "test_gradient_accumulation", {"dtype": "float32"}),
    (_alias_test, "test_gradient_accumulation", {"dtype": "bfloat16"}),
    (_alias_test, STABILITY, {"dtype": jnp.float32}),
    (_alias_test, STABILITY, {"dtype": jnp.float64}),
    (_alias_test, "test_preserve_dtype", {"dtype": "float32"}),
]


@each_alias
@pytest.mark.parametrize(("where", "test", "options"), OF_EACH)
def test_it_does_what_each_optimizer_does(name, where, test, options):
    optaxs_tests.run(*where, test, **of(name), **options)


@each_alias
def test_updates_do_not_have_the_dtype_of_narrow_gradients(request, name):
    expected_to_fail(request, FLOAT32_UPDATES)
    optaxs_tests.run(*_alias_test, "test_preserve_dtype", **of(name), dtype="bfloat16")


@each_alias
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_state_stays_stable_if_updates_are_cast(monkeypatch, name, dtype):
    def cast(updates, params):
        return jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)

    def then_cast(_, name):
        return lambda **options: optax.chain(
            alias(name)(**options), optax.stateless(cast)
        )

    module = optaxs_tests.module(_alias_test[0])
    monkeypatch.setattr(module, "_get_opt", then_cast)
    optaxs_tests.run(*_alias_test, STABILITY, **of(name), dtype=dtype)


def test_without_that_cast_the_branches_differ(request):
    expected_to_fail(request, FLOAT32_UPDATES, TypeError)
    optaxs_tests.run(*_alias_test, STABILITY, **of("kahan_sgd"), dtype=jnp.bfloat16)


@each_alias
@pytest.mark.parametrize(
    "test",
    [
        "test_init_with_abstract_input",
        "test_state_sharding_type_init_match_update",
        "test_state_sharding_type_preserved_with_jit",
    ],
)
def test_on_an_explicit_mesh_types_of_the_state_stay(name, test):
    # Each device has one row of these leaves, and packed words need several rows.
    tx = getattr(lowbit_optax, name)(**ALIASES[name])
    optaxs_tests.run(*_sharding_test, test, optimizer=tx)


# Wrappers.

WRAPPERS = {
    "mechanize": {"weight_decay": 0.0},
    "schedule_free": {"learning_rate": 1e-2},
    "reduce_on_plateau": {},
}


@pytest.mark.parametrize("name", [x for x in ALIASES if x != "lowbit_lion"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_it_finds_the_minimum(name, wrapper):
    """Lion is excluded: its steps do not shrink, and optax tests no such pair."""
    setup = optaxs_tests.module(_common_test[0])._setup_parabola
    optaxs_tests.run(
        *_common_test,
        "test_optimizers",
        **of(name),
        wrapper_name=wrapper,
        wrapper_kwargs=WRAPPERS[wrapper],
        target=setup,
        dtype="float32",
    )


SGD_ALIASES = ["kahan_sgd", "lowbit_sgd"]
BY_SGD = {
    ("transforms._masking_test", "MaskedTest"): [
        "test_masked_sgd",
        "test_masked_sgd_w_mask_fn",
        "test_masked_stateful_sgd",
        "test_prefix_mask_sgd",
        "test_prefix_mask_stateful_sgd",
        "test_empty",
        "test_nested_mask_sgd",
        "test_nested_mask_stateful_sgd",
        "test_tree_mismatch_fails",
        "test_mask_compatible_callable_pytree",
    ],
    ("transforms._accumulation_test", "AccumulationTest"): [
        "test_multi_steps_every_k_schedule",
        "test_multi_steps_scan_dtype_stability",
        "test_multi_steps_skip_not_finite",
        "test_multi_steps_zero_nans",
    ],
    ("transforms._conditionality_test", "ConditionalityTest"): [
        "test_apply_if_finite_sgd",
        "test_apply_if_finite_sgd_extra_args",
        "test_apply_if_finite_stateful_sgd",
        "test_apply_if_finite_pmap",
    ],
    ("transforms._combining_test", "PartitionTest"): [
        "test_empty",
        "test_labels_mismatch",
    ],
    ("transforms._freezing_test", "SelectiveTransformTest"): [
        "test_nested_train_all",
        "test_partial_prefix_mask_behavior",
        "test_scalar_freeze_all_jax_bool",
        "test_scalar_freeze_all_py_bool",
        "test_selective_transform_effect_flat_freeze_a",
        "test_selective_transform_effect_nested_freeze_layer2",
    ],
    ("transforms._monitoring_test", "MonitoringTest"): [
        "test_snapshot",
        "test_monitor",
    ],
    ("contrib._schedule_free_test", "ScheduleFreeTest"): [
        "test_learning_rate_zero",
        "test_scalar_preservance",
        "test_explicit_dtype",
    ],
}
CASES = [(*of, test) for of, tests in BY_SGD.items() for test in tests]


STAYS_NAN = "a NaN would stay in the accumulator, so MultiSteps is refused there"


@pytest.mark.parametrize("name", SGD_ALIASES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}.{case[2]}")
def test_optaxs_wrappers_hold_around_it(request, name, case):
    if case[2] == "test_multi_steps_zero_nans":
        expected_to_fail(request, STAYS_NAN, pytest.fail.Exception)
    tx = keeping_params(alias(name))
    optaxs_tests.run_with({"sgd": tx, "adam": tx_of_adam}, *case)


def tx_of_adam(learning_rate, b1=0.9, b2=0.999):
    made = keeping_params(alias("extra_bits_adamw"))
    return made(learning_rate, b1, b2, weight_decay=0.0)


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        (
            "test_masked_sgd",
            "an update needs the parameters: they hold half of the weights",
        ),
        ("test_masked_state_structure", "the state is a LowbitState around optax's"),
    ],
)
def test_intended_differences_are_expected_to_fail(request, test, reason):
    expected_to_fail(request, reason, pytest.fail.Exception)
    masking = ("transforms._masking_test", "MaskedTest")
    optaxs_tests.run_with({"sgd": alias("kahan_sgd")}, *masking, test)
