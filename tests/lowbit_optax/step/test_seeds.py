"""The seed of a new state depends on its parameters but not on their sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax import extra_bits, split_array
from lowbit_optax.lpmm import quantize_params
from tests.helpers.optimizers import adamw, assert_same_bits, normal

SHAPE = 256, 256  # independent bits correlate with a deviation of 1/256
HALF_A_SPACING = 2.0**-9
SGD = lowbit_optax.sr_sgd(1.0)


def layer(number):
    """Returns a layer that differs from other layers in one element."""
    return jnp.ones(SHAPE, jnp.bfloat16).at[0, 0].set(1 + number)


def moved(params, state):
    """Returns where a step rounds down (with probability 1/2), and the state."""
    grads = jnp.full(SHAPE, HALF_A_SPACING)
    new, state = lowbit_optax.step(SGD, params, state, grads)
    return new != params, state


def correlation(a, b):
    a, b = (np.asarray(x, np.float32).ravel() for x in (a, b))
    assert a.std() > 0.1
    assert b.std() > 0.1
    return abs(np.corrcoef(a, b)[0, 1])


@pytest.mark.standard_promotion
def test_training_that_starts_again_and_again_moves_as_many_weights():
    tx = lowbit_optax.sr_adamw(1e-6, weight_decay=0.0)
    # A step moves a weight by one spacing with a probability of 1e-6 * 2^8.
    start = jnp.asarray(np.random.default_rng(0).uniform(0.6, 0.9, 4096), jnp.bfloat16)

    def step(run, _):
        return lowbit_optax.step(tx, *run, jnp.ones(4096)), None

    def from_init(params, _):
        run, _ = lax.scan(step, (params, tx.init(params)), length=50)
        return run[0], None

    params, _ = jax.jit(lambda x: lax.scan(from_init, x, length=40))(start)
    expected = 1 - np.exp(-2000e-6 * 2**8)
    assert abs(np.mean(params != start) - expected) < 0.03


def by_vmap(layers):
    return jax.vmap(lambda x: moved(x, SGD.init(x))[0])(layers)


def by_scan(layers):
    each = layers, jax.vmap(SGD.init)(layers)
    return lax.scan(lambda _, run: (None, moved(*run)[0]), None, each)[1]


def one_by_one(layers):
    return [moved(x, SGD.init(x))[0] for x in layers]


@pytest.mark.parametrize("noise", [by_vmap, by_scan, one_by_one])
def test_layers_with_equal_paths_have_independent_noise(noise):
    first, second = jax.jit(noise)(jnp.stack([layer(0), layer(1)]))
    assert correlation(first, second) < 0.02


DTYPES = {"uint32": False, "int32": False, "int64": True}


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_and_seeds_of_every_dtype_give_the_same_bits(dtype):
    tx = lowbit_optax.accumulate_gradients(SGD, every=2, min_size=0)
    tx = lowbit_optax.with_loss_scale(tx, lowbit_optax.loss_scaling.backoff_scale(1.0))
    params, grads = jnp.ones((64, 64), jnp.bfloat16), jnp.full((64, 64), 2.0**-10)
    given = optax.tree.set(tx.init(params), seed=jnp.uint32(2**32 - 5))
    run = lambda carry, _: (lowbit_optax.step(tx, *carry, grads), None)
    # The scan raises an error if the dtypes of the state change.
    steps = jax.jit(lambda *carry: lax.scan(run, carry, length=4)[0])
    want = steps(params, given)
    assert 0.4 < np.mean(want[0] != params) < 0.9  # 3/4, as in float32
    with jax.enable_x64(DTYPES[dtype]):
        is_count = lambda x: jnp.issubdtype(x.dtype, jnp.integer) and not x.shape
        counts = lambda x: x.astype(dtype) if is_count(x) else x
        params, state = steps(params, jax.tree.map(counts, given))
        back = jax.tree.map(lambda x, like: x.astype(like.dtype), state, given)
    assert_same_bits((params, back), want)


def test_a_loss_scale_of_another_dtype_is_that_number():
    tx = lowbit_optax.with_loss_scale(
        lowbit_optax.sr_sgd(0.5), lowbit_optax.loss_scaling.backoff_scale(8.0)
    )
    params, grads = jnp.ones(4, jnp.bfloat16), jnp.full(4, 8.0)
    state = tx.init(params)
    want = lowbit_optax.step(tx, params, state, grads)
    for scale in (jnp.int32(8), jnp.bfloat16(8)):
        state = optax.tree.set(state, scale=scale)
        assert_same_bits(lowbit_optax.step(tx, params, state, grads), want)


def test_steps_leaves_and_states_have_independent_noise():
    state = SGD.init(layer(0))
    first, after = moved(layer(0), state)
    later, _ = moved(layer(0), after)
    other, _ = moved(layer(0), SGD.init(layer(1)))
    leaves = {"a": layer(0), "b": layer(0)}
    grads = jax.tree.map(lambda x: jnp.full(x.shape, HALF_A_SPACING), leaves)
    new, _ = lowbit_optax.step(SGD, leaves, SGD.init(leaves), grads)
    assert correlation(first, later) < 0.02
    assert correlation(first, other) < 0.02
    assert correlation(new["a"] != leaves["a"], new["b"] != leaves["b"]) < 0.02


PARAMS = {
    "kernel": normal(0, (64, 32), jnp.bfloat16),
    "bias": normal(1, (32,)),
    "codes": quantize_params(normal(2, (64, 64)), bits=8),
}


def seed(params=PARAMS, given=0):
    return int(adamw(0.1, extra_bits(8), seed=given).init(params).seed)


@pytest.mark.parametrize("name", PARAMS)
def test_each_bit_of_each_parameter_and_its_place_change_the_seed(name):
    def flipped(x):
        bits = np.asarray(x).copy().view(f"u{x.dtype.itemsize}")
        bits.flat[7] ^= 1
        return jnp.asarray(bits.view(x.dtype))

    leaves, structure = jax.tree.flatten(PARAMS[name])
    for change in (flipped, jnp.flip):
        changed = structure.unflatten([change(leaves[0]), *leaves[1:]])
        assert seed(PARAMS | {name: changed}) != seed()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_parameters_have_the_seed_of_one_device(kind):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    specs = {"kernel": P("a", "b"), "bias": P("b"), "codes": P()}
    with jax.set_mesh(mesh):
        place = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))
        params = {name: place(spec, PARAMS[name]) for name, spec in specs.items()}
        init = adamw(0.1, extra_bits(8)).init
        assert {int(f(params).seed) for f in (init, jax.jit(init))} == {seed()}


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_of_a_shard_map_agree_on_the_seed(check_vma):
    axes = dict(axis_types=(AxisType.Auto,) * 2)
    mesh = jax.make_mesh((4, 2), ("a", "b"), **axes)

    def seeds(spec, x):
        init = lambda x: SGD.init(x).seed
        each = dict(mesh=mesh, in_specs=spec, out_specs=P(), check_vma=check_vma)
        seed = jax.jit(jax.shard_map(init, **each))(x)
        return {int(x.data) for x in seed.addressable_shards}

    x = normal(0, (64, 32), jnp.bfloat16)
    assert seeds(P(), x) == {int(SGD.init(x).seed)}
    assert len(seeds(P("a"), x)) == 1
    assert seeds(P("a"), x) != seeds(P("a"), x + 1)


def test_leaves_may_be_on_different_devices():
    first, second = jax.devices()[:2]
    x = normal(0, (64, 32), jnp.bfloat16)
    params = {"a": jax.device_put(x, first), "b": jax.device_put(x, second)}
    assert SGD.init(params).seed == SGD.init({"a": x, "b": x}).seed


@pytest.mark.standard_promotion
def test_a_converted_run_keeps_its_noise_unless_another_seed_is_given():
    tx, params = adamw(0.1, extra_bits(8)), {"w": normal(0, (64, 32), jnp.bfloat16)}
    state = tx.init(params)
    advance = functools.partial(lowbit_optax.step, tx)
    params, state = jax.jit(advance)(params, state, params)
    to = lambda tx_to: lowbit_optax.convert(params, state, tx, tx_to)[1]
    there = to(adamw(0.1, extra_bits(4)))
    assert (there.seed, there.count) == (state.seed, 1)
    seeds = {int(to(adamw(0.1, extra_bits(8), seed=n)).seed) for n in (0, 1, 2)}
    assert len(seeds) == 3


def other_masters(number):
    """Returns the seed of a start; numbers 0 and 1 have equal bfloat16 parameters."""
    master = jnp.ones(64).at[0].add(number * 2.0**-12)
    tx = lowbit_optax.extra_bits_adamw(0.1)
    return lowbit_optax.from_master(tx, master, jnp.bfloat16, None)[1].seed


def converted(number):
    params, float32 = {"w": normal(0, (64, 32)) + number}, optax.adamw(0.1)
    tx = adamw(0.1, extra_bits(8))
    state = float32.init(params)
    return lowbit_optax.convert(params, state, float32, tx)[1].seed


def accumulated(number):
    tx = lowbit_optax.accumulate_gradients(optax.sgd(1.0), 2, min_size=0)
    params = layer(number)
    _, state = jax.jit(tx.update)(normal(0, SHAPE), tx.init(params), params)
    return state.accumulators.codes


def quantised(number):
    x = normal(0, (64, 64)).at[0, 0].add(0.01 * number)
    return quantize_params(x, bits=4, rounding="stochastic").codes


def split(number):
    x = layer(number).astype(jnp.float32) + HALF_A_SPACING * 2
    rounded = split_array(x, jnp.bfloat16, lowbit_optax.stochastic_rounding()).param
    return (rounded != layer(number))[1:]


@pytest.mark.parametrize(
    "drawn", [other_masters, converted, accumulated, quantised, split]
)
def test_arrays_that_differ_in_one_element_get_different_noise(drawn):
    assert np.mean(drawn(0) != drawn(1)) > 0.1
