"""The steps of the page "Training a large model", compiled for H200s and for TPUs.

    .venv/bin/python -m benchmarks large_training

The model has 16 layers of width 2048, and a batch has 128 sequences of 512 bytes, in
two microbatches unless the step uses gradient release. The steps are compiled for eight
H200s and for a v6e-16. In both meshes, the axis ``tensor`` has two devices. The table
lists the bytes per parameter of the arrays on each device, its temporary memory, and
the GiB of the results of each kind of collective in a step. Nothing is run.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import records
from examples import large_model as train
from tools import hlo
from tools.gpu_program.steps import bytes_of
from tools.gpu_program.targets import compile_lowered, gpu_mesh, shards
from tools.tpu_program.targets import tpu_mesh

NEEDS = ("jax_plugins.xla_cuda12", "libtpu")

MODEL = train.Llama(layers=16, width=2048, heads=16, length=512, batch=128)
AXES = ("fsdp", "tensor")
GIB = 2**30


def h200s() -> Mesh:
    """Return a mesh of eight H200s."""
    devices = gpu_mesh(8).devices.reshape(4, 2)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)


MESHES = {"8 H200s": h200s, "v6e-16": lambda: tpu_mesh("v6e:4x4", (8, 2), AXES)}


def figures(format_: train.Format, mesh: Mesh) -> dict:
    """Return the bytes of a compiled step on each device."""
    training = train.training_of(MODEL, format_, 1000, mesh)
    run = train.targets(training)
    shape = MODEL.microbatches, MODEL.batch // MODEL.microbatches, MODEL.length + 1
    by_sequence = NamedSharding(mesh, P(None, "fsdp"))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=by_sequence)
    with jax.set_mesh(mesh):
        lowered = train.compiled_step(training).lower(run, tokens)
    compiled = compile_lowered(lowered)
    stored = shards(run, train.shardings_of(run))
    memory, sent = hlo.memory(compiled), hlo.exchanged(compiled)
    if memory.alias_size_in_bytes < bytes_of(stored):
        raise RuntimeError("the step does not update all arrays in place")
    return {
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(stored.params)),
        "weights": bytes_of(stored.params),
        "state": bytes_of(stored.state),
        "average": bytes_of((stored.average, stored.average_state)),
        "temporary": memory.temp_size_in_bytes,
        "in place": memory.alias_size_in_bytes,
        "exchanged": dict(sent),
    }


def measure(args) -> dict:
    steps = {}
    for place, mesh in MESHES.items():
        for name, format_ in train.FORMATS.items():
            steps[f"{place}, {name}"] = figures(format_, mesh())
            print(place, name, steps[f"{place}, {name}"], flush=True)
    return {"steps": steps}


main = records.program(__name__, ran="compiled for H200s and TPUs v6e; not run")
