"""The optimizer's state in host memory, of which a layer at a time is on the device.

::

    for every layer, the last one first:
        state of the layer ---> device        while its gradients are computed
        update, as without
        state of the layer ---> host memory

The stacks are carried through the backward loop in host memory, and are written in
place. Only slices of them move: XLA makes asynchronous copies of these.
"""

import typing
from collections.abc import Collection, Iterable

import jax
from jax.sharding import Sharding, SingleDeviceSharding

_Space = jax.memory.Space


def is_on_host(array) -> bool:
    """Whether an array lies in host memory, within or outside of ``jax.jit``."""
    return jax.typeof(array).memory_space == _Space.Host


def on_device(array):
    """The array in the device's memory: itself, or a copy if it is in the host's."""
    return jax.device_put(array, _Space.Device) if is_on_host(array) else array


def on_host(array):
    """The array in host memory: itself, or a copy if it is on the device."""
    return array if is_on_host(array) else jax.device_put(array, _Space.Host)


def placed_like(array, other):
    """The array in the memory that the other one lies in."""
    return on_host(array) if is_on_host(other) else on_device(array)


def placed(arrays: Iterable, on_the_host: Collection[int]) -> list:
    """Arrays in host memory, by their numbers, and the others on the device.

    Raises:
      ValueError: if an array must be moved, and JAX's first device has no such memory.
    """
    arrays = list(arrays)
    if not all(is_on_host(arrays[number]) for number in on_the_host):
        _check_has("the state of layers", jax.devices()[0], "pinned_host")
    return [
        on_host(x) if number in on_the_host else on_device(x)
        for number, x in enumerate(arrays)
    ]


def with_memory_kind(name: str, leaf, kind: str) -> Sharding:
    """An array's sharding with a memory kind; without one, that on the first device.

    Args:
      name: the leaf's path, for the error.
      leaf: an array or a ShapeDtypeStruct.
      kind: of memory.

    Raises:
      ValueError: if a device has no such memory.
    """
    sharding: typing.Any = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = SingleDeviceSharding(jax.devices()[0])
    for device in sharding.device_set:
        _check_has(f"state{name}", device, kind)
    return sharding.with_memory_kind(kind)


def _check_has(what: str, device, kind: str) -> None:
    kinds = _memory_kinds(device)
    if kind not in kinds:
        raise ValueError(
            f"release: {what} cannot be in {kind!r} memory: {device} has "
            f"{', '.join(map(repr, sorted(kinds))) or 'no kinds of memory'}; accepted "
            "is a backend with that kind, or state_memory='device'"
        )


def _memory_kinds(device) -> set[str]:
    try:
        return {memory.kind for memory in device.addressable_memories()}
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return set()
