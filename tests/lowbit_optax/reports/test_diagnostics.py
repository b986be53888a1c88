"""A step's report describes the step, and steps without a report are unaffected."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import block_quantized, kahan, lowbit, step_report
from tests.helpers import wrappers
from tests.helpers.optimizers import ALL_FORMATS, normal

pytestmark = pytest.mark.standard_promotion

BF16 = jnp.bfloat16
RATE = 2.0**-10


def float64(x):
    return np.asarray(x, np.float64)


def sgd(weights=None, rate=RATE, **options):
    return lowbit(optax.sgd(rate), weights=weights, min_size=0, **options)


def test_a_report_describes_the_next_step_in_every_weight_format():
    master, grads = normal(0), normal(1).at[::3].set(0)
    quantized = lowbit_optax.lpmm.quantize_params({"w": master}, bits=8)
    txs = {name: sgd(weights) for name, weights in ALL_FORMATS.items()}
    into = lowbit_optax.stochastic_rounding(error_feedback="trace")
    txs["error_feedback"] = lowbit(optax.sgd(RATE, 0.9), weights=into, min_size=0)

    @jax.jit
    def run():
        found = {}
        for name, tx in txs.items():
            params, state = lowbit_optax.from_master(tx, {"w": master}, BF16, None)
            found[name] = stepped(tx, params, state)
        found["8 bits"] = stepped(sgd(), quantized, sgd().init(quantized))
        return found

    def stepped(tx, params, state):
        report = step_report(tx, params, state, {"w": grads}).leaves["w"]
        old = lowbit_optax.master_weights(params, state)["w"]
        new = lowbit_optax.step(tx, params, state, {"w": grads})
        return report, old, lowbit_optax.master_weights(*new)["w"]

    found = run()
    u = -RATE * float64(grads)
    for name, (report, old, new) in found.items():
        d = float64(new) - float64(old)
        moved, noise = np.sum(d * u) / np.sum(u * u), np.linalg.norm(d - u)
        np.testing.assert_allclose(report.moved, moved, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(
            report.noise, noise / np.linalg.norm(u), rtol=1e-3, atol=1e-5, err_msg=name
        )
    rounded = master.astype(BF16)
    same = (rounded + jnp.asarray(u, jnp.float32)).astype(BF16) == rounded
    share = np.mean(np.asarray(same)[u != 0])
    assert 0.2 < share < 0.8
    for name in txs:
        if "toward_zero" not in name:  # its parameters differ
            assert float(found[name][0].lost) == pytest.approx(share, abs=1e-6), name
    reports = {name: report for name, (report, _, _) in found.items()}
    assert reports["extra_bits_16"].noise < 1e-4 < reports["extra_bits_8"].noise
    assert reports["extra_bits_8"].noise < reports["stochastic_rounding"].noise
    assert abs(reports["extra_bits_8"].moved - 1) < 0.01


def test_a_report_distinguishes_moments_of_few_and_of_many_bits():
    grads = {"w": normal(1)}
    params = {"w": normal(0, dtype=BF16)}
    moments = {
        "cast": lowbit_optax.cast(BF16, rounding="nearest"),
        "8": block_quantized(8),
        "4": block_quantized(4),
        "float32": "float32",
    }
    txs = {
        name: lowbit(optax.adam(1e-3), moments=format_, min_size=0)
        for name, format_ in moments.items()
    }
    errors = jax.jit(
        lambda: {
            name: step_report(tx, params, tx.init(params), grads).leaves
            for name, tx in txs.items()
        }
    )()
    errors = {name: leaves["w"].moment_errors for name, leaves in errors.items()}
    # After one step, the first moment is a tenth of the gradient.
    mu = 0.1 * grads["w"]
    want = np.linalg.norm(float64(mu.astype(BF16)) - float64(mu)) / np.linalg.norm(mu)
    assert errors["cast"]["mu"] == pytest.approx(want, rel=1e-2)
    assert errors["float32"] == {}
    assert all(1e-3 < errors["8"][field] < 0.05 for field in ("mu", "nu"))
    assert 0.05 < errors["4"]["mu"] < 0.5


def test_overflows_are_counted():
    tx = sgd(kahan(), rate=1.0)
    params = jnp.full((8, 8), 6e4, jnp.float16)
    grads = jnp.zeros((8, 8)).at[0, 0].set(-1e5).at[1, 1].set(jnp.nan)
    report = jax.jit(functools.partial(step_report, tx))(params, tx.init(params), grads)
    report = report.leaves
    assert (report.overflows, report.nonfinite_grads) == (1, 1)
    assert report.moved == 1  # no other weight should move


def test_wrappers_report_the_same():
    params = {"kernel": normal(0, dtype=BF16), "frozen": normal(2, (8, 64), BF16)}
    grads = {"kernel": normal(1), "frozen": normal(3, (8, 64))}
    txs = {
        name: wrap(lambda learning_rate: sgd(rate=learning_rate), optax.set_to_zero())
        for name, wrap in wrappers.WRAPPERS.items()
        if name not in ("multi_steps", "accumulation")
    }
    txs |= {
        "bare": sgd(rate=wrappers.RATE),
        "chain in a loss scale": lowbit_optax.with_loss_scale(
            txs["chain"], lowbit_optax.loss_scaling.static_scale(1.0)
        ),
    }
    # The seed depends on the parameters that a transformation sees.
    start = lambda tx: optax.tree.set(tx.init(params), seed=jnp.uint32(0))
    reports = jax.jit(
        lambda: {
            name: step_report(tx, params, start(tx), grads).leaves
            for name, tx in txs.items()
        }
    )()
    want = reports.pop("bare")
    for name, report in reports.items():
        np.testing.assert_array_equal(
            jax.tree.leaves(want["kernel"]), jax.tree.leaves(report["kernel"]), name
        )
        is_masked = name in ("masked", "partition")
        assert (report["frozen"] is None) == is_masked


@pytest.mark.parametrize("under", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_step_in_a_conditional_is_refused(under):
    tx = optax.MultiSteps(sgd(), 2).gradient_transformation()
    params = {"w": normal(0, dtype=BF16)}
    with pytest.raises(ValueError, match=r"step_report: .*conditional"):
        under(functools.partial(step_report, tx))(params, tx.init(params), params)


def test_a_step_after_a_report_is_the_same_program():
    tx = sgd(implementation="xla")
    params = {"w": normal(0, dtype=BF16)}
    arguments = params, tx.init(params), {"w": normal(1)}

    def program():
        # Use a new function each time, because traces are cached by function.
        return str(jax.make_jaxpr(lambda *x: lowbit_optax.step(tx, *x))(*arguments))

    before = program()
    jax.eval_shape(lambda *x: step_report(tx, *x), *arguments)
    assert program() == before
