"""The cost of shards that split blocks or words, on eight H200s."""

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from tools.gpu_program.steps import fast, leaf
from tools.gpu_program.targets import compile_lowered, gpu_mesh
from tools.hlo import collectives, exchanged, kernels, memory

pytestmark = pytest.mark.usefixtures("by_triton")

DEVICES, COLUMNS = 8, 4096


def _compiled(tx, rows, uneven, columns=COLUMNS, axis=AxisType.Auto):
    """A step on a leaf whose rows are sharded over the devices."""
    params = leaf(rows, columns)
    by_rows = NamedSharding(gpu_mesh(DEVICES, axis), P("d"))
    of_state = lowbit_optax.state_shardings(tx, params, by_rows, uneven=uneven)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    params = place(params, by_rows)
    state = jax.tree.map(place, jax.eval_shape(tx.init, params), of_state)
    step = jax.jit(fast(tx), donate_argnums=(0, 1), out_shardings=(by_rows, of_state))
    with jax.set_mesh(by_rows.mesh):
        return compile_lowered(step.lower(params, state, params), {})


def _costs(compiled, rows, columns):
    """Bytes stored, moved and temporary per parameter of a shard, and collectives."""
    found, per = memory(compiled), rows * columns / DEVICES
    gradient = 2
    return (
        found.argument_size_in_bytes / per - gradient,
        sum(size for _, size in kernels(compiled)) / per,
        found.temp_size_in_bytes / per,
        len(collectives(compiled)),
    )


LOWBIT = lowbit_optax.lowbit_adamw(1e-3)
# The figures of docs/sharding.md. JAX 0.12 has different temporary bytes.
ROWS = [
    (LOWBIT, 4096, (5.1, 12.3, 0, 0)),
    (LOWBIT, 4128, (6, 39.6, 7, 10)),
    (LOWBIT, 4072, (27, 108.6, 17.6, 6)),
    # Without packed arrays, the state is sharded like its parameter.
    (lowbit_optax.kahan_adamw(1e-3), 4072, (8, 18.05, 0, 0)),
]


@pytest.mark.parametrize(("tx", "rows", "costs"), ROWS)
def test_uneven_shards_cost_what_the_page_says(tx, rows, costs):
    stored, moved, temporary, count = costs
    got = _costs(_compiled(tx, rows, "replicate"), rows, COLUMNS)
    assert got[0] == pytest.approx(stored, abs=0.05)
    assert got[1] == pytest.approx(moved, abs=0.06)
    assert temporary / 2 <= got[2] <= 1.2 * temporary + 0.01
    assert got[3] == count


OTHER_AXIS = [
    (1000, 1024, AxisType.Auto),
    (1000, 1024, AxisType.Explicit),
    (4128, 4096, AxisType.Auto),
    (4072, 4096, AxisType.Auto),
]


@pytest.mark.parametrize(("rows", "columns", "axis"), OTHER_AXIS)
def test_over_another_axis_a_step_exchanges_and_gathers_nothing(rows, columns, axis):
    # The gradient, the old and the new parameter are moved to the state's columns: 2
    # bytes each, which are read and written in order to be sent in pieces.
    compiled = _compiled(LOWBIT, rows, "other_axis", columns, axis)
    sent = {kind: size * DEVICES for kind, size in exchanged(compiled).items()}
    assert sent == {"all-to-all": 3 * 2 * rows * columns}
    stored, moved, temporary, _ = _costs(compiled, rows, columns)
    assert stored == pytest.approx(5.13, abs=0.01)
    assert moved <= 12.3 + 3 * 4
    assert temporary <= 4.1
