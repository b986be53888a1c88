"""Precision assignments, compiled for H200s: roundings stay, and storage is small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from lowbit_optax import precision
from lowbit_optax.precision import HFP8, FloatFormat
from tools.gpu_program.ptx.program import compile_program
from tools.gpu_program.targets import compile_for, gpu_mesh, lower_for

FORMATS = [
    HFP8.low,
    HFP8.low_backward,
    HFP8.high,
    FloatFormat.of("bfloat16"),
    FloatFormat.of("float8_e4m3fn"),
]


def float32_values():
    """Every finite bfloat16 number, with low bits that are near zero or near a tie."""
    leading = np.arange(2**16, dtype=np.uint32) << 16
    low = np.random.default_rng(0).choice([0, 1, 0x7FFF, 0x8000, 0x8001], 2**16)
    values = (leading | low.astype(np.uint32)).view(np.float32)
    return jnp.asarray(values[np.isfinite(values)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_gpu_program_rounds_as_the_cpu_does(fmt, dtype):
    def both(x):
        rounded = fmt.round(x)
        return rounded, fmt.decode(fmt.encode(rounded))

    x = float32_values().astype(dtype)
    on_gpu = compile_program(lower_for(gpu_mesh(), both, x)).run(x)
    for got, want in zip(on_gpu, both(x), strict=True):
        unsigned = np.dtype(f"uint{8 * want.dtype.itemsize}")
        np.testing.assert_array_equal(got.view(unsigned), want.view(unsigned))


def test_a_gpu_program_rounds_tensors_and_cotangents_as_the_cpu_does():
    def loss_fn(w, x):
        return jnp.sum(jnp.square(checkpoint_name(w * x, "v")))

    w = jnp.asarray(np.random.default_rng(1).normal(size=4096), jnp.float32)
    x = jnp.asarray(2.0 ** np.random.default_rng(2).integers(-8, 8, 4096), jnp.float32)
    plan = precision.trace(loss_fn, w, x)
    assert [tensor.name for tensor in plan.tensors] == ["params", "v"]

    def gradient(w, x, assignment):
        return jax.grad(precision.apply(loss_fn, assignment), has_aux=True)(w, x)

    for assignment in precision.uniform(plan), precision.demote(plan, 0):
        given = w, x, assignment
        program = compile_program(lower_for(gpu_mesh(), gradient, *given))
        got, want = map(jax.tree.leaves, (program.run(*given), gradient(*given)))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
        assert (got[0] != np.asarray(2 * w * x * x)).mean() > 0.5


def test_stored_tensors_of_layers_take_the_bits_of_their_formats():
    width, batch = 256, 16384

    def loss_fn(w, x):
        x, _ = lax.scan(lambda x, layer: (jax.nn.relu(x @ layer), None), x, w)
        return jnp.mean(jnp.square(x))

    def temporary(depth, **options):
        """Temporary bytes per element of an activation."""
        w = jax.ShapeDtypeStruct((depth, width, width), jnp.float32)
        x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
        assignment = precision.uniform(precision.trace(loss_fn, w, x))
        rounded = precision.apply(loss_fn, assignment, **options)
        compiled = compile_for(gpu_mesh(), jax.grad(rounded, has_aux=True), w, x)
        return compiled.memory_analysis().temp_size_in_bytes / (batch * width)

    per_layer = lambda **options: (
        (temporary(12, **options) - temporary(4, **options)) / 8
    )
    assert per_layer() > 4.9
    # A product and an activation with 8 bits each.
    assert per_layer(stored=True) < 2.1
