"""Users specify shardings so that TPU kernels work on automatic axes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax import release
from pallas_kernels.fused_update import api, xla
from pallas_kernels.fused_update.tpu import kernel
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.released import OPERATION_BY_OPERATION

pytestmark = pytest.mark.standard_promotion

# Shards of 16 x 256 or 128 x 32 have whole words and blocks; for LPMM, so do 64 x 64.
SHAPE, FOR_LPMM = (128, 256), (512, 64)


@pytest.fixture
def by_xla(monkeypatch):
    """Runs XLA on the shards of a kernel, because Pallas simulates TPUs slowly."""
    are_local = []

    def update(call):
        (shard,) = call.shards
        are_local.append(shard.shape != shard.leaf.shape)
        shape, leaf, base = shard.shape, shard.leaf, shard.base
        return xla.update(
            call.body,
            dataclasses.replace(leaf, shape=shape),
            xla.row_of(call.scalars, call.scalars.rows),
            call.layer,
            call.scalars.when,
            xla.index_of(shape, leaf.shape, base, call.layer),
        )

    monkeypatch.setattr(api, "is_for_tpus", lambda mesh=None: True)
    monkeypatch.setattr(kernel, "update", update)
    jax.clear_caches()  # equal leaves are traced only once
    yield
    jax.clear_caches()
    assert any(are_local)


@functools.cache
def _mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((8,), ("x",), axis_types=(axis_type,))


def _random(number, shape=SHAPE):
    keys = jax.random.split(jax.random.key(number), 2)
    draw = lambda key: jax.random.normal(key, shape, jnp.bfloat16)
    return {"w": draw(keys[0]), "v": draw(keys[1])}


def _trained(tx, place=None, shape=SHAPE):
    """Returns parameters and state after two steps with this sharding."""
    params, *grads = (_random(number, shape) for number in range(3))
    state = tx.init(params)
    if place is not None:
        shardings = lowbit_optax.state_shardings(tx, params, place)
        params, state = jax.device_put((params, state), (place, shardings))
        grads = jax.device_put(grads, [place] * 2)
    # In loops of several operations, XLA may fuse different products in each program.
    step = functools.partial(lowbit_optax.step, tx)
    step = jax.jit(step, compiler_options=OPERATION_BY_OPERATION)
    for grad in grads:
        params, state = step(params, state, grad)
    return params, state


def _everywhere(sharding):
    return jax.tree.map(lambda _: sharding, _random(0))


ALIASES = {
    "lowbit_adamw": lowbit_optax.lowbit_adamw,
    "kahan_adamw": lowbit_optax.kahan_adamw,
    "extra_bits_sgd": functools.partial(lowbit_optax.extra_bits_sgd, momentum=0.9),
}
OPTIONS = {"learning_rate": 2.0**-6, "implementation": "tpu"}


@pytest.mark.usefixtures("by_xla")
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "columns"])
@pytest.mark.parametrize("name", ALIASES)
def test_given_shards_are_updated_as_on_one_device(name, spec):
    alias, place = ALIASES[name], _everywhere(NamedSharding(_mesh(), spec))
    got = _trained(alias(**OPTIONS, param_shardings=place), place)
    assert_same_bits(got, _trained(alias(**OPTIONS)))
    for leaf in jax.tree.leaves(got):
        if leaf.shape == SHAPE:
            assert leaf.sharding.is_equivalent_to(place["w"], 2)


@pytest.mark.slow_to_compile
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="interprets no shards")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_interpreted_kernels_on_shards_are_those_of_one_device(axis_type):
    place = _everywhere(NamedSharding(_mesh(axis_type), P("x")))
    tx = lowbit_optax.lowbit_adamw(**OPTIONS, param_shardings=place)
    want = _trained(lowbit_optax.lowbit_adamw(**OPTIONS))
    assert_same_bits(_trained(tx, place), want)


@pytest.mark.usefixtures("by_xla")
def test_shards_of_half_blocks_are_moved_to_other_axes_and_back():
    """A block has 8 rows, but each shard of 136 rows has 17."""
    shape, place = (136, 256), NamedSharding(_mesh(), P("x"))
    tx = lambda **told: lowbit_optax.lowbit_adamw(**OPTIONS, **told)
    params, grads = _random(0, shape), _random(1, shape)
    state = tx().init(params)
    want = jax.jit(functools.partial(lowbit_optax.step, tx()))(params, state, grads)
    told = tx(param_shardings=place)
    shardings = lowbit_optax.state_shardings(told, params, uneven="other_axis")
    state = jax.device_put(state, shardings)
    params, grads = jax.device_put((params, grads), place)
    got = jax.jit(functools.partial(lowbit_optax.step, told))(params, state, grads)
    assert_same_bits(got, want)
    assert got[0]["w"].sharding.is_equivalent_to(place, 2)


WRAPPERS = {
    "masked": lambda tx: optax.masked(tx, {"w": True, "v": False}),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.sgd(0.5)}, {"w": "a", "v": "b"}
    ),
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "direct_updates": lowbit_optax.direct_updates,
    "accumulate_gradients": lambda tx: lowbit_optax.accumulate_gradients(tx, 2),
    "with_loss_scale": lambda tx: lowbit_optax.with_loss_scale(
        tx, lowbit_optax.loss_scaling.static_scale(4.0)
    ),
}


@pytest.mark.slow_to_compile
@pytest.mark.usefixtures("by_xla")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_keep_the_given_shardings(name):
    place, wrap = NamedSharding(_mesh(), P("x")), WRAPPERS[name]
    tx = lowbit_optax.lowbit_adamw(**OPTIONS, param_shardings=place)
    got = _trained(wrap(tx), _everywhere(place), FOR_LPMM)
    plain = wrap(lowbit_optax.lowbit_adamw(**OPTIONS))
    assert_same_bits(got, _trained(plain, shape=FOR_LPMM))


@pytest.mark.slow_to_compile
@pytest.mark.usefixtures("by_xla")
def test_release_takes_one_layers_sharding():
    place = NamedSharding(_mesh(), P(None, None, "x"))
    params = {"layers": _random(0, (3, 128, 128))["w"]}

    def loss_fn(params, x):
        body = lambda x, w: (x @ w.astype(jnp.float32) / 16, None)
        return jax.lax.scan(body, x, params["layers"])[0].sum()

    def stepped(**told):
        tx = lowbit_optax.lowbit_adamw(**OPTIONS, **told)
        step = jax.jit(release.value_and_update(loss_fn, tx))
        given, state = params, tx.init(params)
        if told:
            shardings = lowbit_optax.state_shardings(tx, params)
            given, state = jax.device_put((params, state), (place, shardings))
        return step(given, state, jnp.ones((4, 128)))[1:]

    want = stepped()
    assert_same_bits(stepped(param_shardings=place), want)
    by_shape = lambda params: jax.tree.map(
        lambda x: place if x.ndim == 3 else None, params
    )
    assert_same_bits(stepped(param_shardings=by_shape), want)


def test_trees_prefixes_and_functions_are_equivalent():
    place, params = NamedSharding(_mesh(), P("x")), _random(0)
    given = [
        place,
        {"w": place, "v": place},
        lambda params: jax.tree.map(lambda _: place, params),
    ]
    plain = lowbit_optax.kahan_adamw(1.0)
    expected = lowbit_optax.state_shardings(plain, params, place)
    for each in given:
        tx = optax.chain(lowbit_optax.kahan_adamw(1.0, param_shardings=each))
        assert lowbit_optax.state_shardings(tx, params) == (expected,)
    with jax.set_mesh(_mesh()):
        tx = lowbit_optax.kahan_adamw(1.0, param_shardings=P("x"))
        assert lowbit_optax.state_shardings(tx, params) == expected
