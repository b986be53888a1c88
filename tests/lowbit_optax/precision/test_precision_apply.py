"""Losses with rounded tensors match equation (1) of Lee et al."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowbit_optax
from lowbit_optax import precision
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.rounded_losses import gradient, uniform

EXACT = precision.Formats(low=precision.HFP8.low, high=precision.FP32)
FEW_BITS = precision.Formats(low=precision.FloatFormat(5, 2), high=precision.FP32)


def model(e, m, b=0, infinity=False):
    """Rounds to fp(e, m, b) in float64, as defined in section 2 of the paper."""
    bias = 2 ** (e - 1) - 1 + b
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2.0**-m)

    def round_(x):
        x = np.asarray(x, np.float64)
        exponent = np.frexp(x)[1] - 1
        unit = 2.0 ** (np.maximum(exponent, 1 - bias) - m)
        y = np.rint(x / unit) * unit
        past = np.copysign(np.inf if infinity else largest, x)
        return jnp.asarray(np.where(np.abs(y) > largest, past, y), jnp.float32)

    round_.overflow = lambda x: np.mean(np.abs(np.asarray(x)) > largest)
    return round_


LOW, HIGH = model(4, 3, 4), model(6, 9)
LOW_BACKWARD, HIGH_BACKWARD = model(5, 2, infinity=True), model(6, 9, infinity=True)


class Rounding:
    """Rounds tensors by name and records their overflows."""

    def __init__(self, assignment):
        low, low_backward = assignment.low, assignment.low_backward
        self.names = [tensor.name for tensor in assignment.plan.tensors]
        self.low = dict(zip(self.names, low, strict=True))
        self.low_backward = dict(zip(self.names, low_backward, strict=True))
        self.shares = {name: [] for name in self.names}

    def forward(self, name, x):
        round_ = LOW if self.low[name] else HIGH
        self.shares[name].append(round_.overflow(x))
        return round_(x)

    def backward(self, name, x):
        return (LOW_BACKWARD if self.low_backward[name] else HIGH_BACKWARD)(x)

    def both(self, name, x):
        """Rounds the tensor and, in the backward pass, its cotangent."""
        rounded = jax.custom_vjp(functools.partial(self.forward, name))
        rounded.defvjp(
            lambda x: (self.forward(name, x), None),
            lambda _, cotangent: (self.backward(name, cotangent),),
        )
        return rounded(x)

    @property
    def overflow(self):
        shares = (self.shares[name] or 0 for name in self.names)  # 0 if never computed
        return np.array([np.mean(share) for share in shares], np.float32)


def residual(w, x):
    h = jnp.tanh(x @ w["in"])
    return jnp.sum(jnp.square((h + jnp.tanh(h @ w["mid"])) @ w["out"]))


def recurrent(w, xs):
    def cell(h, x):
        return jax.nn.relu(x @ w["in"] + h @ w["mid"]), None

    h, _ = lax.scan(cell, jnp.zeros((2, 4)), xs)
    return jnp.sum(jnp.square(h @ w["out"]))


def by_hand(loss_of_tensors):
    """Returns a function that evaluates loss, gradients and overflow."""

    def evaluate(assignment, w, x, *more):
        r = Rounding(assignment)
        x = r.forward("batch[0]", x)

        def loss_fn(w):
            w = {
                name: r.both(f"params['{name}']", matrix) for name, matrix in w.items()
            }
            return loss_of_tensors(r.both, w, x, *more)

        return *jax.value_and_grad(loss_fn)(w), r.overflow

    return evaluate


@by_hand
def recurrent_by_hand(tensor, w, xs):
    h = jnp.zeros((2, 4))
    for x in xs:
        a = tensor("scan.0/dot_general.0", x @ w["in"])
        b = tensor("scan.0/dot_general.1", h @ w["mid"])
        h = tensor("scan.0/relu.0", jax.nn.relu(a + b))
    return jnp.sum(jnp.square(tensor("dot_general.0", h @ w["out"])))


@by_hand
def residual_by_hand(tensor, w, x):
    # The cotangent of h is rounded once, after the sum.
    h = tensor("tanh.0", jnp.tanh(tensor("dot_general.0", x @ w["in"])))
    b = tensor("dot_general.1", h @ w["mid"])
    s = tensor("add.0", h + jnp.tanh(b))
    return jnp.sum(jnp.square(tensor("dot_general.2", s @ w["out"])))


def conditional(w, x, is_deep):
    h = jnp.tanh(x @ w["in"])
    h = lax.cond(is_deep, lambda h: jnp.tanh(h @ w["mid"]), lambda h: h * h, h)
    return jnp.sum(jnp.square(h @ w["out"]))


@by_hand
def conditional_by_hand(tensor, w, x, is_deep):
    h = tensor("tanh.0", jnp.tanh(tensor("dot_general.0", x @ w["in"])))
    if is_deep:
        b = tensor("cond.0/branch1/dot_general.0", h @ w["mid"])
        h = tensor("cond.0/branch1/tanh.0", jnp.tanh(b))
    else:
        h = tensor("cond.0/branch0/mul.0", h * h)
    return jnp.sum(jnp.square(tensor("dot_general.1", h @ w["out"])))


def dyadic(seed, *shape, unit=0.125):
    """Returns numbers with few bits, which float32 sums exactly in any order."""
    return jnp.asarray(
        np.random.default_rng(seed).integers(-12, 12, shape) * unit, "f4"
    )


def weights(rows=3):
    return {
        "in": dyadic(1, rows, 4),
        "mid": dyadic(2, 4, 4),
        "out": dyadic(3, 4, 2),
    }


ASSIGNMENTS = {
    "uniform": precision.uniform,
    "demoted": lambda plan: precision.demote(plan, 0.3),
    "operators": precision.operator_based,
    "operators and outputs": functools.partial(precision.operator_based, outputs=True),
}
NETWORKS = {
    "residual": (residual, residual_by_hand, dyadic(0, 2, 3), ()),
    "recurrent": (recurrent, recurrent_by_hand, dyadic(0, 3, 2, 3), ()),
    "one branch": (conditional, conditional_by_hand, dyadic(0, 2, 3), (True,)),
    "the other": (conditional, conditional_by_hand, dyadic(0, 2, 3), (False,)),
}


@pytest.mark.skipif(
    getattr(jax.config, "jax_custom_vjp3", False),
    reason="the network by hand counts in numpy, and jax_custom_vjp3 traces its rules",
)
@pytest.mark.parametrize("size", [1.0, 16.0], ids=["small", "overflowing"])
@pytest.mark.parametrize("name", ASSIGNMENTS)
@pytest.mark.parametrize("network", NETWORKS)
def test_losses_match_equation_1(network, name, size):
    loss_fn, evaluate, x, more = NETWORKS[network]
    w, batch = weights(), (size * x, *map(jnp.asarray, more))
    assignment = ASSIGNMENTS[name](precision.trace(loss_fn, w, *batch))
    # Run operation by operation, as `by_hand` does. On some processors, XLA contracts
    # 1 - tanh(x)^2, which cancels where tanh saturates, into a multiply-add.
    with jax.disable_jit(network != "recurrent"):  # relu is exact in a compiled scan
        (loss, overflow), grads = gradient(loss_fn, assignment)(w, *batch)
    want = evaluate(assignment, w, *batch)
    np.testing.assert_array_equal(loss, want[0])
    for key in w:
        np.testing.assert_array_equal(grads[key], want[1][key], err_msg=key)
    np.testing.assert_allclose(overflow, want[2], rtol=1e-6)
    if name == "uniform" and size > 1:
        assert np.any(want[2] > 0)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3))(x)))
        return nn.Dense(3)(nn.max_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1))


def convolutions():
    net, x = ConvNet(), dyadic(0, 2, 4, 4, 2)
    variables = net.init(jax.random.key(0), x)

    def loss_fn(params, x):
        out, new = net.apply(variables | {"params": params}, x, mutable="batch_stats")
        return jnp.mean(out**2), new

    return loss_fn, variables["params"], x


def attention(w, x):
    q, k, v = (x @ w[name] for name in ("in", "mid", "out"))
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), q @ k.mT, -1e9)
    return jnp.mean((jax.nn.softmax(scores) @ v) ** 2)


def stacked(w, x):
    layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
    return jnp.mean(lax.scan(layer, x, w)[0] ** 2)


def skipping(w, x):
    """Skips some layers and checkpoints others."""

    def layer(h, numbered):
        i, w = numbered
        deep = lambda h: h + jnp.tanh(h @ w)
        branches = [lambda h: h, deep, jax.checkpoint(deep)]
        return lax.switch(i, branches, h), None

    return jnp.mean(lax.scan(layer, x, (jnp.arange(len(w)), w))[0] ** 2)


def without_aux(loss_fn):
    return lambda w, x: (loss_fn(w, x), {"x": x, "number": 3})


MODELS = {
    "residual": (without_aux(residual), weights(), dyadic(0, 2, 3)),
    "convolutions": convolutions(),
    "attention": (without_aux(attention), weights(4), dyadic(0, 2, 5, 4)),
    "recurrent": (without_aux(recurrent), weights(), dyadic(0, 3, 2, 3)),
    "stacked": (without_aux(stacked), dyadic(1, 3, 4, 4), dyadic(0, 2, 4)),
    "skipping": (without_aux(skipping), dyadic(1, 3, 4, 4), dyadic(0, 2, 4)),
}


# XLA fuses convolutions with later operations only at its default level.
default_level = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": "3"}
)


@pytest.mark.parametrize(
    ("name", "jit"),
    [
        ("residual", lambda f: f),
        *((name, jax.jit) for name in MODELS if name != "convolutions"),
        ("convolutions", default_level),
    ],
)
def test_all_in_float32_is_the_loss_itself(name, jit):
    loss_fn, w, x = MODELS[name]
    plan = precision.trace(loss_fn, w, x, has_aux=True)
    exact = gradient(loss_fn, precision.demote(plan, 0, formats=EXACT), has_aux=True)
    (loss, (aux, overflow)), grads = jit(exact)(w, x)
    want = jit(jax.value_and_grad(loss_fn, has_aux=True))(w, x)
    # Outside of jit, the number in aux is not an array.
    got, want = jax.tree.map(jnp.asarray, (((loss, aux), grads), want))
    assert_same_bits(got, want)
    np.testing.assert_array_equal(overflow, np.zeros(len(plan.tensors)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(["residual", "stacked"], ["float32", "bfloat16", "float16"]),
        ("recurrent", "float32"),  # its carry is float32
        ("skipping", "float32"),
    ],
)
def test_stored_patterns_change_nothing(name, dtype):
    loss_fn, w, x = jax.tree.map(
        lambda a: a.astype(dtype) if hasattr(a, "dtype") else a, MODELS[name]
    )
    assignment = precision.demote(precision.trace(loss_fn, w, x, has_aux=True), 0.4)
    # Outside of jit, promotion returns levels that are jax.Arrays.
    promoted = precision.promote(assignment, jnp.zeros(len(assignment.low)))
    for seed, a in ((None, assignment), (5, promoted)):
        options = {"has_aux": True, "seed": seed}
        got, want = (
            jax.jit(gradient(loss_fn, a, stored=stored, **options))(w, x)
            for stored in (True, False)
        )
        assert_same_bits(got, want)


def test_the_backward_pass_keeps_patterns_only():
    loss_fn, w, x = without_aux(residual), weights(), dyadic(0, 2, 3)
    plan = precision.trace(loss_fn, w, x, has_aux=True)

    def kept(assignment, stored):
        f = precision.apply(loss_fn, assignment, has_aux=True, stored=stored)
        sizes = {}

        def measure(w, x):
            _, pull, _ = jax.vjp(lambda w: f(w, x), w, has_aux=True)
            for leaf in jax.tree.leaves(pull):
                given = any(leaf is array for array in (*w.values(), x))
                if leaf.size > 1 and not given:
                    sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + leaf.size

        jax.eval_shape(measure, w, x)
        return sizes

    # No cotangent needs the first weights.
    forward = sum(t.size for t in plan.tensors) - w["in"].size
    assert kept(precision.uniform(plan), True).get("uint8") == forward
    assert kept(precision.demote(plan, 0), True).get("uint16") == forward
    assert "float32" not in kept(precision.uniform(plan), True)
    assert "float32" in kept(precision.uniform(plan), False)


@pytest.mark.parametrize("stored", [False, True])
def test_nan_is_not_hidden_by_a_format_without_one(stored):
    w, x = weights(), dyadic(0, 2, 3).at[0, 0].set(jnp.nan)
    f = gradient(residual, uniform(residual, w, x), stored=stored)
    (loss, overflow), grads = jax.jit(f)(w, x)
    assert np.isnan(loss)
    assert np.isnan(grads["in"]).any()
    assert overflow[3] == pytest.approx(1 / 6)


def test_stochastic_rounding_is_unbiased_and_follows_the_seed():
    w, x = jnp.full((1, 64), 0.31), jnp.ones((1, 1))
    loss_fn = lambda w, x: jnp.mean(x @ w)
    assignment = uniform(loss_fn, w, x, formats=FEW_BITS)
    of_seed = lambda seed: precision.apply(loss_fn, assignment, seed=seed)(w, x)[0]
    losses = jax.jit(jax.vmap(of_seed))(jnp.arange(500, dtype=jnp.uint32))
    assert abs(np.mean(losses) - 0.31) < 5e-4
    assert len(np.unique(losses)) > 5
    assert of_seed(7) == losses[7]
    assert of_seed(-1) == of_seed(2**32 - 1)


def test_a_cotangent_is_rounded_by_other_draws_than_its_tensor():
    with_itself = lambda y: (jnp.sum(1.5625 * y), y)
    loss_fn, options = lambda w, x: with_itself(x @ w), {"has_aux": True, "seed": 3}
    w, x = jnp.full((1, 4096), 1.25), jnp.full((1, 1), 1.25)
    plan = precision.trace(loss_fn, w, x, has_aux=True)
    f = gradient(loss_fn, precision.uniform(plan, formats=FEW_BITS), **options)
    (_, (y, _)), grads = f(w, x)
    is_up = y == 1.75, grads / 1.25 == 1.75  # 1.5625 is 1.5 or, once in four, 1.75
    np.testing.assert_allclose(np.mean(is_up[0] & is_up[1]), 1 / 16, atol=0.02)


def test_stochastic_rounding_differs_between_iterations_of_nested_scans():
    def loss_fn(w, xs):
        inner = lambda c, x: (c, x @ w)
        outer = lambda c, rows: (c, lax.scan(inner, c, rows)[1])
        _, ys = lax.scan(outer, jnp.float32(0), xs)
        return jnp.sum(ys), ys

    w, xs = 0.31 * jnp.eye(64), jnp.ones((3, 2, 1, 64))
    plan = precision.trace(loss_fn, w, xs, has_aux=True)
    made = np.array([t.kind == "value" for t in plan.tensors])
    assignment = precision.Assignment(plan, FEW_BITS, made, made)
    f = precision.apply(loss_fn, assignment, has_aux=True, seed=3)
    ys = np.asarray(jax.jit(f)(w, xs)[1][0]).reshape(6, 64)
    np.testing.assert_array_equal(np.unique(ys), [0.25, 0.3125])
    assert len(np.unique(ys, axis=0)) == 6


def test_promotion_recovers_training_that_overflows_forward():
    x = 100 * dyadic(0, 16, 3)
    y = x @ dyadic(1, 3, 2)
    loss_fn = lambda w, x, y: jnp.mean(jnp.square(x @ w - y)) / 1e2
    w = jnp.zeros((3, 2), jnp.bfloat16)
    widened = lambda w, x, y: loss_fn(w.astype(jnp.float32), x, y)
    scaling = lowbit_optax.loss_scaling.backoff_scale(2.0**24)
    tx = lowbit_optax.with_loss_scale(lowbit_optax.kahan_adamw(0.05), scaling)
    compiled = []

    @functools.partial(jax.jit, static_argnums=3)
    def step(assignment, w, state, promoted):
        compiled.append(promoted)
        f = precision.apply(widened, assignment)
        gradient = lowbit_optax.scaled_value_and_grad(f, has_aux=True)
        (_, overflow), grads = gradient(w, state, x, y)
        with jax.numpy_dtype_promotion("standard"):  # for optax
            w, state = lowbit_optax.step(tx, w, state, grads)
        if promoted:
            assignment = precision.promote(assignment, overflow)
        return assignment, w, state

    losses = {}
    for promoted in (False, True):
        assignment = uniform(widened, w, x, y)
        assignment, now, state = jax.tree.map(jnp.asarray, (assignment, w, tx.init(w)))
        for _ in range(150):
            assignment, now, state = step(assignment, now, state, promoted)
        losses[promoted] = widened(now, x, y)
    assert losses[True] < 0.01 * losses[False]
    assert float(lowbit_optax.loss_scaling.current_loss_scale(state)) < 2.0**24
    assert compiled == [False, True]


@pytest.mark.slow_to_compile
def test_a_sharded_batch_gives_the_same_loss():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = weights(), dyadic(0, 16, 3)
    assignment = uniform(residual, w, x)
    for seed in (None, 3):
        f = jax.jit(gradient(residual, assignment, seed=seed))
        sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
        jax.tree.map(close, f(w, sharded), f(w, x))


def test_another_loss_or_a_traced_assignment_is_refused():
    w, x = weights(), dyadic(0, 2, 3)
    assignment = uniform(residual, w, x)
    with pytest.raises(ValueError, match=r"assignment .*tensor 3 is"):
        precision.apply(recurrent, assignment)(w, x[None])
    with pytest.raises(ValueError, match=r"assignment .*stored=True"):
        jax.jit(lambda a: precision.apply(residual, a, stored=True)(w, x))(assignment)
    with pytest.raises(TypeError, match=r"assignment .* got 'uniform'$"):
        precision.apply(residual, "uniform")
