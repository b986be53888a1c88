"""Libraries that save and restore a run."""

import jax
import orbax.checkpoint as ocp
import pytest
from flax import serialization


def orbax(folder, saved, like):
    """Save a tree, and restore it with the shapes, dtypes and shardings of ``like``."""
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "checkpoint", target)


def flax(folder, saved, like):
    """Save and restore with flax's serialization, with the structure of ``like``."""
    file = folder / "checkpoint.msgpack"
    file.write_bytes(serialization.to_bytes(saved))
    return serialization.from_bytes(like, file.read_bytes())


STORES = pytest.mark.parametrize("store", [orbax, flax], ids=["orbax", "flax"])
