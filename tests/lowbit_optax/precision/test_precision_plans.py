"""Losses are traced into tensors and groups, and precisions are chosen for them."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

from lowbit_optax import precision
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.rounded_losses import gradient

FLOAT = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def chain(w, x):
    """Computes three products with 156 elements, including cotangents.

    group 0   w0 3x4 (24 with its gradient), x 2x3 (6)          30
    group 1   w1 4x5 (40), product 0 2x4 (16), tanh 0 (16)      72
    group 2   w2 5x1 (10), product 1 2x5 (20), tanh 1 (20)      50
    group 3   product 2 2x1 (4)                                  4
    """
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) @ w[2])


CHAIN = [FLOAT((3, 4)), FLOAT((4, 5)), FLOAT((5, 1))], FLOAT((2, 3))


@pytest.fixture
def plan():
    return precision.trace(chain, *CHAIN)


def names(plan, chosen):
    return {
        t.name for t, is_chosen in zip(plan.tensors, chosen, strict=True) if is_chosen
    }


def test_groups_end_at_matrix_products(plan):
    assert plan.products == 3
    assert plan.size == 156
    found = [(t.name, t.group, t.made_by, t.read_by) for t in plan.tensors]
    assert found == [
        ("params[0]", 0, None, (0,)),
        ("params[1]", 1, None, (1,)),
        ("params[2]", 2, None, (2,)),
        ("batch[0]", 0, None, (0,)),
        ("dot_general.0", 1, 0, ()),
        ("tanh.0", 1, None, (1,)),
        ("dot_general.1", 2, 1, ()),
        ("tanh.1", 2, None, (2,)),
        ("dot_general.2", 3, 2, ()),
    ]
    assert plan.groups == [[0, 3], [1, 4, 5], [2, 6, 7], [8]]


def recurrent(w, xs):
    def cell(h, x):
        h = jnp.tanh(x @ w[0] + h @ w[1])
        return h, None

    h, _ = lax.scan(cell, jnp.zeros((2, 4)), xs)
    return jnp.sum(h @ w[2])


def test_a_recurrent_cell_has_its_tensors_at_each_iteration():
    w = [FLOAT((3, 4)), FLOAT((4, 4)), FLOAT((4, 1))]
    plan = precision.trace(recurrent, w, FLOAT((5, 2, 3)))
    found = [(t.name, t.group, t.repeats, t.read_by) for t in plan.tensors[4:]]
    assert found == [
        ("scan.0/dot_general.0", 1, 5, ()),
        ("scan.0/dot_general.1", 2, 5, ()),
        # Read by the next iteration's cell, and after the last iteration.
        ("scan.0/tanh.0", 2, 5, (1, 2)),
        ("dot_general.0", 3, 1, ()),
    ]
    assert [t.repeats for t in plan.tensors[:4]] == [1, 1, 1, 1]
    assert plan.tensors[4].size == plan.tensors[4].backward_size == 5 * 2 * 4


def test_stacked_checkpointed_layers_are_read_as_if_written_out():
    def loss_fn(w, x):
        layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w["a"]) @ w["b"], None))
        return jnp.sum(lax.scan(layer, x, w)[0])

    remat = primitives.remat_p.name
    w = {"a": FLOAT((3, 4, 5)), "b": FLOAT((3, 5, 4))}
    plan = precision.trace(loss_fn, w, FLOAT((2, 4)))
    assert plan.products == 2
    assert [(t.name, t.group, t.repeats) for t in plan.tensors] == [
        ("params['a']", 0, 1),
        ("params['b']", 1, 1),
        ("batch[0]", 0, 1),
        (f"scan.0/{remat}.0/dot_general.0", 1, 3),
        (f"scan.0/{remat}.0/tanh.0", 1, 3),
        (f"scan.0/{remat}.0/dot_general.1", 2, 3),
    ]


def test_inputs_that_products_read_are_tensors_and_targets_are_not():
    def loss_fn(w, x, y, mask):
        return jnp.mean(jnp.square(x @ w + mask - y))

    plan = precision.trace(loss_fn, *map(FLOAT, [(3, 2), (5, 3), (5, 2), (5, 2)]))
    assert [t.name for t in plan.tensors] == ["params", "batch[0]", "dot_general.0"]


def test_branches_of_a_conditional_have_tensors_of_their_own():
    def loss_fn(w, x, is_deep):
        h = jnp.tanh(x @ w[0])
        deep = lambda h: jnp.tanh(h @ w[1]) @ w[2]
        return jnp.sum(lax.cond(is_deep, deep, lambda h: jnp.sin(h), h) @ w[3])

    w = [FLOAT((3, 4)), FLOAT((4, 5)), FLOAT((5, 4)), FLOAT((4, 1))]
    is_deep = jax.ShapeDtypeStruct((), bool)
    plan = precision.trace(loss_fn, w, FLOAT((2, 3)), is_deep)
    assert plan.opaque == ()
    assert plan.products == 4
    assert [(t.name, t.group, t.read_by) for t in plan.tensors] == [
        ("params[0]", 0, (0,)),
        ("params[1]", 1, (1,)),
        ("params[2]", 2, (2,)),
        ("params[3]", 3, (3,)),
        ("batch[0]", 0, (0,)),
        ("dot_general.0", 1, ()),
        ("tanh.0", 1, (1,)),
        ("cond.0/branch0/sin.0", 1, (3,)),
        ("cond.0/branch1/dot_general.0", 2, ()),
        ("cond.0/branch1/tanh.0", 2, (2,)),
        ("cond.0/branch1/dot_general.1", 3, (3,)),
        ("dot_general.1", 4, ()),
    ]


def looping(w, x):
    """Runs a while loop whose number of iterations is unknown when tracing."""
    enough = lambda h: jnp.max(jnp.abs(h)) < 1e-3
    fixed = lax.while_loop(lambda h: ~enough(h), lambda h: jnp.tanh(h @ w) * 0.5, x)
    return jnp.sum(lax.stop_gradient(fixed) * (x @ w))


def test_the_body_of_a_while_loop_has_tensors_without_cotangents():
    plan = precision.trace(looping, FLOAT((4, 4)), FLOAT((2, 4)))
    assert plan.opaque == ()
    assert [(t.name, t.repeats, t.backward_size) for t in plan.tensors[2:]] == [
        ("while.0/dot_general.0", 1, 0),
        ("while.0/mul.0", 1, 0),
        ("dot_general.0", 1, 8),
    ]
    assert plan.tensors[0].read_by == (0, 1)
    assert not precision.uniform(plan).low_backward[2:4].any()


def test_the_body_of_a_while_loop_is_rounded_in_every_iteration():
    w = 0.3 * jax.random.normal(jax.random.key(0), (4, 4))
    x = jax.random.normal(jax.random.key(1), (2, 4))
    low = precision.FloatFormat(4, 3, 4)
    formats = precision.Formats(low=low, high=precision.FP32)
    plan = precision.trace(looping, w, x)
    exact = precision.demote(plan, 0, formats=formats)
    want = jax.value_and_grad(looping)(w, x)
    for stored in (False, True):
        (loss, _), grads = gradient(looping, exact, stored=stored)(w, x)
        assert_same_bits((loss, grads), want)

    # Make only the loop's own tensors low.
    is_low = np.array([t.kind == "iterated" for t in plan.tensors])
    only_loop = dataclasses.replace(exact, low=is_low)
    fixed = x
    while np.abs(fixed).max() >= 1e-3:
        fixed = low.round(jnp.tanh(low.round(fixed @ w)) * 0.5)
    got, overflow = precision.apply(looping, only_loop)(w, x)
    np.testing.assert_allclose(got, jnp.sum(fixed * (x @ w)), rtol=1e-6)
    assert not np.isclose(got, looping(w, x), rtol=1e-6)
    assert not overflow.any()


def by_platform(w, x):
    step = lambda h: jnp.tanh(h @ w)
    return jnp.sum(lax.platform_dependent(x, cpu=step, default=step))


def sharded(w, x):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    inner = lambda w, x: jnp.tanh(x @ w) @ w
    spec = jax.P()
    return jnp.sum(
        jax.shard_map(inner, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(w, x)
    )


@pytest.mark.parametrize(
    ("loss_fn", "place"),
    [(by_platform, "cond.0"), (sharded, "shard_map.0")],
    ids=["platform", "shard_map"],
)
def test_opaque_operations_are_named(loss_fn, place, tmp_path):
    arguments = FLOAT((4, 4)), FLOAT((2, 4))
    with pytest.warns(UserWarning, match=rf"trace: .* {place} are "):
        plan = precision.trace(loss_fn, *arguments)
    assert plan.opaque == (place,)
    assert place in [t.name for t in plan.tensors]  # its result is a tensor
    assert not any(t.name.startswith(f"{place}/") for t in plan.tensors)
    assignment = precision.uniform(plan)
    assert str(assignment).splitlines()[-1].endswith(f" {place}")
    assignment.save(tmp_path / "assignment.json")
    assert precision.load(tmp_path / "assignment.json").plan == plan


@pytest.mark.filterwarnings("error")
def test_operators_and_loops_over_scalars_are_not_opaque():
    def scale(w, x):
        # Newton's method for the square root of a sum, without arrays inside.
        total = jnp.sum(x @ w) ** 2 + 1.0
        step = lambda state: (state[0] + 1, 0.5 * (state[1] + total / state[1]))
        return lax.while_loop(lambda s: s[0] < jnp.int32(5), step, (0, total))[1]

    @jax.custom_vjp
    def attention(x):
        return jax.nn.softmax(x @ x.T) @ x

    attention.defvjp(lambda x: (attention(x), x), lambda x, ct: (ct,))
    loss_fn = lambda w, x: jnp.sum(attention(x @ w)) * lax.stop_gradient(scale(w, x))
    plan = precision.trace(loss_fn, FLOAT((4, 4)), FLOAT((2, 4)))
    assert plan.opaque == ()


def test_checkpoint_name_makes_a_tensor_and_names_it():
    def loss_fn(w, x):
        return jnp.sum(jnp.cos(checkpoint_name(jnp.sin(x @ w), "before")))

    plan = precision.trace(loss_fn, FLOAT((3, 4)), FLOAT((2, 3)))
    found = [(t.name, t.group, t.read_by) for t in plan.tensors[2:]]
    assert found == [("dot_general.0", 1, ()), ("before", 1, ())]


def test_a_loss_without_tensors_has_an_empty_plan():
    plan = precision.trace(lambda w: w * w, FLOAT(()))
    assert plan.tensors == ()
    assert float(precision.demote(plan, 1.0).low_ratio) == 0
    assert "0 elements" in str(precision.uniform(plan))


DECREASING = [[1, 4, 5], [2, 6, 7], [0, 3], [8]]
LOWERED = [0, 20 + 32, 20 + 32 + 5 + 40, 115, 119]
"""Numbers of low elements after each group; weight gradients stay high."""


def numbers(groups):
    return sorted(number for group in DECREASING[:groups] for number in group)


@pytest.mark.parametrize("groups", range(5))
def test_the_largest_groups_are_lowered_until_the_ratio_is_reached(plan, groups):
    ratio = LOWERED[groups] / 156
    exactly = precision.demote(plan, ratio)
    assert np.flatnonzero(exactly.low).tolist() == numbers(groups)
    assert float(exactly.low_ratio) == pytest.approx(ratio, rel=1e-6)
    assert names(plan, exactly.low_backward) == {
        name for name in names(plan, exactly.low) if "." in name
    }
    if groups < 4:
        more = precision.demote(plan, ratio + 1e-9)
        assert np.flatnonzero(more.low).tolist() == numbers(groups + 1)


def test_other_orders(plan):
    first = lambda **kwargs: np.flatnonzero(precision.demote(plan, 1e-9, **kwargs).low)
    assert first(order="increasing").tolist() == [8]
    of_seeds = {tuple(first(order="random", seed=seed)) for seed in range(30)}
    assert of_seeds == {(8,), (0, 3), (2, 6, 7), (1, 4, 5)}
    again = [first(order="random", seed=3).tolist() for _ in range(2)]
    assert again[0] == again[1]


def test_operators_read_low_except_the_first_and_the_last(plan):
    inputs = precision.operator_based(plan)
    assert names(plan, inputs.low) == {"params[1]", "tanh.0"}
    assert names(plan, inputs.low_backward) == {"dot_general.1"}
    assert float(inputs.low_ratio) == pytest.approx((20 + 8 + 10) / 156)
    both = precision.operator_based(plan, outputs=True)
    assert names(plan, both.low) == {"params[1]", "tanh.0", "dot_general.1"}
    assert names(plan, both.low_backward) == {"dot_general.1", "tanh.0"}
    assert float(both.low_ratio) == pytest.approx((20 + 8 + 10 + 10 + 8) / 156)


def test_products_that_a_scan_repeats_are_not_the_first_and_the_last():
    def loss_fn(w, x):
        layer = lambda h, w: (jnp.tanh(h @ w[0]) @ w[1], None)
        return jnp.sum(lax.scan(layer, x, w)[0])

    deep = precision.trace(loss_fn, [FLOAT((6, 4, 4))] * 2, FLOAT((2, 4)))
    made = {"scan.0/tanh.0", "scan.0/dot_general.1"}
    low = names(deep, precision.operator_based(deep).low)
    assert low == {"params[0]", "params[1]", "batch[0]"} | made
    # A single iteration contains the first and the last product of the loss.
    one = precision.trace(loss_fn, [FLOAT((1, 4, 4))] * 2, FLOAT((2, 4)))
    assert not precision.operator_based(one).low.any()

    def between(w, x):
        h, _ = lax.scan(lambda h, w: (h @ w, None), x @ w[1], w[0])
        return jnp.sum(jnp.tanh(h) @ w[2])

    w = [FLOAT((6, 4, 4)), FLOAT((4, 4)), FLOAT((4, 4))]
    plan = precision.trace(between, w, FLOAT((2, 4)))
    low = names(plan, precision.operator_based(plan).low)
    assert "params[0]" in low
    assert not low & {"params[1]", "params[2]", "batch[0]"}


def test_promotion_raises_forward_tensors_past_the_threshold(plan):
    assignment = precision.uniform(plan)
    overflow = jnp.array([0, 0.01, 0.02, 1, 0.011, 0, jnp.inf, 0.5, 0], jnp.float32)
    promoted = precision.promote(assignment, overflow)
    assert np.flatnonzero(promoted.low).tolist() == [0, 1, 5, 8]
    np.testing.assert_array_equal(promoted.low_backward, assignment.low_backward)
    less = precision.promote(assignment, overflow, 0.4)
    assert np.flatnonzero(less.low).tolist() == [0, 1, 2, 4, 5, 8]
    again = precision.promote(promoted, jnp.zeros(9))
    assert again.low.tolist() == promoted.low.tolist()
    with pytest.raises(ValueError, match=r"overflow .* 9 tensors.* \[8\]"):
        precision.promote(assignment, overflow[1:])


def test_an_assignment_is_written_and_read(plan, tmp_path):
    formats = precision.Formats(
        low=precision.FloatFormat(5, 2, specials="ieee", subnormals=False),
        high=precision.FP32,
    )
    for assignment in (
        precision.demote(plan, 0.5, formats=formats),
        precision.promote(precision.uniform(plan), jnp.ones(9)),
    ):
        assignment.save(tmp_path / "assignment.json")
        read = precision.load(tmp_path / "assignment.json")
        assert (read.plan, read.formats) == (plan, assignment.formats)
        jax.tree.map(np.testing.assert_array_equal, read, assignment)


@pytest.mark.parametrize("damage", ["cut", "list", "no low", "other field", "number"])
def test_a_damaged_file_is_named(plan, tmp_path, damage):
    path = tmp_path / "damaged.json"
    precision.uniform(plan).save(path)
    document = json.loads(path.read_text())
    if damage == "list":
        document = document["tensors"]
    elif damage == "no low":
        del document["tensors"][3]["low"]
    elif damage == "other field":
        document["formats"]["low"]["exponents"] = 3
    elif damage == "number":
        document["formats"]["low"]["exponent_bits"] = 99
    text = json.dumps(document)
    path.write_text(text[:-20] if damage == "cut" else text)
    with pytest.raises(ValueError, match=r"load: .*damaged\.json "):
        precision.load(path)


def test_the_ratio_counts_more_elements_than_float32_does():
    side = 2**14
    w = [FLOAT((side, side)), FLOAT((side, 1))]
    plan = precision.trace(
        lambda w, x: jnp.sum(x @ w[0] @ w[1]), w, FLOAT((side + 1, side))
    )
    weights, x, hidden, result = side * side, (side + 1) * side, (side + 1) * side, side
    total = 2 * weights + 2 * side + x + 2 * hidden + 2 * (result + 1)
    assert plan.size == total
    lowered = precision.demote(plan, 0.3)  # group 0: w[0] and x
    assert float(lowered.low_ratio) == pytest.approx((weights + x) / total, rel=1e-6)
    counted = [weights + x, weights + x + side + 2 * hidden]
    assert np.all(precision.demote(plan, counted[0] / total).low == lowered.low)
    assert not np.all(
        precision.demote(plan, (counted[0] + 1) / total).low == lowered.low
    )
