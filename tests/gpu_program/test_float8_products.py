"""Matrix products run in the dtypes of their formats, compiled for H200s."""

import collections

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax import precision
from tests.helpers.rounded_losses import mlp
from tools import hlo
from tools.gpu_program.targets import compile_lowered, gpu_mesh, lower_for


def test_a_gpu_multiplies_float8_by_its_float8_units():
    w = {n: jax.ShapeDtypeStruct((128, 128), jnp.float32) for n in ("in", "mid", "out")}
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    plan = precision.trace(mlp, w, x)
    assignment = precision.uniform(plan, formats=precision.FLOAT8)
    # This tensor stays bfloat16, and so do the two products that read it.
    names = [tensor.name for tensor in plan.tensors]
    assignment.low[names.index("params['mid']")] = False

    native = precision.apply(mlp, assignment, products="native")
    gradient = jax.value_and_grad(native, has_aux=True)
    # Without Triton, each product is a library call. XLA chooses between the two with
    # measurements, which need a device.
    options: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
    compiled = compile_lowered(lower_for(gpu_mesh(), gradient, w, x), options)

    float8, bfloat16 = "__cublas$lt$matmul$f8", "__cublas$lt$matmul"
    calls = collections.Counter(name for name, _, _ in hlo.products(compiled))
    assert calls == {float8: 6, bfloat16: 2}
    dtypes = {name: collections.Counter() for name in calls}
    for name, operands, precisions in hlo.products(compiled):
        dtypes[name][operands] += 1
        # Otherwise, cuBLASLt sums float8 products in fewer bits than float32.
        assert name != float8 or precisions == ("HIGHEST", "HIGHEST")
    assert dtypes[bfloat16] == {("bf16", "bf16"): 2}
    assert dtypes[float8][("f8e4m3fn", "f8e4m3fn")] == 2
    assert sum(dtypes[float8].values()) == 6
    assert all("f8e4m3fn" in operands for operands in dtypes[float8])

    listed = precision.products(mlp, assignment, w, x)
    assert len(listed) == 8
    assert sum("float8" in " ".join(p.dtypes) for p in listed) == 6
    np.testing.assert_equal({p.flop for p in listed}, {2 * 256 * 128 * 128})
