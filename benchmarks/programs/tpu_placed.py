"""A step on sharded parameters with plain ``jit``, compiled for TPUs.

    .venv/bin/python -m benchmarks tpu_placed

The model is the stacked layers of a Llama with 1.1 billion parameters (bfloat16, norms
float32). They are sharded by rows over four v6e's, on a mesh of automatic axes that is
not set as the current mesh. The table lists bytes moved and temporary memory per
parameter of a device, Pallas kernels, collectives, and seconds of CPU time to trace,
lower and compile. Its rows are AdamW from optax, and ``lowbit_adamw`` with and without
``param_shardings``. Nothing was run on a TPU. Needs the ``tpu-program`` extra.
"""

import argparse
import functools
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from benchmarks import records
from tools import hlo
from tools.gpu_program import targets
from tools.tpu_program.targets import tpu_mesh

MINUTES = 2
NEEDS = ("libtpu",)

LAYERS, WIDTH, HIDDEN, WORDS = 16, 2048, 5632, 32000
SHAPES = {
    "embedding": (WORDS, WIDTH),
    "query": (LAYERS, WIDTH, WIDTH),
    "key": (LAYERS, WIDTH, 512),
    "value": (LAYERS, WIDTH, 512),
    "out": (LAYERS, WIDTH, WIDTH),
    "gate": (LAYERS, WIDTH, HIDDEN),
    "up": (LAYERS, WIDTH, HIDDEN),
    "down": (LAYERS, HIDDEN, WIDTH),
    "norms": (LAYERS, 2, WIDTH),
    "head": (WIDTH, WORDS),
}


def params() -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the model."""
    dtype = lambda name: jnp.float32 if name == "norms" else jnp.bfloat16
    return {x: jax.ShapeDtypeStruct(shape, dtype(x)) for x, shape in SHAPES.items()}


def placed(mesh: Mesh, tree):
    """Return the shardings of a tree, with the rows of matrices over the mesh."""

    def place(path, leaf):
        name = jax.tree_util.keystr(path)
        is_matrix = leaf.ndim > 1 and "norms" not in name
        axes = (None,) * (leaf.ndim - 2)
        return NamedSharding(mesh, P(*axes, "d", None) if is_matrix else P())

    return jax.tree_util.tree_map_with_path(place, tree)


def facts(name: str, tx: optax.GradientTransformation, mesh: Mesh) -> dict:
    """Return the facts of the compiled, donated step of the model."""
    like = params()
    places = placed(mesh, like)
    of_state = lowbit_optax.state_shardings(tx, like, places)
    held = targets.placed(like, places)
    state = targets.placed(jax.eval_shape(tx.init, like), of_state)
    step = functools.partial(lowbit_optax.step, tx)
    start = time.process_time()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(held, state, held).compile()
    seconds = time.process_time() - start
    parameters = sum(x.size for x in jax.tree.leaves(like)) / mesh.size
    moved = sum(x.moved for x in hlo.entry(compiled))
    return {
        "step": name,
        "moved": round(moved / parameters, 2),
        "temporary": round(hlo.memory(compiled).temp_size_in_bytes / parameters, 3),
        "by Pallas": (compiled.as_text() or "").count('"tpu_custom_call"'),
        "collectives": len(hlo.collectives(compiled)),
        "s to compile": round(seconds, 1),
    }


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.parse_args(argv)
    mesh = tpu_mesh("v6e:2x2", (4,))
    told = functools.partial(placed, mesh)
    alias = lowbit_optax.lowbit_adamw
    steps = {
        "optax.adamw": optax.adamw(1e-3),
        "lowbit_adamw, told": alias(1e-3, param_shardings=told),
        "lowbit_adamw": alias(1e-3, warn=False),
    }
    records.print_rows(facts(name, tx, mesh) for name, tx in steps.items())
