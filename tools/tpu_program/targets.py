"""TPUs to compile programs for on a machine without one.

``libtpu`` compiles for a named topology without a device. It needs the ``tpu-program``
extra. What it returns is the real XLA:TPU program: fusions, layouts, buffer assignment,
collectives, and the kernels of Pallas' TPU backend.

``tools.gpu_program.targets`` lowers and compiles for these meshes too.
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
      topology: the name of a small one, as libtpu knows it.
      bandwidth: of the memory of one device of it, bytes per second.
    """

    topology: str
    bandwidth: float


# Bandwidths as in Google Cloud's documentation of each generation; that of TPU7x is of
# one of a chip's two devices.
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
    """A mesh of the first devices of a topology.

    Args:
      topology: such as ``v5e:2x2``, ``v6e:16x16`` or ``tpu7x:2x2x1``.
      shape, names: of the mesh.
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
    # libtpu asks the machine which TPU it has, and locks it, unless it is told.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return described.devices
