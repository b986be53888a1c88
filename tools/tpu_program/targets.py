"""Describe TPUs, so that JAX can compile programs for them without a device.

``libtpu``, from the ``tpu-program`` extra, compiles for a named topology. The result is
the real XLA:TPU program, with its fusions, layouts, buffer assignment, collectives and
Pallas kernels.

The functions of ``tools.gpu_program.targets`` also lower and compile for these meshes.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Sequence

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh


@dataclasses.dataclass(frozen=True)
class Target:
    """A TPU to compile for.

    Args:
      topology: libtpu's name of a small topology.
      bandwidth: the memory bandwidth of one device, in bytes per second.
    """

    topology: str
    bandwidth: float


# The bandwidths are from Google Cloud's documentation of each generation. A TPU7x chip
# has two devices, and its bandwidth is the bandwidth of one of them.
TARGETS = {
    "v5e": Target("v5e:2x2", 819e9),
    "v6e": Target("v6e:2x2", 1638e9),
    "tpu7x": Target("tpu7x:2x2x1", 3690e9),
}


def tpu_mesh(
    topology: str = "v6e:2x2",
    shape: Sequence[int] = (1,),
    names: Sequence[str] = ("d",),
    axis: AxisType = AxisType.Auto,
) -> Mesh:
    """Return a mesh of the first devices of a topology.

    Args:
      topology: the topology, such as ``v5e:2x2``, ``v6e:16x16`` or ``tpu7x:2x2x1``.
      shape: the shape of the mesh.
      names: the names of its axes.
      axis: the type of its axes.

    Raises:
      ValueError: if the topology has fewer devices.
    """
    devices, wanted = _devices(topology), math.prod(shape)
    if len(devices) < wanted:
        raise ValueError(
            f"tpu_mesh: {topology} has {len(devices)} devices, not {wanted}"
        )
    chosen = np.array(devices[:wanted]).reshape(shape)
    return Mesh(chosen, tuple(names), axis_types=(axis,) * len(names))


@functools.cache
def _devices(topology: str) -> Sequence:
    # Without these variables, libtpu looks for a TPU in the machine and locks it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return described.devices
