"""Find a program's platform, and choose whether kernels or XLA run a computation."""

import functools
import importlib.util
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.core
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, AxisType, Mesh

from pallas_kernels.lowered import traced_when_lowered

Implementation = typing.Literal["xla", "pallas", "triton", "mosaic", "tpu"] | None
"""The implementation of a function that has kernels.

- ``"xla"``: XLA operations, the reference.
- ``"pallas"``: kernels of the default Pallas backend for GPUs or TPUs. On other
  platforms, XLA runs the operations of Triton's kernels one by one, if JAX has Triton.
- ``"triton"``, ``"mosaic"``: kernels of this Pallas backend, in programs for CUDA only.
- ``"tpu"``: kernels of the Pallas TPU backend, and XLA for leaves that they do not
  support. On other platforms, Pallas simulates a TPU, which is slow.
- None: kernels on CUDA, unless :func:`refused_gpu` returns a reason; kernels on TPUs if
  XLA does not need to partition them; and XLA otherwise. On a CPU, ``lowbit`` updates
  large leaves block by block.
"""

LauncherName = typing.Literal["triton", "mosaic"]

# From this version on, JAX deprecates Triton, and warns whenever it lowers a kernel.
_HAS_MOSAIC = jax.__version_info__ >= (0, 11)

DEFAULT_LAUNCHER: LauncherName = "mosaic" if _HAS_MOSAIC else "triton"
"""The launcher of GPU kernels if ``implementation`` does not name one.

It is Mosaic GPU if JAX deprecates Triton. Only GPUs that Mosaic GPU does not support
then use Triton, as long as JAX has it (:func:`launcher_name`). On an H200, steps with
Triton took 2 to 36% less time than with Mosaic GPU (``launchers_h200.json`` in
``docs/evidence``).
"""

# JAX reports only the names of GPUs that are not attached.
_CAPABILITIES = {
    **dict.fromkeys(["P100"], "6.0"),
    **dict.fromkeys(["V100"], "7.0"),
    **dict.fromkeys(["T4"], "7.5"),
    **dict.fromkeys(["A30", "A100"], "8.0"),
    **dict.fromkeys(["A10", "A40", "3090"], "8.6"),
    **dict.fromkeys(["L4", "L40", "L40S", "4090"], "8.9"),
    **dict.fromkeys(["H20", "H100", "H200", "H800", "GH200"], "9.0"),
    **dict.fromkeys(["B100", "B200", "B300", "GB200", "GB300"], "10.0"),
    # Professional GPUs have names such as "NVIDIA RTX PRO 6000 Blackwell".
    **dict.fromkeys(["5090", "PRO"], "12.0"),
}

# The major numbers of the capabilities on which kernels run. Mosaic GPU needs
# instructions of Hopper, and JAX 0.12 passes ptxas a wrong architecture for 12.0.
_NEEDED: dict[LauncherName, tuple[range, str]] = {
    "triton": (range(8, 100), "8.0 (Ampere) or newer"),
    "mosaic": (range(9, 11), "9 (Hopper) or 10 (Blackwell) for Mosaic GPU"),
}

_NAMES = typing.get_args(typing.get_args(Implementation)[0])


def check_implementation(where: str, implementation) -> None:
    """Raise an error unless ``implementation`` is available.

    Args:
      where: name of the calling function, for the message.
      implementation: the argument to check.

    Raises:
      ValueError: if it is not a value of :data:`Implementation`.
      NotImplementedError: if this version of JAX does not support it.

    >>> check_implementation("lowbit", "cuda")
    Traceback (most recent call last):
    ValueError: lowbit: implementation must be None, 'xla', 'pallas', 'triton', 'mosaic'
    or 'tpu', got 'cuda'
    """
    if implementation not in (None, *_NAMES):
        *names, last = map(repr, _NAMES)
        raise ValueError(
            f"{where}: implementation must be None, {', '.join(names)} or {last}, "
            f"got {implementation!r}"
        )
    needed = {
        "mosaic": (has_mosaic, "JAX 0.11 or newer"),
        "triton": (has_triton, "a JAX with Pallas's Triton backend"),
    }
    exists, what = needed.get(str(implementation), (None, ""))
    if exists and not exists():
        raise NotImplementedError(
            f"{where}: implementation {implementation!r} needs {what}, "
            f"got {jax.__version__}"
        )


def has_mosaic() -> bool:
    """Return whether this version of JAX supports the Mosaic GPU kernels."""
    return _HAS_MOSAIC


def has_triton() -> bool:
    """Return whether this version of JAX has the Triton backend of Pallas."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


class Gpu(typing.NamedTuple):
    """An NVIDIA GPU.

    Args:
      name: the device kind in JAX.
      capability: the compute capability, such as ``"8.9"``.
    """

    name: str
    capability: str

    @property
    def major(self) -> int:
        """Major number of the compute capability."""
        return int(self.capability.partition(".")[0])


def target_gpu() -> Gpu | None:
    """Return the GPU of the program that is being traced, or None if it is unknown.

    With an active mesh, it is the GPU of the mesh, which need not be attached.
    Without a mesh, it is JAX's default device. If no default device is set, it is the
    GPU with the lowest compute capability, because the program may run on any GPU.

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
    # AMD GPUs have names such as "gfx942" instead of numbers.
    numbered = [gpu for gpu in found if gpu.capability[:1].isdigit()]
    return min(sorted(numbered), key=lambda gpu: gpu.major, default=None)


def refused_gpu(implementation: str | None = None) -> str | None:
    """Return why the program's GPU cannot run kernels; None if no reason is known.

    Args:
      implementation: see :data:`Implementation`.

    >>> refused_gpu() is None or jax.default_backend() == "gpu"
    True
    """
    gpu = target_gpu()
    majors, needed = _NEEDED[launcher_name(implementation)]
    if gpu is None or gpu.major in majors:
        return None
    return (
        f"kernels need a GPU of compute capability {needed}, but {gpu.name} has "
        f"{gpu.capability}"
    )


def is_elsewhere(arrays: Iterable[jax.Array]) -> bool:
    """Return whether all arrays are concrete, and none is on a GPU or a TPU.

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
    """Return whether the program that is being traced is for TPUs.

    A program is for TPUs if the mesh has TPUs or, without a mesh, if TPUs are JAX's
    default backend. Other programs do not trace TPU kernels. Therefore, compiling a
    program for TPUs on a machine without TPUs needs a mesh.

    Args:
      mesh: the mesh of the program's arrays, if it is known. If None or empty, the
        active mesh (``jax.set_mesh``) is used.

    >>> is_for_tpus() == (jax.default_backend() == "tpu")
    True
    """
    return platform_of(mesh) == "tpu"


def platform_of(mesh: Mesh | AbstractMesh | None = None) -> str:
    """Return the platform of a mesh, the active mesh, or JAX's default backend.

    It is "cuda" for all GPUs.
    """
    if mesh is None or mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    device = (mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh).abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "cuda" if platform == "gpu" else platform


def is_partitioned() -> bool | None:
    """Return whether XLA may have to partition the program; None if not known yet.

    XLA partitions nothing if all axes of the active mesh are explicit or belong to a
    ``jax.shard_map``, or if JAX has one device and no mesh is active. With several
    devices and without a mesh, the answer is known when the program is lowered.

    >>> is_partitioned() is None or jax.device_count() == 1
    True
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None if jax.device_count() > 1 else False
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(kind == AxisType.Auto and size > 1 for kind, size in kinds)


def is_for_one_cpu() -> bool:
    """Return whether the program is known to run on a single CPU device.

    The active mesh must have one device or, without a mesh, JAX must have one device.

    >>> is_for_one_cpu() <= (jax.default_backend() == "cpu")
    True
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices = jax.device_count() if mesh.empty else mesh.size
    return platform_of() == "cpu" and devices == 1


def launcher_name(implementation: str | None) -> LauncherName:
    """Return the name of the GPU launcher of an implementation.

    Args:
      implementation: see :data:`Implementation`.
    """
    if implementation == "triton" or implementation == "mosaic":
        return implementation
    gpu = target_gpu()
    if gpu is None or gpu.major in _NEEDED[DEFAULT_LAUNCHER][0] or not has_triton():
        return DEFAULT_LAUNCHER
    return "triton"


def by_platform(
    implementation: Implementation,
    reference: Callable,
    arguments: Sequence,
    *,
    interpreted: Callable,
    cuda: Callable | None = None,
    tpu: Callable | None = None,
):
    """Run the kernel for the platform, or the reference, and return the results.

    Args:
      implementation: see :data:`Implementation`.
      reference: a function that uses ordinary array operations.
      arguments: arrays, or trees of arrays.
      interpreted: a function that runs the kernel's operations with XLA.
      cuda, tpu: kernels that return the same results as the reference, or None.
    """
    if implementation in ("triton", "mosaic") and cuda is not None:
        return cuda(*arguments)
    branches = {"cuda": cuda, "tpu": tpu}
    branches = {name: kernel for name, kernel in branches.items() if kernel is not None}
    if implementation in ("xla", "tpu") or not branches:
        return reference(*arguments)
    # Kernels for Triton are interpreted, because JAX cannot interpret Mosaic GPU.
    is_interpreted = implementation == "pallas" and has_triton()
    default = interpreted if is_interpreted else reference
    if is_elsewhere(x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)):
        return default(*arguments)
    return chosen_by_platform(platform_of(), branches, default, arguments)


def chosen_by_platform(
    expected: str | None,
    branches: Mapping[str, Callable],
    default: Callable,
    arguments: Sequence,
):
    """Run the branch of the platform for which the program is lowered.

    Only the branch of the expected platform is traced at once. The others are traced if
    the program is lowered for their platforms, and must not close over arrays.

    Args:
      expected: the platform for which the program will probably be lowered. If None,
        all branches are traced at once.
      branches: functions that return results of the same types, keyed by platform.
      default: the function for other platforms. Functions that are traced later have
        its derivatives and its batching rule.
      arguments: the arguments of all functions, which are trees of arrays.
    """
    flat, structure = jax.tree.flatten(arguments)
    results: dict[str, typing.Any] = {}

    def run(branch: Callable, *flat) -> list:
        found = branch(*structure.unflatten(flat))
        found, results["structure"] = jax.tree.flatten(found)
        return found

    def now(*flat) -> list:
        found = run(branches.get(expected or "", default), *flat)
        results["types"] = list(map(jax.typeof, found))
        return found

    def later(branch: Callable, *flat) -> list:
        own, derived = (functools.partial(run, x) for x in (branch, default))
        if "types" not in results:  # outside of jit, JAX calls one branch
            return own(*flat)
        types = results["types"]
        lowered = lambda *flat: traced_when_lowered(own, types, flat)
        return transformable(lowered, derived)(*flat)

    when = run if expected is None else later
    each = {name: functools.partial(when, x) for name, x in branches.items()}
    if expected is not None:
        each = {expected: now} | {x: each[x] for x in each if x != expected}
    # JAX traces the branches in this order.
    found = lax.platform_dependent(
        *flat, default=functools.partial(when, default), **each
    )
    return results["structure"].unflatten(found)


def transformable(kernel: Callable, reference: Callable) -> Callable:
    """Return the kernel with the derivatives and the batching rule of the reference.

    Args:
      kernel: a function from trees of arrays to a tree of arrays.
      reference: a function that returns the same results with array operations.
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
