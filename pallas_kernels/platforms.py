"""Where a computation will run, as far as that is known, and by what."""

import re
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.core
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, AxisType, Mesh

Implementation = typing.Literal["xla", "pallas", "triton", "mosaic", "tpu"] | None
"""What runs a function that has kernels.

- ``"xla"``: XLA's own operations, the reference.
- ``"pallas"``: kernels of the backend that suits the GPU or TPU; on other platforms
  their operations, one by one.
- ``"triton"``, ``"mosaic"``: kernels of this Pallas backend, in programs for CUDA only.
- ``"tpu"``: kernels of the Pallas TPU backend where they take the leaf, and XLA where
  they do not. On other platforms Pallas' model of a TPU runs them (slowly).
- None: kernels on CUDA, unless :func:`refused_gpu` says why not; kernels for TPUs where
  XLA need not partition them; and XLA elsewhere. ``lowbit`` updates large leaves block
  by block on a CPU.
"""

LauncherName = typing.Literal["triton", "mosaic"]

DEFAULT_LAUNCHER: LauncherName = "triton"
"""The launcher of kernels for GPUs where none is named.

On an H200 its steps take 2 to 36% less time than those of Mosaic GPU
(``docs/hardware.md``), and it also has kernels for Ampere. From 0.11 on, JAX
deprecates it.
"""

# GPUs that are not at hand are known by name only.
_CAPABILITIES = {
    **dict.fromkeys(["P100"], "6.0"),
    **dict.fromkeys(["V100"], "7.0"),
    **dict.fromkeys(["T4"], "7.5"),
    **dict.fromkeys(["H20", "H100", "H200", "H800", "GH200"], "9.0"),
    **dict.fromkeys(["B100", "B200", "B300", "GB200", "GB300"], "10.0"),
}

_MIN_CAPABILITY_OF_KERNELS = 8

_MIN_JAX_OF_MOSAIC = (0, 11)

_NAMES = ("xla", "pallas", "triton", "mosaic", "tpu")


def check_implementation(where: str, implementation) -> None:
    """Raise an error if there is no such implementation.

    Args:
      where: the function that was called.
      implementation: what it was given.

    Raises:
      ValueError: if no implementation has this name.
      NotImplementedError: if this JAX lacks what it needs.

    >>> check_implementation("lowbit", "cuda")
    Traceback (most recent call last):
    ValueError: lowbit: implementation is 'cuda', not None, 'xla', 'pallas', 'triton',
    'mosaic' or 'tpu'
    """
    if implementation not in (None, *_NAMES):
        *names, last = map(repr, _NAMES)
        raise ValueError(
            f"{where}: implementation is {implementation!r}, not None, "
            f"{', '.join(names)} or {last}"
        )
    if implementation == "mosaic" and not has_mosaic():
        least = ".".join(map(str, _MIN_JAX_OF_MOSAIC))
        raise NotImplementedError(
            f"{where}: implementation 'mosaic' needs JAX {least} or newer, not "
            f"{jax.__version__}"
        )


def has_mosaic() -> bool:
    """Whether this JAX has what kernels of the Mosaic GPU backend need."""
    return jax.__version_info__[:2] >= _MIN_JAX_OF_MOSAIC


class Gpu(typing.NamedTuple):
    """An NVIDIA GPU.

    Args:
      name: as JAX calls it.
      capability: its compute capability, such as ``"8.9"``.
    """

    name: str
    capability: str

    @property
    def major(self) -> int:
        """The major number of its compute capability."""
        return int(self.capability.partition(".")[0])


def target_gpu() -> Gpu | None:
    """The GPU that the traced program is for; None if there is none, or none is known.

    It is the GPU of the mesh in force, which may be described and not at hand. Without
    a mesh it is JAX's default device. Without that it is the one of JAX's GPUs with the
    lowest compute capability, since any of them may get the program.

    >>> target_gpu() is None or jax.default_backend() == "gpu"
    True
    """
    wanted = jax.sharding.get_abstract_mesh().abstract_device
    devices = jax.devices() if jax.default_backend() == "gpu" else []
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if wanted is not None:
        devices = [d for d in devices if d.device_kind == wanted.device_kind]
    elif isinstance(default, jax.Device):
        devices = [default] if default.platform == "gpu" else []
    found = {
        Gpu(d.device_kind, str(getattr(d, "compute_capability", ""))) for d in devices
    }
    if wanted is not None and not found:
        words = re.split(r"[\s-]", wanted.device_kind)
        known = (_CAPABILITIES[word] for word in words if word in _CAPABILITIES)
        found = {Gpu(wanted.device_kind, capability) for capability in known}
    # AMD's have names, such as "gfx942", in place of numbers.
    numbered = [gpu for gpu in found if gpu.capability[:1].isdigit()]
    return min(sorted(numbered), key=lambda gpu: gpu.major, default=None)


def refused_gpu() -> str | None:
    """Why the program's GPU has no kernels; None if it has, or if there is no GPU.

    >>> refused_gpu() is None or jax.default_backend() == "gpu"
    True
    """
    gpu = target_gpu()
    if gpu is None or gpu.major >= _MIN_CAPABILITY_OF_KERNELS:
        return None
    return (
        "Pallas compiles kernels for GPUs of compute capability "
        f"{_MIN_CAPABILITY_OF_KERNELS}.0 (Ampere) and newer, not for {gpu.name}, which "
        f"has {gpu.capability}"
    )


def is_elsewhere(arrays: Iterable[jax.Array]) -> bool:
    """Whether all arrays are concrete, and none of them is on a GPU or a TPU.

    >>> import jax.numpy as jnp
    >>> is_elsewhere([jnp.ones(3)]) or jax.default_backend() != "cpu"
    True
    """
    return all(
        not isinstance(x, jax.core.Tracer)
        and all(d.platform not in ("gpu", "tpu") for d in getattr(x, "devices", set)())
        for x in arrays
    )


def is_for_tpus(mesh: Mesh | AbstractMesh | None = None) -> bool:
    """Whether the program that is traced is for TPUs.

    It is if the mesh has TPUs or, without one, if TPUs are JAX's default backend. So
    kernels for TPUs are not traced where there are none. A program that is compiled for
    TPUs on a machine without one needs the mesh.

    Args:
      mesh: on which arrays of the program are known to lie; if None, or empty, the mesh
        in force (``jax.set_mesh``).

    >>> is_for_tpus() == (jax.default_backend() == "tpu")
    True
    """
    return _platform(mesh) == "tpu"


def _platform(mesh: Mesh | AbstractMesh | None = None) -> str:
    """The platform of a mesh, of the one in force, or of JAX's default backend."""
    if mesh is None or mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    device = (mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh).abstract_device
    return jax.default_backend() if device is None else device.platform


def is_partitioned() -> bool | None:
    """Whether XLA may have to partition the program that is traced.

    It need not on a mesh in force whose axes are explicit or those of a
    ``jax.shard_map``, nor without a mesh where JAX has one device. None if only the
    lowering will know.

    >>> is_partitioned() is None or jax.device_count() == 1
    True
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None if jax.device_count() > 1 else False
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(kind == AxisType.Auto and size > 1 for kind, size in kinds)


def is_for_one_cpu() -> bool:
    """Whether the program that is traced is known to run on one device, a CPU.

    It does if the mesh in force has one device or, without a mesh, if JAX has no other.

    >>> is_for_one_cpu() <= (jax.default_backend() == "cpu")
    True
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices = jax.device_count() if mesh.empty else mesh.size
    return _platform() == "cpu" and devices == 1


def launcher_name(implementation: str | None) -> LauncherName:
    """The name of an implementation's launcher for GPUs.

    Args:
      implementation: see :data:`Implementation`.
    """
    if implementation == "triton" or implementation == "mosaic":
        return implementation
    return DEFAULT_LAUNCHER


def by_platform(
    implementation: Implementation,
    reference: Callable,
    arguments: Sequence,
    *,
    interpreted: Callable,
    cuda: Callable | None = None,
    tpu: Callable | None = None,
):
    """The results of the kernel for the platform, or of the reference.

    Args:
      implementation: see :data:`Implementation`.
      reference: a function of array operations.
      arguments: arrays, and perhaps trees of more of them.
      interpreted: the kernel's operations run by XLA.
      cuda, tpu: kernels that compute the same, or None.
    """
    if implementation in ("triton", "mosaic") and cuda is not None:
        return cuda(*arguments)
    branches = {"cuda": cuda, "tpu": tpu}
    branches = {name: kernel for name, kernel in branches.items() if kernel is not None}
    if implementation in ("xla", "tpu") or not branches:
        return reference(*arguments)
    default = interpreted if implementation == "pallas" else reference
    if is_elsewhere(x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)):
        return default(*arguments)
    return lax.platform_dependent(*arguments, default=default, **branches)


def transformable(kernel: Callable, reference: Callable) -> Callable:
    """The kernel, with the reference's derivatives and batches.

    Args:
      kernel: from trees of arrays to a tree of arrays.
      reference: a function of array operations that computes the same.
    """

    @custom_vmap
    def run(*args):
        return kernel(*args)

    @run.def_vmap
    def _(axis_size, batched, *args):
        axes = jax.tree.map(lambda each: 0 if each else None, batched)
        out = jax.vmap(reference, in_axes=axes, axis_size=axis_size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    differentiable = jax.custom_jvp(lambda *args: run(*args))

    @differentiable.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda *args: reference(*args), primals, tangents)

    return differentiable
