"""The process of ``test_memory_of_restore.py``: restores, and prints its memory use.

    python tests/helpers/processes/restore_and_measure.py FOLDER SPEC [GIGABYTES]

It prints the bytes of the restored run, and the largest growth of the process in bytes.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax

TX = lowbit_optax.lowbit_adamw(1e-3)
SPECS = {"rows": P(("x", "y")), "both": P("y", "x")}
LARGE, SMALL = (8, 2048, 1024), (1, 512, 128)


def shapes(count, rows, columns, spec):
    """Parameters and state of ``count`` matrices, with their shardings."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    matrix = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
    params = {f"w{number}": matrix for number in range(count)}
    placed = jax.tree.map(lambda _: NamedSharding(mesh, spec), params)
    shardings = placed, lowbit_optax.state_shardings(TX, params, placed)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        (params, jax.eval_shape(TX.init, params)),
        shardings,
    )


def _restore(folder: Path, target, gigabytes: float | None):
    if gigabytes is None:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(folder, target)
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=gigabytes)
    places = ocp.checkpoint_utils.construct_restore_args(target)
    with ocp.Checkpointer(handler) as checkpointer:
        return checkpointer.restore(
            folder, args=ocp.args.PyTreeRestore(target, restore_args=places)
        )


def _memory(field: str) -> int:
    """Bytes of the process: ``VmRSS`` now, or ``VmHWM`` at most.

    The maximum of ``resource.getrusage`` includes the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(found.split()[1]) * 1024


def _main(folder: str, spec: str, gigabytes: str | None = None) -> None:
    limit = None if gigabytes is None else float(gigabytes)
    # A first restore allocates all memory that does not depend on the size.
    _restore(Path(folder) / "small", shapes(*SMALL, SPECS[spec]), limit)
    before = _memory("VmRSS")
    run = _restore(Path(folder) / "large", shapes(*LARGE, SPECS[spec]), limit)
    jax.block_until_ready(run)
    held = sum(x.nbytes for x in jax.tree.leaves(run))
    print(held, _memory("VmHWM") - before)


if __name__ == "__main__":
    _main(*sys.argv[1:])
