"""Keep arrays of an optimizer's state in host memory.

A step copies a part of them to the device, updates it and copies it back, and XLA does
this asynchronously. :mod:`lowbit_optax.states.host_step` copies one group of leaves
after another, and :mod:`lowbit_optax.release` copies layers of stacks.
"""

from collections.abc import Collection, Sequence

import jax
from jax.sharding import AbstractMesh, Sharding, SingleDeviceSharding

_Space = jax.memory.Space


def is_on_host(array) -> bool:
    """Return whether an array, which may be traced, is in host memory."""
    is_array = isinstance(array, jax.Array)
    return is_array and jax.typeof(array).memory_space == _Space.Host


def on_device(array):
    """Return the array, or a copy on the device if it is in host memory."""
    return jax.device_put(array, _Space.Device) if is_on_host(array) else array


def on_host(array):
    """Return the array, or a copy in host memory if it is on the device."""
    return array if is_on_host(array) else jax.device_put(array, _Space.Host)


def placed_like(array, other):
    """Return ``array``, copied to the memory of ``other`` if necessary."""
    return on_host(array) if is_on_host(other) else on_device(array)


def placed(arrays: Sequence, on_the_host: Collection[int]) -> list:
    """Move the arrays with the given indices to host memory, and others to the device.

    Raises:
      ValueError: if arrays must be moved and JAX's first device has no host memory.
    """
    if not all(is_on_host(arrays[number]) for number in on_the_host):
        device = jax.devices()[0]
        _check_has("release: the state of layers", device, "pinned_host")
    return [
        on_host(x) if number in on_the_host else on_device(x)
        for number, x in enumerate(arrays)
    ]


def with_memory_kind(what: str, sharding: Sharding | None, kind: str) -> Sharding:
    """Return the sharding of an array with the given memory kind.

    Args:
      what: the name of the calling function and the leaf's path, for the error message.
      sharding: the sharding; None for an array on the first device.
      kind: the memory kind, such as ``"pinned_host"``.

    Raises:
      ValueError: if a device has no memory of this kind.
    """
    if sharding is None:
        sharding = SingleDeviceSharding(jax.devices()[0])
    for device in devices_of(sharding):
        _check_has(what, device, kind)
    return sharding.with_memory_kind(kind)


def devices_of(sharding: Sharding) -> set:
    """Return the devices of a sharding; none for an abstract mesh."""
    is_abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    return set() if is_abstract else sharding.device_set


def _check_has(what: str, device, kind: str) -> None:
    kinds = _memory_kinds(device)
    if kind not in kinds:
        raise ValueError(
            f"{what} cannot be in {kind!r} memory, because {device} supports "
            f"{', '.join(map(repr, sorted(kinds))) or 'no kinds of memory'}; keep the "
            "state on the device (with release, pass state_memory='device')"
        )


def _memory_kinds(device) -> set[str]:
    try:
        return {memory.kind for memory in device.addressable_memories()}
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return set()
