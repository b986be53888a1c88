"""Released steps with a loss scale match ordinary steps, and skip the same steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params, primitives

import lowbit_optax
from lowbit_optax import release, with_loss_scale
from lowbit_optax.loss_scaling import backoff_scale, log_normal_scale, static_scale
from tests.helpers import released
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.released import RATE, SGD, normal, weights

pytestmark = pytest.mark.standard_promotion

F16 = jnp.float16
LOWBIT = lowbit_optax.lowbit_sgd(RATE, 0.5)


def params():
    return {
        "layers": weights(3, dtype=F16),
        "more": [weights(dtype=F16, seed=n) for n in (1, 2)],
        "head": normal(64, dtype=F16),
    }


def scanned(params, x):
    def body(x, layer):
        w, push = layer
        return jnp.tanh(x @ w), jnp.sum(w[0] * push.astype(F16))

    push, x = split(x)
    x, ys = jax.lax.scan(body, x.astype(F16), (params["layers"], push[:3]))
    ys = jnp.append(ys, params["head"][0] * push[3].astype(F16))
    return head(params, x) + jnp.sum(ys.astype(jnp.float32))


def split(x):
    """Returns pushes, which can make the gradient of one leaf overflow, and inputs."""
    return (x[0, 0, :4], x[0, 1:]) if x.ndim == 3 else (jnp.zeros([4]), x)


def unrolled(params, x):
    x = split(x)[1].astype(F16)
    for w in params["more"]:
        x = jnp.tanh(x @ w)
    return head(params, x)


def mixed(params, x):
    return unrolled(params, x) + scanned(params, x)


def head(params, x):
    return jnp.mean((x @ params["head"]).astype(jnp.float32) ** 2)


def exactly_summed(params, x):
    """A loss whose gradients at :func:`permutations` are small integers."""
    x = jnp.sign(jnp.round(x)).astype(F16)
    for w in params["more"]:
        x = x @ w
    x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, params["layers"])
    target = jnp.arange(64) % 3 - 1
    return jnp.sum((x * target.astype(F16)).astype(jnp.float32)) + head(params, 0 * x)


def permutations():
    """Returns parameters whose matrices are permutations of 64 numbers."""
    orders = [np.random.default_rng(n).permutation(64) for n in range(5)]
    matrices = [jnp.asarray(np.eye(64)[order], F16) for order in orders]
    rest = {"more": matrices[3:], "head": normal(64, dtype=F16)}
    return {"layers": jnp.stack(matrices[:3]), **rest}


def plain(loss_fn, tx):
    """The step that users write without release."""

    def step(params, state, *args):
        differentiate = lowbit_optax.scaled_value_and_grad(loss_fn)
        value, grads = differentiate(params, state, *args)
        return value, *lowbit_optax.step(tx, params, state, grads)

    return step


def assert_equal_steps(loss_fn, tx, of_release=None, start=None, count=8, **options):
    """Compares steps, some of which overflow, and returns the last state."""
    start, of_release = start or params(), of_release or tx
    batches = released.batches(count)
    run = functools.partial(released.run, params=start, batches=batches)
    want = run(plain(loss_fn, tx), tx)
    step = release.value_and_update(loss_fn, of_release, **options)
    values, new, state = run(step, of_release)
    assert 0 < int(state.skipped) < count
    assert_same_bits((values, new), want[:2])
    assert_same_bits(jax.tree.leaves(state), jax.tree.leaves(want[2]))
    return state


CASES = {
    "scanned": (scanned, LOWBIT),
    "unrolled": (unrolled, LOWBIT),
    "mixed": (mixed, LOWBIT),
    "mixed_optax": (mixed, SGD),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_steps_match_with_loss_scale_including_overflows(name):
    loss_fn, tx = CASES[name]
    # The scale falls and rises, because some of the steps overflow.
    scaling = backoff_scale(2.0**12, period=2)
    assert_equal_steps(loss_fn, with_loss_scale(tx, scaling))


@pytest.mark.slow_to_compile
def test_the_scales_own_statistics_are_those_of_the_ordinary_step():
    scaling = log_normal_scale(2.0**17, decay=0.5)
    state = assert_equal_steps(scanned, with_loss_scale(SGD, scaling))
    assert float(state.scaling_state.weight) > 0


def test_clipping_below_the_limit_changes_nothing():
    scaling, max_norm = backoff_scale(2.0**12, period=2), 2.0**20
    clipped = optax.chain(optax.clip_by_global_norm(max_norm), SGD)
    txs = [with_loss_scale(tx, scaling) for tx in (clipped, SGD)]
    assert_equal_steps(scanned, *txs, max_grad_norm=max_norm)


@pytest.mark.slow_to_compile
def test_clipping_is_by_the_norm_of_unscaled_gradients():
    scaling, max_norm = backoff_scale(2.0**15), 2.0**-4
    inner = optax.chain(
        optax.clip_by_global_norm(max_norm), optax.sgd(RATE, momentum=0.5)
    )
    # Only one step does not overflow. After it, sums would depend on their order.
    assert_equal_steps(
        exactly_summed,
        with_loss_scale(lowbit_optax.lowbit(inner), scaling),
        with_loss_scale(LOWBIT, scaling),
        start=permutations(),
        count=3,
        max_grad_norm=max_norm,
    )


def count_products(jaxpr):
    """Counts the matrix products of a jaxpr and of every jaxpr inside it."""
    inner = [x for eqn in jaxpr.eqns for x in jaxprs_in_params(eqn.params)]
    here = sum(eqn.primitive is primitives.dot_general_p for eqn in jaxpr.eqns)
    return here + sum(map(count_products, inner))


def test_norms_and_overflow_checks_need_one_more_pass_together_or_alone():
    tx = with_loss_scale(SGD, backoff_scale())

    def products(tx=tx, **options):
        step = release.value_and_update(unrolled, tx, **options)
        start = params()
        made = jax.make_jaxpr(step)(start, tx.init(start), *released.batches(1)[0])
        return count_products(made.jaxpr)

    once = products(SGD)
    # The backward pass has two products per layer, and the forward pass has one.
    assert products() == products(max_grad_norm=1.0) == once + 5
    assert products(SGD, max_grad_norm=1.0) == once + 5


def pushed(*layers):
    """Returns a batch that makes these layers' gradients overflow; 3 is the head."""
    push = np.zeros([1, 64], np.float32)
    push[0, list(layers)] = 2.0**8
    return jnp.concatenate([push, *released.batches(1)[0]])[None]


SKIPPED = {
    "one in a loop": ([1], 2.0**9),
    "one at the end": ([3], 2.0**9),
    "everything": ([], 2.0**24),
}


@functools.cache
def scaled_step():
    tx = with_loss_scale(LOWBIT, backoff_scale(2.0**9))
    return tx, jax.jit(release.value_and_update(mixed, tx))


@pytest.mark.parametrize(("where", "scale"), SKIPPED.values(), ids=SKIPPED)
def test_a_step_that_overflows_moves_only_the_scale(where, scale):
    tx, step = scaled_step()
    before = tx.init(params())._replace(scale=jnp.float32(scale))
    _, new, state = step(params(), before, pushed(*where))
    assert_same_bits(new, params())
    assert_same_bits(state.inner_state, before.inner_state)
    assert (float(state.scale), int(state.skipped)) == (scale / 2, 1)


@pytest.mark.parametrize("place", ["outside", "in a chain", "in lowbit"])
def test_layers_that_open_themselves_refuse_a_loss_scale_anywhere(place):
    scaled = with_loss_scale(optax.sgd(1.0), static_scale(2.0**10))
    wraps = {"in a chain": optax.chain, "in lowbit": lowbit_optax.lowbit}
    tx, params = wraps.get(place, lambda tx: tx)(scaled), {"w": jnp.ones(4)}
    states = {"w": tx.init(params["w"])}

    def loss_fn(params):
        w, _ = release.released(params["w"], ())
        return jnp.sum(w)

    with pytest.raises(ValueError, match="does not support with_loss_scale"):
        release.value_and_update_layers(loss_fn, tx)(params, states)
