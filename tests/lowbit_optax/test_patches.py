"""Patches bring a copy of the weights to the trainer's weights, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import lowbit_optax
from lowbit_optax import patches
from lowbit_optax._numerics import positions
from tests.helpers.optimizers import assert_same_bits

STEPS = 500
SHAPES = {
    "bfloat16": ((64, 48), jnp.bfloat16),
    "float16": ((40, 33), jnp.float16),
    "float8_e4m3fn": ((64, 16), jnp.float8_e4m3fn),
    "float8_e5m2": ((3, 5, 7), jnp.float8_e5m2),
    "bias": ((70,), jnp.bfloat16),
    "norm": ((48,), jnp.float32),
    "scale": ((), jnp.float32),
}


def _params():
    """Return weights of every dtype, with leaves that are not trained."""
    draw = np.random.default_rng(0).normal
    params = {
        name: jnp.asarray(draw(0, 0.05, shape), jnp.float32).astype(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }
    return params | {"count": jnp.arange(3), "key": jax.random.key(1)}


def _grads(params, number):
    """Return a new gradient for each trained leaf, and nothing for others."""
    key = jax.random.fold_in(jax.random.key(2), number)

    def grad(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.zeros(x.shape, jax.dtypes.float0)
        return jax.random.normal(key, x.shape)

    return jax.tree.map(grad, params)


def _same_bits(got, expected):
    got, expected = (
        {n: np.asarray(x) for n, x in tree.items() if n != "key"}
        for tree in (got, expected)
    )
    assert_same_bits(got, expected)


@pytest.mark.standard_promotion  # optax's
def test_weights_have_the_same_bits_after_500_patches():
    tx = lowbit_optax.lowbit(optax.adam(3e-6))
    params = _params()
    state = tx.init(params)
    sampled = {n: x if n == "key" else np.array(x) for n, x in params.items()}

    @jax.jit
    def train_step(params, state, number):
        new, state = lowbit_optax.step(tx, params, state, _grads(params, number))
        return new, state, patches.diff(params, new)

    sent = received = patches.start(params)
    assert patches.start(sampled) == sent
    count = 0
    for number in range(STEPS):
        before = sampled
        params, state, changed = train_step(params, state, number)
        patch, sent = patches.pack(params, changed, sent)
        sampled, received = patches.apply(sampled, patch, received)
        if number % 50 == 0:
            _same_bits(sampled, params)
            count += any((before[n] != sampled[n]).any() for n in ("bfloat16", "norm"))
    assert count == STEPS / 50
    _same_bits(sampled, params)
    assert received == sent
    assert sent.number == STEPS
    assert patches.start(sampled) == patches.start(params)


def _patch(old, new, stamp=None):
    stamp = patches.start(old) if stamp is None else stamp
    return patches.pack(new, patches.diff(old, new), stamp)


def _sequence():
    """Return weights after 0, 1 and 2 steps, two patches, and the first stamp."""
    weights = [{"w": jnp.arange(64.0).at[n].set(-1)} for n in range(3)]
    start = patches.start(weights[0])
    first, stamp = _patch(*weights[:2], start)
    second, _ = _patch(*weights[1:], stamp)
    return weights, (first, second), start


def test_patches_in_order_are_applied():
    weights, sent, stamp = _sequence()
    params = weights[0]
    for patch in sent:
        params, stamp = patches.apply(params, patch, stamp)
    assert_same_bits(params, weights[2])


def test_a_missing_patch_is_refused():
    (params, *_), (_, second), stamp = _sequence()
    with pytest.raises(ValueError, match="patch number 2 is too early"):
        patches.apply(params, second, stamp)


def test_a_repeated_patch_is_refused():
    (params, *_), (first, _), stamp = _sequence()
    params, stamp = patches.apply(params, first, stamp)
    with pytest.raises(ValueError, match="patch number 1 was already applied"):
        patches.apply(params, first, stamp)


def test_a_patch_of_other_weights_is_refused():
    (params, *_), (first, second), stamp = _sequence()
    other = jax.tree.map(lambda x: x + 1, params)
    with pytest.raises(ValueError, match="patch number 1 belongs to other weights"):
        patches.apply(other, first, patches.start(other))
    # The number fits, but the first patch came from another run.
    _, stamp_of_foreign = _patch(params, other, stamp)
    with pytest.raises(ValueError, match="patch number 2 belongs to other weights"):
        patches.apply(other, second, stamp_of_foreign)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_patch_is_refused(damage):
    (params, *_), (first, _), stamp = _sequence()
    flipped = first[:-1] + bytes([first[-1] ^ 1])
    patch = {"cut": first[:-1], "flipped": flipped}[damage]
    with pytest.raises(ValueError, match="patch number 1 is damaged or truncated"):
        patches.apply(params, patch, stamp)


def test_bytes_that_are_no_patch_are_refused():
    (params, *_), _, stamp = _sequence()
    with pytest.raises(ValueError, match="must be the bytes that pack returned"):
        patches.apply(params, b"something else that is long enough", stamp)


NARROW = [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2]


@pytest.mark.parametrize("dtype", NARROW, ids=lambda x: np.dtype(x).name)
def test_nans_and_zeros_are_compared_as_bits(dtype):
    width = np.dtype(dtype).itemsize * 8
    unsigned = f"uint{width}"
    every = np.arange(2 ** min(width, 12), dtype=unsigned) << max(width - 12, 0)
    old = {"w": every.astype(unsigned).view(dtype)}
    same = patches.diff(old, old)["w"]
    assert not np.asarray(same).any()  # also for NaN
    new = {"w": np.roll(old["w"].view(unsigned), 1).view(dtype)}
    patch, _ = _patch(old, new)
    for start in (old, jax.tree.map(jnp.asarray, old)):
        got, _ = patches.apply(start, patch, patches.start(start))
        assert (np.asarray(got["w"]).view(unsigned) == new["w"].view(unsigned)).all()


def test_integers_of_64_bits_are_exact():
    with jax.enable_x64(True):
        old = jnp.zeros(8, jnp.int64)
        new = old.at[3].set(2**40 + 3)
        patch, _ = _patch(old, new)
        got, _ = patches.apply(old, patch, patches.start(old))
        assert_same_bits(got, new)


def test_weights_that_did_not_change_cost_no_bytes():
    old = _params()
    nothing, _ = _patch(old, old)
    assert len(nothing) == 20
    one, _ = _patch(old, old | {"scale": jnp.float32(3)})
    assert len(one) == len(nothing) + 26 + 1 + 4


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 1])
def test_a_patch_has_the_shorter_form_of_positions(share):
    size = 2**16
    mask = np.random.default_rng(0).random(size) < share
    old = {"w": jnp.zeros((256, 256), jnp.bfloat16)}
    new = {"w": jnp.asarray(mask.reshape(256, 256), jnp.bfloat16)}
    patch, _ = _patch(old, new)
    of_positions = len(patch) - 2 * mask.sum() - 46
    assert of_positions <= size / 8
    # Almost all distances below 128 need one byte.
    assert of_positions <= mask.sum() * (2 if share < 0.01 else 1.35)
    assert_same_bits(patches.apply(old, patch, patches.start(old))[0], new)


@pytest.mark.parametrize("size", [1, 8, 1000, 2**21])
def test_positions_are_decoded_to_what_was_encoded(size):
    rng = np.random.default_rng(size)
    for count in {1, 2, min(size, 50), size // 2 or 1, size}:
        some = np.sort(rng.choice(size, min(count, size), replace=False))
        assert (positions.decode(*positions.encode(some, size)) == some).all()


def _mesh(*lengths, axis_type=AxisType.Auto):
    names = ("x", "y")[: len(lengths)]
    return jax.make_mesh(lengths, names, axis_types=(axis_type,) * len(names))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "source", [jax.P("x"), jax.P("y", "x"), jax.P(None, "y"), None]
)
def test_shards_of_one_mesh_are_applied_on_another(source, axis_type):
    old = {"w": np.random.default_rng(0).normal(size=(64, 48)).astype("bfloat16")}
    mask = np.random.default_rng(1).random((64, 48)) < 0.05
    new = {"w": np.where(mask, -old["w"], old["w"])}
    mesh = _mesh(4, 2, axis_type=axis_type)
    place = lambda tree: jax.device_put(
        tree, jax.NamedSharding(mesh, source or jax.P())
    )
    patch, _ = _patch(place(old), place(new))
    for mesh, target in ((_mesh(8), jax.P(None, "x")), (_mesh(2, 4), jax.P("y"))):
        start = jax.device_put(old, jax.NamedSharding(mesh, target))
        got, _ = patches.apply(start, patch, patches.start(start))
        assert got["w"].sharding == start["w"].sharding
        assert_same_bits(got, new)
    got, _ = patches.apply(old, patch, patches.start(old))
    assert_same_bits(got, new)


@pytest.mark.standard_promotion  # optax's
def test_quantized_weights_are_patched():
    params = lowbit_optax.lpmm.quantize_params({"w": jnp.linspace(-1, 1, 4096)})
    tx = lowbit_optax.lpmm_adam(1e-2)
    grads = {"w": jnp.ones(4096)}
    new, _ = lowbit_optax.step(tx, params, tx.init(params), grads)
    patch, _ = _patch(params, new)
    got, _ = patches.apply(params, patch, patches.start(params))
    assert_same_bits(got, new)


@pytest.mark.standard_promotion  # optax's
def test_weights_of_released_steps_are_patched():
    tx = lowbit_optax.lowbit_adamw(1e-3)
    master = {n: jnp.full((64, 64), 0.1) for n in "ab"}
    params, state = lowbit_optax.from_master(tx, master)
    loss_fn = lambda p, x: jnp.mean(jnp.tanh(x @ p["a"]) @ p["b"], dtype=jnp.float32)
    advance = lowbit_optax.release.value_and_update(loss_fn, tx)

    @jax.jit
    def train_step(params, state, x):
        _, new, state = advance(params, state, x)
        return new, state, patches.diff(params, new)

    x = jax.random.normal(jax.random.key(0), (8, 64), jnp.bfloat16)
    new, _, changed = train_step(params, state, x)
    patch, _ = patches.pack(new, changed, patches.start(params))
    got, _ = patches.apply(params, patch, patches.start(params))
    assert_same_bits(got, new)
    assert all(np.asarray(x).any() for x in changed.values())


def test_bitmaps_of_several_steps_are_joined():
    weights = [{"w": jnp.arange(64.0).at[n].set(-1)} for n in range(3)]
    each = [patches.diff(*weights[n : n + 2]) for n in range(2)]
    union = functools.reduce(functools.partial(jax.tree.map, jnp.bitwise_or), each)
    patch, _ = patches.pack(weights[2], union, patches.start(weights[0]))
    got, _ = patches.apply(weights[0], patch, patches.start(weights[0]))
    assert_same_bits(got, weights[2])


BAD = {
    "structure": (
        lambda p: patches.diff(p, {"v": p["w"]}),
        r"diff: new must have the structure of params \(missing at \['w'\]\)",
    ),
    "shape": (
        lambda p: patches.diff(p, {"w": jnp.ones(8)}),
        r"diff: new\['w'\] must be float32\[64\], as in old, got float32\[8\]",
    ),
    "64 bits": (
        lambda _: patches.diff({"w": np.zeros(64)}, {"w": np.full(64, 1e-60)}),
        r"diff: params\['w'\] must have at most 32 bits .* got float64\[64\]",
    ),
    "bitmap": (
        lambda p: patches.pack(p, p, patches.start(p)),
        r"pack: changed\['w'\] must be uint8\[32\] for float32\[64\], got float32",
    ),
    "dtype": (
        lambda p: patches.apply(
            {"w": np.zeros(64, ml_dtypes.bfloat16)},
            _patch(p, {"w": p["w"] + 1})[0],
            patches.start(p),
        ),
        r"apply: leaf 0 of params must have the path, shape and dtype that it had in "
        r"pack, got \['w'\], bfloat16\[64\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call({"w": jnp.arange(64.0)})


def test_a_stamp_of_another_type_is_refused():
    params = {"w": jnp.ones(8)}
    with pytest.raises(TypeError, match="pack: stamp must be a Stamp, got 0"):
        patches.pack(params, patches.diff(params, params), 0)


FORMATS = {
    "lowbit": {},
    "stochastic": {"weights": lowbit_optax.stochastic_rounding()},
    "kahan": {
        "weights": lowbit_optax.kahan(),
        "moments": lowbit_optax.cast(jnp.bfloat16),
    },
    "all bits": {"weights": lowbit_optax.extra_bits(16), "moments": "float32"},
}


def _exact(rate=2.0**-9, **formats):
    return lowbit_optax.lowbit(optax.sgd(rate, momentum=0.5), **formats)


def _large(dtype=jnp.bfloat16):
    draw = np.random.default_rng(0).normal
    shapes = {
        "w": (64, 96),
        "uneven": (70, 33),
        "vector": (4000,),
        "stack": (3, 40, 64),
    }
    params = {n: jnp.asarray(draw(size=x), jnp.float32) for n, x in shapes.items()}
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    return params | {"norm": jnp.ones(5000), "scalar": jnp.float32(1)}


def _marked(tx, params):
    """Return the parameters and bitmaps of two steps, and what ``diff`` returns."""
    state, found = tx.init(params), []
    for seed in range(2):
        draw = np.random.default_rng(seed).normal
        grads = {n: jnp.asarray(draw(size=x.shape)) for n, x in params.items()}
        grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), grads)
        new, state, changed = patches.step(tx, params, state, grads)
        found.append((changed, patches.diff(params, new)))
        params = new
    return found


@pytest.mark.parametrize("implementation", ["xla", "pallas", None])
@pytest.mark.parametrize("name", FORMATS)
def test_a_step_marks_the_weights_that_it_changes(name, implementation):
    tx = _exact(**FORMATS[name], implementation=implementation)
    for changed, expected in _marked(tx, _large()):
        assert_same_bits(changed, expected)
        assert 0 < sum(np.bitwise_count(x).sum() for x in changed.values()) < 20_000


@pytest.mark.parametrize("dtype", NARROW[1:], ids=lambda x: np.dtype(x).name)
def test_kernels_mark_weights_of_other_dtypes(dtype):
    tx = _exact(2.0**-6, implementation="pallas")
    for changed, expected in _marked(tx, _large(dtype)):
        assert_same_bits(changed, expected)


def test_one_array_may_be_several_leaves():
    tx, x = lowbit_optax.kahan_sgd(1.0), jnp.ones(4, jnp.bfloat16)
    params = {"a": x, "b": x}
    grads = {"a": jnp.array([1.0, 0, 0, 0]), "b": jnp.array([0, 0, 1.0, 1.0])}
    new, _, changed = patches.step(tx, params, tx.init(params), grads)
    assert_same_bits(changed, patches.diff(params, new))


SKIPPING = {
    "conditional": lambda tx: optax.apply_if_finite(tx, 5),
    "guard": lambda tx: lowbit_optax.with_loss_scale(
        tx, lowbit_optax.loss_scaling.backoff_scale(2.0)
    ),
}


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("way", SKIPPING)
def test_a_skipped_step_changes_no_weights(way, implementation):
    tx = SKIPPING[way](_exact(implementation=implementation))
    params = _large()
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    new, _, changed = patches.step(tx, params, tx.init(params), grads)
    assert_same_bits(new, params)
    assert not any(np.asarray(x).any() for x in changed.values())


def _reading_values(tx):
    """Return a wrapper that cannot be traced."""

    def update(grads, state, params):
        assert all(float(x.sum()) for x in jax.tree.leaves(grads))
        return tx.update(grads, state, params)

    return optax.GradientTransformation(tx.init, update)


WRAPPED = {
    "chain": lambda tx: optax.chain(optax.clip(0.5), tx),
    "masked": lambda tx: optax.masked(tx, lambda p: {n: n != "w" for n in p}),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
    "not traceable": _reading_values,
    "plain optax": lambda _: optax.sgd(0.1),
}


@pytest.mark.standard_promotion  # optax's
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_wrapped_steps_mark_the_weights_that_they_change(name, implementation):
    tx = WRAPPED[name](_exact(implementation=implementation))
    for changed, expected in _marked(tx, _large()):
        assert_same_bits(changed, expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [jax.P("x"), jax.P(None, "x")])
@pytest.mark.parametrize("name", FORMATS)
def test_steps_on_meshes_mark_the_weights_that_they_change(name, spec, axis_type):
    tx = _exact(**FORMATS[name], implementation="pallas")
    sharding = jax.NamedSharding(_mesh(8, axis_type=axis_type), spec)
    params = {"w": _large()["w"].repeat(8, 0).repeat(4, 1)}
    grads = jax.tree.map(lambda x: x * 2, params)
    with jax.set_mesh(sharding.mesh):
        params, grads = jax.device_put((params, grads), sharding)
        state = jax.jit(
            tx.init, out_shardings=lowbit_optax.state_shardings(tx, params, sharding)
        )(params)
        run = jax.jit(functools.partial(patches.step, tx))
        new, _, changed = run(params, state, grads)
        expected = patches.diff(jax.device_get(params), jax.device_get(new))
    assert_same_bits(jax.device_get(changed), jax.device_get(expected))
