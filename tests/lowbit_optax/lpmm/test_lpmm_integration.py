"""Quantised weights work with optax's wrappers, jit, devices, flax and checkpoints."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import train_state

import lowbit_optax
from lowbit_optax import lpmm_sgd, training
from tests.helpers.optimizers import apply, assert_same_bits, initial, train
from tests.helpers.quantized_weights import quantizer

pytestmark = pytest.mark.standard_promotion

SHAPES = {"kernel": (128, 64), "other": (64, 96), "bias": (64,)}


def arrays(seed=0, scale=1.0):
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(scale * random.normal(size=shape), jnp.float32)
        for name, shape in SHAPES.items()
    }


def params_of(bits=12):
    return quantizer(bits)(arrays())


def series(count):
    return [arrays(100 + i, 0.1) for i in range(count)]


def trained(tx, params, grads, advance=apply):
    """Returns the parameters after training from the initial state."""
    return train(tx, params, initial(tx, params), grads, advance)[0]


# Wrappers.


@pytest.mark.slow_to_compile
@pytest.mark.parametrize("advance", [apply, lowbit_optax.step])
def test_partition_and_masked_train_each_weight_with_its_own_optimizer(advance):
    labels = {"kernel": "low", "other": "low", "bias": "plain"}
    low, plain = lpmm_sgd(0.1, 0.9), optax.adam(0.01)
    parted = optax.partition({"low": low, "plain": plain}, labels)
    is_low = {name: label == "low" for name, label in labels.items()}
    is_plain = {name: not low for name, low in is_low.items()}
    masked = optax.chain(optax.masked(low, is_low), optax.masked(plain, is_plain))
    params, grads = params_of(), series(3)
    got = trained(parted, params, grads, advance)
    assert_same_bits(trained(masked, params, grads, advance), got)

    some = {k: params[k] for k in ("kernel", "other")}
    want = trained(low, some, [{k: g[k] for k in some} for g in grads])
    assert_same_bits({k: got[k] for k in some}, want)
    bias = trained(plain, params["bias"], [g["bias"] for g in grads])
    np.testing.assert_array_equal(got["bias"], bias)


# Training states and checkpoints.


@pytest.mark.parametrize("kind", [train_state.TrainState, training.TrainState])
def test_train_states_take_the_same_steps_and_serialize(kind):
    tx = lpmm_sgd(0.1, 0.9)
    create = jax.jit(functools.partial(kind.create, apply_fn=None, tx=tx))
    make = lambda bits=12: create(params=params_of(bits))
    run = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    state = make()
    for grads in series(3):
        state = run(state, grads)
    want = train(
        tx, params_of(), initial(tx, params_of()), series(3), lowbit_optax.step
    )
    assert_same_bits((state.params, state.opt_state), want)
    restored = serialization.from_bytes(make(), serialization.to_bytes(state))
    assert_same_bits(restored.params, state.params)
    assert_same_bits(run(restored, grads), run(state, grads))
    with pytest.raises(ValueError, match=r"QuantizedTensor: codes_v2 .*checkpoint"):
        serialization.from_bytes(make(8), serialization.to_bytes(state))


FLAX_IS_LATER = """
import sys
import jax.numpy as jnp
import lowbit_optax
assert "flax" not in sys.modules
params = lowbit_optax.lpmm.quantize_params({"w": jnp.ones((64, 64))})
from flax import serialization
restored = serialization.from_bytes(params, serialization.to_bytes(params))
assert isinstance(restored["w"], lowbit_optax.lpmm.QuantizedTensor)
"""


def test_flax_serializes_tensors_made_before_it_was_imported():
    subprocess.run([sys.executable, "-c", FLAX_IS_LATER], check=True)
