"""``sums_of_squares`` and ``largest_magnitudes`` of many arrays at once.

On a mesh every device reduces its shards. Then the results of arrays that lie on the
same mesh axes are combined over these in one collective.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import shards
from pallas_kernels.layout import MAX_ELEMENTS
from pallas_kernels.lowered import for_one_platform
from pallas_kernels.platforms import (
    Implementation,
    by_platform,
    check_implementation,
    launcher_module,
    refused_gpu,
    transformable,
)
from pallas_kernels.reductions.pieces import LARGEST, SQUARES, Kind, reduce_by

_PACKAGE = "pallas_kernels.reductions"

MIN_ARRAYS = 8
"""For fewer arrays XLA's own reductions are hardly more kernels."""


def sums_of_squares(
    arrays: Sequence[jax.Array],
    factor: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """The sum of squares of each array.

    On a GPU it is two kernels, however many arrays there are, where XLA launches one or
    two for each. On a mesh every device sums its shards, and then sums are added.

    Args:
      arrays: of a float dtype of up to 32 bits, at least one.
      factor: float32 scalar, by which elements are multiplied before they are squared.
      implementation: as in :func:`pallas_kernels.fused_update`.

    Returns:
      A float32 vector, an element per array. The order of additions is not that of
      ``jnp.sum``; elements that are not finite make their sum not finite.

    >>> import jax.numpy as jnp
    >>> sums_of_squares([jnp.full(3, 2.0), jnp.ones((2, 2))])
    Array([12.,  4.], dtype=float32)
    """
    return _reduced(SQUARES, arrays, factor, implementation)


def largest_magnitudes(
    arrays: Sequence[jax.Array], implementation: Implementation = None
) -> jax.Array:
    """The largest magnitude in each array; of those with a NaN, NaN.

    Args:
      arrays: as for :func:`sums_of_squares`.
      implementation: likewise.

    Returns:
      A float32 vector, an element per array; 0 for an array without elements.

    >>> import jax.numpy as jnp
    >>> largest_magnitudes([jnp.array([-2.0, 1.0]), jnp.array([1.0, jnp.nan])])
    Array([ 2., nan], dtype=float32)
    """
    patterns = _reduced(LARGEST, arrays, None, implementation)
    return lax.bitcast_convert_type(patterns, jnp.float32)


def _reduced(kind: Kind, arrays, factor, implementation: Implementation) -> jax.Array:
    check_implementation("reductions", implementation)
    arrays = list(arrays)
    shared = [] if factor is None else [jnp.asarray(factor, jnp.float32).reshape(1)]
    count = len(shared)

    def reference(*args):
        factors, arrays = args[:count], args[count:]
        return jnp.stack([kind.reduce(kind.read(x, *factors)) for x in arrays])

    def kernel(*args, interpret: bool = False) -> jax.Array:
        launcher = launcher_module(_PACKAGE, implementation, interpret)

        def run(args):
            return reduce_by(launcher.kernels, kind, count, args, interpret=interpret)

        return _over_shards(run, kind, count, args)

    def on_gpus(*args) -> jax.Array:
        as_list = lambda function: lambda *args: [function(*args)]
        return for_one_platform(as_list(kernel), as_list(reference))(*args)[0]

    fits = all(0 < x.size <= MAX_ELEMENTS for x in arrays) and refused_gpu() is None
    return by_platform(
        implementation,
        reference,
        [*shared, *arrays],
        interpreted=transformable(functools.partial(kernel, interpret=True), reference),
        cuda=transformable(on_gpus, reference) if fits else None,
    )


def _over_shards(run: Callable, kind: Kind, shared: int, args: Sequence) -> jax.Array:
    """``run`` on every device's shards; its results are the same on all devices.

    Args:
      run: from small arrays that every device has, and the arrays, to a vector.
      kind: how results of shards are combined.
      shared: how many small arrays ``args`` begins with.
      args: these, and the arrays.
    """

    def local_of(arguments, mesh, describe=lambda x: x) -> shards.Local:
        specs = [
            _dividing(x, describe(x).sharding.spec, mesh) for x in arguments[shared:]
        ]
        return _local(run, kind, specs), [P()] * shared + specs, P()

    mesh = jax.typeof(args[-1]).sharding.mesh
    if shards.has_explicit_axes(mesh):
        return shards.over_known_axes(local_of(args, mesh, jax.typeof), args, mesh)
    inside = [
        " ".join(f"x{number}a{axis}" for axis in range(x.ndim))
        for number, x in enumerate(args)
    ]
    rule = f"{', '.join(inside)} -> results"
    return shards.over_automatic_axes(lambda *args: run(args), local_of, args, rule)


def _local(run: Callable, kind: Kind, specs: Sequence[P]) -> Callable:
    """``run`` as a function of local arrays, within the mesh's axes."""
    axes = [
        tuple(sorted(itertools.chain(*shards.axes_of(spec, len(spec)))))
        for spec in specs
    ]

    def call(*args):
        of_shards = whole = run(args)
        for names in dict.fromkeys(filter(None, axes)):
            is_there = jnp.asarray([each == names for each in axes])
            combined = kind.over_devices(of_shards, names)
            whole = jnp.where(is_there, combined, whole)
        return whole

    return call


def _dividing(x, spec: P, mesh: Mesh) -> P:
    """The spec without mesh axes that do not divide their axis of the array."""
    places = zip(x.shape, shards.axes_of(spec, x.ndim), strict=True)
    return P(
        *(
            names if names and n % shards.count_of(mesh, names) == 0 else None
            for n, names in places
        )
    )
