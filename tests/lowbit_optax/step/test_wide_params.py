"""Float32 parameters cause a warning when a weight format was requested.

Warnings raise errors here, so a test that expects no warning only has to run.
"""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

import lowbit_optax
from lowbit_optax import kahan_adamw, lowbit, training
from lowbit_optax._step import plan
from lowbit_optax.states.checkpoints import storage_formats

SAID = "lowbit. most parameters are float32"
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings(f"error:{SAID}"),
]

ADAMW = optax.adamw(1e-3)
FIX = r"from_master.*TrainState\.create.*nnx_optimizer.*warn=False"


@pytest.fixture(autouse=True)
def nothing_was_said_before():
    plan.warn_once.cache_clear()


class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm()(linen.Dense(64)(x))
        return linen.MultiHeadDotProductAttention(num_heads=2)(x, x)


def _params():
    variables = Model().init(jax.random.key(0), jnp.ones((1, 2, 64)))
    return variables["params"]


def _nnx_model():
    return nnx.Linear(64, 64, rngs=nnx.Rngs(0))


MADE = {
    "init": lambda tx: tx.init(_params()),
    "jit": lambda tx: jax.jit(tx.init)(_params()),
    "flax": lambda tx: train_state.TrainState.create(
        apply_fn=None, params=_params(), tx=tx
    ),
    "from_master in float32": lambda tx: lowbit_optax.from_master(
        tx, _params(), jnp.float32
    ),
    "training.TrainState in float32": lambda tx: training.TrainState.create(
        apply_fn=None, params=_params(), tx=tx, param_dtype=jnp.float32
    ),
    "convert in float32": lambda tx: lowbit_optax.convert(
        _params(), ADAMW.init(_params()), ADAMW, tx, dtype=jnp.float32
    ),
    "nnx": lambda tx: nnx.Optimizer(_nnx_model(), tx, wrt=nnx.Param),
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx).init(_params()),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).init(_params()),
    "with_loss_scale": lambda tx: lowbit_optax.with_loss_scale(
        tx, lowbit_optax.loss_scaling.backoff_scale()
    ).init(_params()),
    "direct_updates": lambda tx: lowbit_optax.direct_updates(tx).init(_params()),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_float32_parameters_warn_once_with_the_lines_that_narrow_them(make):
    with pytest.warns(UserWarning, match=rf"(?s)kernel.*float32.*{FIX}"):
        make(kahan_adamw(1e-3))
    make(kahan_adamw(1e-3))


def test_the_warning_for_quantized_weights_names_quantize_params():
    with pytest.warns(UserWarning, match="quantize_params"):
        lowbit_optax.lpmm_adam(1e-3).init(_params())
    params = lowbit_optax.lpmm.quantize_params(_params(), bits=12, min_size=0)
    lowbit_optax.lpmm_adam(1e-3).init(params)


STARTS = {
    "from_master": lowbit_optax.from_master,
    "with_master": lambda tx, params: lowbit_optax.with_master(tx, params).init(
        lowbit_optax.from_master(tx, params, jnp.bfloat16, None)[0]
    ),
    "TrainState.create": lambda tx, params: training.TrainState.create(
        apply_fn=None, params=params, tx=tx
    ),
    "nnx_optimizer": lambda tx, params: training.nnx_optimizer(_nnx_model(), tx),
    "init of narrow kernels": lambda tx, params: tx.init(
        lowbit_optax.from_master(tx, params)[0]
    ),
    "memory_report": lowbit_optax.memory_report,
    "plan": lambda tx, params: lowbit_optax.plan(params, 2.0**30),
    "explain": lowbit_optax.explain,
    "eval_shape": lambda tx, params: jax.eval_shape(tx.init, params),
    "storage_formats": storage_formats,
    "convert": lambda tx, params: lowbit_optax.convert(
        params, ADAMW.init(params), ADAMW, tx
    ),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_functions_that_narrow_or_only_report_cause_no_warning(start):
    start(lowbit(optax.adamw(1e-3)), _params())


def test_storing_only_moments_in_fewer_bits_can_be_requested():
    lowbit(optax.adamw(1e-3), warn=False).init(_params())
    kahan_adamw(1e-3, warn=False).init(_params())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=SAID)
        kahan_adamw(1e-3).init(_params())


def test_float32_leaves_next_to_narrow_matrices_cause_no_warning():
    # A partition passes layers of biases and norms without their matrices.
    params = {
        "norm": {"scale": jnp.ones((96, 64)), "bias": jnp.ones((96, 64))},
        "dense": {"bias": jnp.ones((96, 64)), "kernel": optax.MaskedNode()},
        "vector": jnp.ones(8192),
    }
    kahan_adamw(1e-3).init(params)
    kahan_adamw(1e-3).init({"few": jnp.ones((8, 8))})
    halves = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 65), jnp.bfloat16)}
    kahan_adamw(1e-3).init(halves)
