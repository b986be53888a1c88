"""A process for ``test_several_processes.py`` that trains, saves and resumes.

A process that resumes also writes patches of the weights that each step changed.

    python tests/helpers/processes/one_of_several.py RANK COUNT PORT FOLDER save|resume

The eight devices of a run are divided among its COUNT processes.
"""

import functools
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    RANK, COUNT, PORT = map(int, sys.argv[1:4])
    devices = f"--xla_force_host_platform_device_count={8 // COUNT}"
    # The last flag wins, and the other flags stay: the tests' level of optimisation.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax import patches
from lowbit_optax.states.checkpoints import check_storage_formats, storage_formats

MADE = {
    "lowbit": lowbit_optax.lowbit(optax.adamw(1e-2)),
    "kahan": lowbit_optax.kahan_adamw(1e-2),
}
PLAIN = optax.adamw(1e-2)
STEPS = 3


def weights(seed: int = 0):
    """Float32 weights as numpy arrays, equal in every process."""
    random = np.random.default_rng(seed)
    shapes = {"kernel": (512, 32), "norm": (32,)}
    return {
        name: random.standard_normal(x).astype(np.float32) for name, x in shapes.items()
    }


def step(tx, params, state, target, run=lowbit_optax.step):
    """A step towards a target, whose gradients need no sums, which might round."""
    grads = jax.tree.map(lambda p, t: p.astype(t.dtype) - t, params, target)
    return run(tx, params, state, grads)


def views(tx, params, state, target):
    """Float32 weights, the run converted to optax, and a step report's ``lost``."""
    converted = lowbit_optax.convert(params, state, tx, PLAIN)
    report = lowbit_optax.step_report(tx, params, state, target)
    return lowbit_optax.master_weights(params, state), converted, report.lost


def train(tx, params, state, target):
    """Train for half of the run."""
    advance = jax.jit(functools.partial(step, tx))
    for _ in range(STEPS):
        params, state = advance(params, state, target)
    return params, state


def train_with_patches(tx, params, state, target, folder: Path):
    """Train for half of the run, and write a patch of this process for each step."""
    advance = jax.jit(functools.partial(step, tx, run=patches.step))
    stamp = patches.start(params)
    for number in range(STEPS):
        params, state, changed = advance(params, state, target)
        patch, stamp = patches.pack(params, changed, stamp)
        path_of_patch(folder, jax.process_index(), number).write_bytes(patch)
    return params, state


def path_of_patch(folder: Path, process: int, number: int) -> Path:
    return folder / f"process_{process}_step_{number}.patch"


def _targets(tx, mesh):
    """Shapes of parameters and state, with their shardings on the mesh."""
    start = functools.partial(lowbit_optax.from_master, tx)
    params, state = jax.eval_shape(start, weights())
    specs = {"kernel": P("data"), "norm": P()}
    placed = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    shardings = placed, lowbit_optax.state_shardings(tx, params, placed)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(place, (params, state), shardings)


def _global(tree, shardings):
    """Arrays over all processes; each process adds the shards of its own devices."""
    return jax.tree.map(
        lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index]),
        tree,
        shardings,
    )


def _run(folder: Path, action: str) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with ocp.StandardCheckpointer() as checkpointer:
        for name, tx in MADE.items():
            targets = _targets(tx, mesh)
            places = jax.tree.map(lambda x: x.sharding, targets)
            target = _global(weights(1), places[0])
            formats = folder / f"{name}.json"
            if action == "save":
                start = functools.partial(lowbit_optax.from_master, tx)
                begin = jax.jit(start, out_shardings=places)
                run = train(tx, *begin(_global(weights(), places[0])), target)
                if jax.process_index() == 0:
                    found = storage_formats(tx, run[0])
                    formats.write_text(json.dumps(found))
                checkpointer.save(folder / name, run)
                continue
            stored = json.loads(formats.read_text())
            check_storage_formats(stored, tx, targets[0])
            run = checkpointer.restore(folder / name, targets)
            assert jax.tree.map(lambda x: x.sharding, run) == places
            sent = folder / f"{name}_patches"
            sent.mkdir(exist_ok=True)
            run = train_with_patches(tx, *run, target, sent)
            seen = jax.jit(functools.partial(views, tx))(*run, target)
            checkpointer.save(folder / f"{name}_end", (run, seen))


if __name__ == "__main__":
    if COUNT > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{PORT}", COUNT, RANK)
    assert len(jax.devices()) == 8
    assert len(jax.local_devices()) == 8 // COUNT
    _run(Path(sys.argv[4]), sys.argv[5])
