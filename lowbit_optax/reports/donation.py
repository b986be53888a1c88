"""``donation``: which donated arrays a step did not overwrite.

JAX warns when it lowers a step whose results cannot overwrite an argument. It does not
warn if the runtime cannot reuse the memory of an array: the step then needs memory for
both the old and the new array. Only the addresses of the arrays show it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.core import Tracer

from lowbit_optax._tables import Table, Tabular
from lowbit_optax._types import PyTree

_Place = tuple[int, int]
"""The number of a device, and the address of a shard in its memory."""


@dataclasses.dataclass(frozen=True, repr=False)
class DonationReport(Tabular):
    """The result of :meth:`Donation.after`; ``print`` it.

    Args:
      copied: dict from the path of each array that was not overwritten to its bytes on
        this process's devices.
      total: the bytes of all arrays.
    """

    copied: dict[str, int]
    total: int

    def table(self) -> Table:
        """Return the arrays that were not overwritten, with a row for each."""
        rows = [[name, f"{size:,}"] for name, size in self.copied.items()]
        size = sum(self.copied.values())
        title = f"{size:,} of {self.total:,} bytes were not overwritten"
        return Table(title, [["array", "bytes"], *rows])


@dataclasses.dataclass(frozen=True)
class Donation:
    """The addresses of arrays before a step; see :func:`donation`.

    Args:
      places: dict from the path of each array to the places of its shards.
      sizes: dict from the path of each array to its bytes in these places.
    """

    places: dict[str, frozenset[_Place]]
    sizes: dict[str, int]

    def after(self, results: PyTree) -> DonationReport:
        """Return which of the arrays the step did not overwrite.

        Args:
          results: a tree that contains all results of the step.
        """
        taken = frozenset().union(*donation(results).places.values())
        copied = {
            name: self.sizes[name]
            for name, places in self.places.items()
            if not places <= taken
        }
        return DonationReport(copied, sum(self.sizes.values()))


def donation(arguments: PyTree) -> Donation:
    """Note where arrays are, to find out after a step which ones it did not overwrite.

    Call it before the step with the donated arguments, and :meth:`Donation.after` with
    the results. It keeps no reference to the arrays:

    >>> import jax, jax.numpy as jnp
    >>> from lowbit_optax.reports import donation
    >>> train_step = jax.jit(lambda x: jax.tree.map(jnp.sin, x), donate_argnums=0)
    >>> params = {"w": jnp.ones((256, 256))}
    >>> before = donation(params)
    >>> params = train_step(params)
    >>> print(before.after(params))
    0 of 262,144 bytes were not overwritten
    array  bytes

    Args:
      arguments: a tree. Random keys and leaves that are not jax arrays are ignored.

    Returns:
      A :class:`Donation`.

    Raises:
      ValueError: if an array is traced, or was deleted.
    """
    places, sizes = {}, {}
    for path, x in jax.tree_util.tree_leaves_with_path(arguments):
        if not isinstance(x, jax.Array) or not x.size or _is_key(x):
            continue
        name = jax.tree_util.keystr(path)
        if isinstance(x, Tracer) or x.is_deleted():
            given = "a traced array" if isinstance(x, Tracer) else "a deleted array"
            raise ValueError(
                f"donation: {name} must be an array in memory, got {given}. Call it "
                "outside of jax.jit: before the step with the arguments, and after it "
                "with the results"
            )
        data = [(shard.device.id, shard.data) for shard in x.addressable_shards]
        places[name] = frozenset((i, x.unsafe_buffer_pointer()) for i, x in data)
        sizes[name] = sum(x.nbytes for _, x in data)
    return Donation(places, sizes)


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)
