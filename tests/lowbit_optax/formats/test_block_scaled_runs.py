"""Block-scaled weights work with conversion, checkpoints, meshes, scans and reports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import lowbit_optax
from lowbit_optax import convert, lowbit, lpmm, release
from lowbit_optax._step import plan
from lowbit_optax.block_scaling import block_scale
from lowbit_optax.states.checkpoints import check_storage_formats, storage_formats
from tests.helpers.optimizers import assert_same_bits, normal

pytestmark = pytest.mark.standard_promotion

TX = lowbit(optax.sgd(0.1, 0.9))
MASTER = {"w": normal(0, (64, 96)) / 8, "b": normal(1, (96,))}
LIKE = jax.eval_shape(block_scale, MASTER)


@functools.cache
def begun():
    return jax.jit(lambda master: lowbit_optax.from_master(TX, master, LIKE))(MASTER)


def converted(run, from_tx, to_tx, dtypes=None):
    """``convert`` under jit, which avoids compiling every operation separately."""
    by = dict(from_tx=from_tx, to_tx=to_tx, dtype=dtypes)
    return jax.jit(functools.partial(convert, **by))(*run)


# Other formats.


def test_weights_pass_through_other_formats_and_come_back():
    params, state = begun()
    for tx, dtypes in (
        (optax.sgd(0.1, 0.9), None),
        (lowbit(optax.sgd(0.1, 0.9)), jnp.bfloat16),
        (lowbit(optax.sgd(0.1, 0.9), weights=lowbit_optax.master_copy()), LIKE),
    ):
        other = converted((params, state), TX, tx, dtypes)
        if dtypes is None:
            assert_same_bits(other[0], lowbit_optax.master_weights(params, state))
        back = converted(other, tx, TX, LIKE)
        assert_same_bits((back[0], back[1].residual), (params, state.residual))


def test_quantised_weights_of_other_kinds_turn_into_each_other():
    tx = lowbit_optax.lpmm_sgd(0.1, 0.9)
    twelve = jax.eval_shape(
        functools.partial(lowbit_optax.lpmm.quantize_params, bits=12), MASTER
    )
    params, state = converted(begun(), TX, tx, twelve)
    assert isinstance(params["w"], lowbit_optax.lpmm.QuantizedTensor)
    params, state = converted((params, state), tx, TX, LIKE)
    got = lowbit_optax.master_weights(params, state)["w"]
    np.testing.assert_allclose(got, MASTER["w"], atol=1e-3)


# Checkpoints.


def test_a_checkpoint_of_blocks_along_another_axis_is_refused():
    other = block_scale(MASTER, axis=-1)
    with pytest.raises(ValueError, match=r"scales_e8m0.*\[64, 3\].*\[2, 96\]"):
        serialization.from_bytes(other, serialization.to_bytes(begun()[0]))
    saved = storage_formats(TX, LIKE)
    assert saved["params['w']"] == (
        "float32[64, 96] in e4m3 codes, e8m0 scales of 32 along axis -2, "
        "nearest_8_bits_v2 uint32[16, 96]"
    )
    with pytest.raises(ValueError, match=r"along axis -2, .* along axis -1, "):
        check_storage_formats(saved, TX, other)


# Meshes and scans.


def test_the_error_names_sizes_that_divide():
    tx, mesh = lowbit(optax.sgd(0.1)), jax.sharding.AbstractMesh((16,), ("x",))
    shape = lambda rows: jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    params = [jax.eval_shape(block_scale, shape(rows)) for rows in (160, 192)]
    with pytest.raises(ValueError, match="multiple of 64 for its size, such as 128 or"):
        lowbit_optax.state_shardings(tx, params[0], jax.P("x"), mesh=mesh)
    lowbit_optax.state_shardings(tx, params[1], jax.P("x"), mesh=mesh)


def test_layers_are_updated_in_the_backward_pass_as_after_it():
    layers = {"w": normal(0, (3, 64, 64)) / 8}
    like = jax.eval_shape(block_scale, layers)
    params, state = lowbit_optax.from_master(TX, layers, like)
    x = normal(1, (4, 64))

    def loss(params, x):
        @jax.checkpoint
        def body(x, layer):
            return jnp.tanh(x @ layer["w"].dequantize()), None

        return jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)

    @jax.jit
    def usual(params, state):
        value, grads = lpmm.value_and_grad(loss, lazy=True)(params, x)
        return value, *lowbit_optax.step(TX, params, state, grads)

    released = jax.jit(release.value_and_update(loss, TX))
    assert_same_bits(released(params, state, x), usual(params, state))


# Reports.


def test_a_report_counts_codes_scales_and_residuals():
    report = lowbit_optax.memory_report(TX, {"w": LIKE["w"]})
    (row,) = report.leaves
    assert (row.dtype, row.params, row.residual) == ("mxfp8", 6144 + 192, 6144)


def test_a_warning_says_that_gpus_have_no_kernel():
    plan.warn_once.cache_clear()
    device = AbstractDevice("NVIDIA H200", 132, platform="gpu")
    mesh = AbstractMesh((4,), ("a",), (AxisType.Auto,), abstract_device=device)
    large = {"w": jax.ShapeDtypeStruct((1024, 512), jnp.float32)}
    tx, params = lowbit(optax.sgd(0.1)), jax.eval_shape(block_scale, large)
    with jax.sharding.use_abstract_mesh(mesh):
        found = lowbit_optax.explain(tx, params)
        text = r"no kernel updates params\['w'\], a BlockScaledTensor of shape"
        state = jax.eval_shape(tx.init, params)
        step = functools.partial(lowbit_optax.step, tx)
        with pytest.warns(UserWarning, match=text):
            jax.eval_shape(step, params, state, large)
    assert list(found) == ["['w']"]
    assert found["['w']"].startswith("XLA: ")
    assert "block-scaled float8" in found["['w']"]
