"""Keep optimizer state in host memory, and copy one layer at a time to the device.

::

    for every layer, the last one first:
        state of the layer ---> device        while its gradients are computed
        update of the layer
        state of the layer ---> host memory

The backward loop carries the stacks in host memory and writes them in place. XLA copies
only slices of them, asynchronously.
"""

import typing
from collections.abc import Collection, Iterable

import jax
from jax.sharding import Sharding, SingleDeviceSharding

_Space = jax.memory.Space


def is_on_host(array) -> bool:
    """Return whether an array, which may be traced, is in host memory."""
    return jax.typeof(array).memory_space == _Space.Host


def on_device(array):
    """Return the array, or a copy on the device if it is in host memory."""
    return jax.device_put(array, _Space.Device) if is_on_host(array) else array


def on_host(array):
    """Return the array, or a copy in host memory if it is on the device."""
    return array if is_on_host(array) else jax.device_put(array, _Space.Host)


def placed_like(array, other):
    """Return ``array``, copied to the memory of ``other`` if necessary."""
    return on_host(array) if is_on_host(other) else on_device(array)


def placed(arrays: Iterable, on_the_host: Collection[int]) -> list:
    """Move the arrays with the given indices to host memory, and others to the device.

    Raises:
      ValueError: if arrays must be moved and JAX's first device has no host memory.
    """
    arrays = list(arrays)
    if not all(is_on_host(arrays[number]) for number in on_the_host):
        _check_has("the state of layers", jax.devices()[0], "pinned_host")
    return [
        on_host(x) if number in on_the_host else on_device(x)
        for number, x in enumerate(arrays)
    ]


def with_memory_kind(name: str, leaf, kind: str) -> Sharding:
    """Return the sharding of an array with the given memory kind.

    Args:
      name: the leaf's path, for the error message.
      leaf: an array or a ShapeDtypeStruct, on the first device if it has no sharding.
      kind: the memory kind, such as ``"pinned_host"``.

    Raises:
      ValueError: if a device has no memory of this kind.
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
            f"release: {what} cannot be in {kind!r} memory, because {device} supports "
            f"{', '.join(map(repr, sorted(kinds))) or 'no kinds of memory'}; use "
            "another backend, or pass state_memory='device'"
        )


def _memory_kinds(device) -> set[str]:
    try:
        return {memory.kind for memory in device.addressable_memories()}
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return set()
