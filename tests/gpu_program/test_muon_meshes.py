"""On a mesh, Muon's matrices are moved once to other devices, and once back."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from tools.gpu_program.steps import fast
from tools.gpu_program.targets import compile_lowered, gpu_mesh
from tools.hlo import exchanged, memory

STACK = (24, 1024, 4096)


def costs(mesh, spec, shape=STACK):
    """Bytes exchanged by kind and temporary bytes, per parameter of a shard."""
    place = NamedSharding(mesh, spec)
    tx = lowbit_optax.lowbit_muon(0.02, param_shardings=place)
    params = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
    shardings = lowbit_optax.state_shardings(tx, params)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        shardings,
    )
    step = jax.jit(fast(tx), donate_argnums=(0, 1), out_shardings=(place, shardings))
    with jax.set_mesh(place.mesh):
        compiled = compile_lowered(step.lower(params, state, params), {})
    per = math.prod(shape) / mesh.size
    sent = {kind: size / per for kind, size in exchanged(compiled).items()}
    return sent, memory(compiled).temp_size_in_bytes / per


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P(None, "d"), P(None, None, "d")], ids=str)
def test_a_stack_travels_in_bfloat16_to_whole_matrices_and_back(spec, axis):
    sent, temporary = costs(gpu_mesh(8, axis), spec)
    assert sent == {"all-to-all": 4}
    assert temporary < 7.1


def test_a_stack_by_rows_and_columns_travels_along_one_axis_after_the_other():
    # In a single move along both axes, XLA would replicate the stack.
    devices = np.reshape(gpu_mesh(8).devices, (4, 2))
    mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sent, temporary = costs(mesh, P(None, "x", "y"))
    assert sent == {"all-to-all": 8}
    assert temporary < 7.1


def test_a_stack_of_whole_layers_exchanges_nothing():
    assert costs(gpu_mesh(8), P("d"))[0] == {}


def test_a_single_matrix_is_gathered_in_bfloat16():
    assert costs(gpu_mesh(8), P("d"), shape=(4096, 4096))[0] == {"all-gather": 2 * 8}


def test_on_256_devices_no_device_holds_more_than_a_layer():
    sent, temporary = costs(gpu_mesh(256), P(None, None, "d"))
    layer = 256 / STACK[0]  # a layer has this many times the parameters of a shard
    assert sent == {"all-to-all": pytest.approx(4 * layer)}
    # A layer and its products are in float32. The whole stack would need 24 times that.
    assert temporary < 13 * layer
