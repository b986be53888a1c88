"""Whole models, and how their leaves are spread over devices."""

import dataclasses
import functools

from jax.sharding import PartitionSpec as P

from benchmarks import leaf_sets

ROWS, COLUMNS = P("d"), P(None, "d")


@dataclasses.dataclass(frozen=True)
class Place:
    """A leaf on devices.

    Args:
      shape: the shape of the leaf.
      devices: the number of devices.
      spec: the PartitionSpec of the leaf, if there are several devices.
    """

    shape: tuple[int, ...]
    devices: int = 1
    spec: P | None = None


def of_whole_tiles(devices: int, shape: tuple[int, ...]) -> Place:
    """Shard the leaf along an axis on which each device has whole tiles."""
    for axis, unit in ((0, 8), (1, 4)):
        if axis < len(shape) and shape[axis] % (devices * unit) == 0:
            return Place(shape, devices, P(*(None,) * axis, "d"))
    return Place(shape)


MODELS = {
    "GPT-2": (leaf_sets.gpt2(), Place),
    "ResNet-50": (leaf_sets.resnet50(), Place),
    "Llama 7B": (leaf_sets.llama_7b(), Place),
    "Llama 7B, columns over 8": (
        leaf_sets.llama_7b(),
        lambda shape: Place(shape, 8, COLUMNS if len(shape) > 1 else ROWS),
    ),
    "Llama 7B, rows or columns over 256": (
        leaf_sets.llama_7b(),
        functools.partial(of_whole_tiles, 256),
    ),
}
