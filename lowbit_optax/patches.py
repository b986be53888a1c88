"""Weight patches: the weights that a step changed, for a copy of them somewhere else.

A trainer and a sampler, such as an inference engine, have the same weights. After each
step, the trainer sends the new values of the weights that changed:

    trainer   params, grads   ---> step ---> params, changed: a tree of bitmaps
              params, changed ---> pack ---> patch, bytes
    sampler   params, patch   ---> apply --> the trainer's params, bit for bit

Weights are compared as bits, so that NaN and -0 are exact.

A patch starts with its number and the checksum of the :class:`Stamp` before it. An
entry for each leaf, or for each shard of a leaf, follows:

    which leaf, and the start and shape of the shard
    positions    7-bit groups of the distances between changed weights, or a bit for
                 each weight, whichever is shorter
    values       the new weights

The stamp after a patch contains the checksum of the stamp before it and of the patch.
Equal stamps therefore mean equal weights at the start and the same patches in the same
order.
"""

import struct
import typing
import zlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from lowbit_optax._arguments import check_type
from lowbit_optax._numerics import bitmaps, positions, scattered
from lowbit_optax._numerics.random_bits import hash_words, row_major
from lowbit_optax._step import context, trees
from lowbit_optax._types import OptState, Params, PyTree, Transformation
from lowbit_optax.transformations import step as steps

__all__ = ["Stamp", "apply", "diff", "pack", "start", "step"]

_MAGIC = b"LBP1"
_HEADER = struct.Struct("<4sQII")  # magic, number, checksum before, CRC of the rest
_ENTRY = struct.Struct("<II?BQQ")  # leaf, CRC, is_bitmap, rank, two sizes in bytes


class Stamp(typing.NamedTuple):
    """The position of a copy of the weights in a sequence of patches.

    Args:
      number: the number of patches so far.
      checksum: 32 bits that depend on the weights at the start and on all patches.
    """

    number: int
    checksum: int


def start(params: PyTree) -> Stamp:
    """Return the stamp of weights before their first patch.

    The trainer and the sampler call it with equal weights, on any sharding. Later, the
    checksums that it returns for two copies show whether they are still equal. It reads
    all weights, where they are.

    Args:
      params: tree of arrays.

    Returns:
      A :class:`Stamp` with number 0. The checksum is the sum of a hash of the bits and
      the place of each weight.

    >>> start({"w": jnp.ones(4)}) == start({"w": np.ones(4, np.float32)})
    True
    """
    names, leaves = _arrays("start", params)
    seeds = [np.uint32(_crc(*x)) for x in zip(names, leaves, strict=True)]
    return Stamp(0, int(_checksum(leaves, seeds)))


def step(
    tx: Transformation,
    params: Params,
    opt_state: OptState,
    grads: PyTree,
    **extra_args: typing.Any,
) -> tuple[Params, OptState, PyTree]:
    """Run :func:`lowbit_optax.step`, and return bitmaps of the weights that it changed.

    Args:
      tx, params, opt_state, grads, extra_args: see :func:`lowbit_optax.step`.

    Returns:
      ``(params, opt_state, changed)``; for ``changed``, see :func:`diff`.

    >>> import lowbit_optax
    >>> tx, params = lowbit_optax.kahan_sgd(0.5), jnp.ones(4, jnp.bfloat16)
    >>> grads = jnp.array([0.0, 1.0, 0.0, 1.0])
    >>> params, state, changed = step(tx, params, tx.init(params), grads)
    >>> changed[:4]
    Array([0, 1, 0, 1], dtype=uint8)
    """
    found, trace = {}, get_opaque_trace_state()

    def record(names: Sequence, leaves: Sequence, marks: Sequence) -> None:
        # Values cannot leave a conditional around the step, as in optax.MultiSteps.
        if get_opaque_trace_state() == trace:
            # A wrapper may rename leaves, and an array may be several leaves.
            keys = zip(names, map(id, leaves), strict=True)
            found.update(zip(keys, marks, strict=True))

    with context.changed(on_changes=record):
        new, state = steps.step(tx, params, opt_state, grads, **extra_args)
    names, before, treedef = trees.named_leaves(params)
    each = zip(names, before, trees.named_leaves(new)[1], strict=True)
    marks = [found[n, id(x)] if (n, id(x)) in found else diff(x, y) for n, x, y in each]
    return new, state, treedef.unflatten(marks)


def diff(old: PyTree, new: PyTree) -> PyTree:
    """Return bitmaps of the weights that differ in any bit.

    You can call it inside ``jax.jit``. The union of the bitmaps of two steps is
    ``jax.tree.map(jnp.bitwise_or, first, second)``.

    Args:
      old, new: trees of arrays with the same structure, shapes and dtypes.

    Returns:
      A tree of uint8 arrays with the same structure, 0.125 bytes per weight. A byte
      contains 8 consecutive rows of a column.

    Raises:
      ValueError: if the trees differ in structure, or a leaf in shape or dtype.

    >>> diff({"w": jnp.zeros(4)}, {"w": jnp.array([0.0, 0.0, -0.0, 1.0])})["w"][:4]
    Array([0, 0, 1, 1], dtype=uint8)
    """
    names, before = _arrays("diff", old)
    after = _like("diff: new", names, old, new)
    for name, x, y in zip(names, before, after, strict=True):
        if trees.describe(x) != trees.describe(y):
            raise ValueError(
                f"diff: new{name} must be {trees.describe(x)}, as in old, got "
                f"{trees.describe(y)}"
            )
    return jax.tree.map(bitmaps.of_changes, old, new)


def pack(params: PyTree, changed: PyTree, stamp: Stamp) -> tuple[bytes, Stamp]:
    """Return a patch with the new values of all changed weights, and the next stamp.

    Only bitmaps, changed values and their positions leave the device, if few weights
    changed. On a mesh, each shard has its own entries. In a program of several
    processes, each process makes patches of its own shards: send all of them, and let
    the sampler keep one stamp for each process.

    Args:
      params: tree of arrays after the step.
      changed: tree of bitmaps, from :func:`step` or :func:`diff`. A weight that is
        marked but did not change is sent, too.
      stamp: the stamp that the previous call returned, or :func:`start`.

    Returns:
      ``(patch, stamp)``; the patch is a bytes object.

    Raises:
      ValueError: if ``changed`` does not belong to ``params``.

    >>> old, new = {"w": jnp.zeros(4)}, {"w": jnp.array([0.0, 0.0, 0.0, 1.0])}
    >>> patch, stamp = pack(new, diff(old, new), start(old))
    >>> sampled, _ = apply(old, patch, start(old))
    >>> sampled["w"]
    Array([0., 0., 0., 1.], dtype=float32)
    """
    check_type("pack: stamp", stamp, Stamp, "a Stamp")
    names, leaves = _arrays("pack", params)
    marks = _like("pack: changed", names, params, changed)
    entries = []
    for n, (name, leaf, marked) in enumerate(zip(names, leaves, marks, strict=True)):
        wanted = f"uint8{list(bitmaps.shape_of(leaf.shape))}"
        if trees.describe(marked) != wanted:
            raise ValueError(
                f"pack: changed{name} must be {wanted} for {trees.describe(leaf)}, got "
                f"{trees.describe(marked)}"
            )
        entries += _entries(n, name, leaf, marked)
    body = b"".join(entries)
    number = stamp.number + 1
    patch = _HEADER.pack(_MAGIC, number, stamp.checksum, zlib.crc32(body)) + body
    return patch, Stamp(number, zlib.crc32(patch))


def apply(params: Params, patch: bytes, stamp: Stamp) -> tuple[Params, Stamp]:
    """Return the weights after a patch, and the next stamp.

    The weights may be on another host, and on another mesh than the trainer's: each
    shard receives the values that belong to it. The old weights stay valid.

    Args:
      params: tree of arrays, of JAX or numpy, with the trainer's names, shapes and
        dtypes.
      patch: the bytes that :func:`pack` returned.
      stamp: the stamp that the previous call returned, or :func:`start`.

    Returns:
      ``(params, stamp)``.

    Raises:
      ValueError: if a patch is missing before this one, was already applied, belongs to
        other weights, or is damaged; or if a leaf has another name, shape or dtype.
    """
    check_type("apply: stamp", stamp, Stamp, "a Stamp")
    check_type("apply: patch", patch, (bytes, bytearray, memoryview), "bytes")
    patch = bytes(patch)
    number, before = _opened(patch)
    if number != stamp.number + 1:
        what = "was already applied" if number <= stamp.number else "is too early"
        raise ValueError(
            f"apply: patch number {number} {what}: these weights contain "
            f"{stamp.number} patches, so the next one must be number {stamp.number + 1}"
        )
    if before != stamp.checksum:
        raise ValueError(
            f"apply: patch number {number} belongs to other weights: it was made after "
            f"checksum {before:08x}, but the checksum of this stamp is "
            f"{stamp.checksum:08x}. Both sides must call start with equal weights"
        )
    names, leaves = _arrays("apply", params)
    found: dict[int, list] = {}
    for n, *entry in _changes(patch, names, leaves):
        found.setdefault(n, []).append(entry)
    for n, entries in found.items():
        axes, values = map(list, zip(*entries, strict=True))
        places = [np.concatenate(x) for x in zip(*axes, strict=True)]
        leaves[n] = scattered.written(leaves[n], places, np.concatenate(values))
    structure = jax.tree.structure(params)
    return structure.unflatten(leaves), Stamp(number, zlib.crc32(patch))


def _arrays(function: str, tree: PyTree) -> tuple[list[str], list]:
    """Return the paths and the leaves of a tree; words and scales are leaves, too."""
    with_path = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path) for path, _ in with_path]
    leaves = [leaf for _, leaf in with_path]
    for name, leaf in zip(names, leaves, strict=True):
        trees.check_plain(function, name, leaf)
        if trees.abstract(leaf).dtype != leaf.dtype:  # JAX would drop its low bits
            raise ValueError(
                f"{function}: params{name} must have at most 32 bits per number unless "
                f"jax_enable_x64 is set, got {trees.describe(leaf)}"
            )
    return names, leaves


def _like(what: str, names: Sequence[str], params: PyTree, tree: PyTree) -> list:
    if jax.tree.structure(params) != jax.tree.structure(tree):
        where = trees.first_difference(names, tree)
        raise ValueError(f"{what} must have the structure of params ({where})")
    return jax.tree.leaves(tree)


def _crc(name: str, leaf) -> int:
    return zlib.crc32(f"{name} {trees.describe(leaf)}".encode())


@jax.jit
def _checksum(leaves: Sequence, seeds: Sequence) -> jax.Array:
    """Return the sum of a hash of each weight and its place, in any order."""
    total = jnp.uint32(0)
    for leaf, seed in zip(leaves, seeds, strict=True):
        for n, word in enumerate(bitmaps.words_of(leaf)):
            place = hash_words(row_major(leaf.shape), seed, jnp.uint32(n))
            total += hash_words(word, place, seed).sum(dtype=jnp.uint32)
    return total


def _entries(number: int, name: str, leaf, marked) -> Iterator[bytes]:
    """Yield the entry of each shard of this process that has changed weights."""
    shards = [((), leaf)]
    if isinstance(leaf, jax.Array):
        shards = [
            (x.index, x.data) for x in leaf.addressable_shards if not x.replica_id
        ]
    if isinstance(marked, jax.Array) and not marked.is_fully_addressable:
        # Other processes may have the bytes of a shard.
        spread = lambda x: bitmaps.unpacked(x, leaf.shape, jnp)
        masks = jax.jit(spread, out_shardings=leaf.sharding)(marked)
        masks = [x.data for x in masks.addressable_shards if not x.replica_id]
    else:
        whole = bitmaps.unpacked(np.asarray(marked), leaf.shape)
        masks = [whole[index[: leaf.ndim]] for index, _ in shards]
    for (index, data), mask in zip(shards, masks, strict=True):
        flat = np.flatnonzero(mask)
        if flat.size:
            box = [[x.start or 0 for x in index], data.shape]
            box = [] if data.shape == leaf.shape else box
            is_bitmap, places = positions.encode(flat, data.size)
            crc, values = _crc(name, leaf), scattered.read(data, flat).tobytes()
            sizes = len(box) and data.ndim, len(places), len(values)
            yield _ENTRY.pack(number, crc, is_bitmap, *sizes)
            yield np.array(box, np.uint64).tobytes() + places + values


def _opened(patch: bytes) -> tuple[int, int]:
    """Return the number of a patch, and the checksum before it; check its bytes."""
    if len(patch) < _HEADER.size or not patch.startswith(_MAGIC):
        raise ValueError("apply: patch must be the bytes that pack returned")
    _, number, before, crc = _HEADER.unpack_from(patch)
    if zlib.crc32(patch[_HEADER.size :]) != crc:
        raise ValueError(f"apply: patch number {number} is damaged or truncated")
    return number, before


def _changes(patch: bytes, names: list[str], leaves: list) -> Iterator[tuple]:
    """Yield ``(leaf, places along each axis, values)`` of each entry."""
    at = _HEADER.size

    def take(length: int) -> bytes:
        nonlocal at
        at += length
        return patch[at - length : at]

    while at < len(patch):
        n, crc, is_bitmap, rank, *sizes = _ENTRY.unpack(take(_ENTRY.size))
        if n >= len(leaves) or _crc(names[n], leaves[n]) != crc:
            has = n < len(leaves)
            given = f"{names[n]}, {trees.describe(leaves[n])}" if has else "nothing"
            raise ValueError(
                f"apply: leaf {n} of params must have the path, shape and dtype that "
                f"it had in pack, got {given}"
            )
        leaf = leaves[n]
        box = np.frombuffer(take(16 * rank), np.uint64).astype(np.int64).tolist()
        shape = tuple(box[rank:]) or leaf.shape or (1,)
        places = np.unravel_index(positions.decode(is_bitmap, take(sizes[0])), shape)
        first = box[:rank] or [0] * len(shape)
        places = tuple(x + start for x, start in zip(places, first, strict=True))
        yield n, places, np.frombuffer(take(sizes[1]), leaf.dtype)
