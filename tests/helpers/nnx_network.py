"""A flax nnx network whose kernels are annotated with a mesh axis."""

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tests.helpers.side_by_side import HIDDEN, WIDTH, squared_error


class Network(nnx.Module):
    """Two layers and a normalisation between them.

    Args:
      axis: mesh axis over which rows of kernels are sharded.
    """

    def __init__(self, axis):
        rngs = nnx.Rngs(0)
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), (axis, None))
        self.first = nnx.Linear(WIDTH, HIDDEN, rngs=rngs, kernel_init=split)
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)  # float32
        self.second = nnx.Linear(HIDDEN, WIDTH, rngs=rngs, kernel_init=split)

    def __call__(self, inputs):
        return self.second(nnx.tanh(self.norm(self.first(inputs))))


def error_of(model, inputs, targets):
    return squared_error(model(inputs), targets)


def mesh_of(size, axis="data"):
    return Mesh(np.array(jax.devices()[:size]), (axis,))
