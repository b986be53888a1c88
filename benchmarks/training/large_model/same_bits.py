"""Count the bits that differ between a run and the arrays that processes kept.

Every process writes the shards of its own devices to a file, without Orbax. A run on
another mesh, in one process, then compares its arrays with all files.
"""

import pathlib
import pickle

import jax
import numpy as np


def keep(tree, path: pathlib.Path) -> None:
    """Write the shards that this process owns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(_own_shards(tree)))


def differing(tree, paths: list[pathlib.Path]) -> int:
    """Return the number of bits that differ from the shards in files.

    In a run of several processes, every process passes its own file. In one process,
    pass all files, whose shards must cover all arrays.
    """
    kept = {}
    for path in paths:
        kept |= pickle.loads(path.read_bytes())
    if jax.process_count() > 1:
        own = _own_shards(tree)
        assert own.keys() == kept.keys()
        return sum(bits(own[key], kept[key]) for key in own)
    arrays = {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(tree)
    }
    assert {name for name, _ in kept} == arrays.keys()
    assert sum(x.size for x in kept.values()) == sum(x.size for x in arrays.values())
    return sum(
        bits(arrays[name][tuple(slice(*x) for x in index)], shard)
        for (name, index), shard in kept.items()
    )


def bits(left, right) -> int:
    """Return the number of bits that differ between two arrays."""
    left, right = np.asarray(left), np.asarray(right)
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    pair = (np.frombuffer(x.tobytes(), np.uint8) for x in (left, right))
    return int(np.bitwise_count(np.bitwise_xor(*pair)).sum())


def largest_change(before, after) -> float:
    """Return the largest change of an array, relative to its root mean square."""

    def size(x) -> float:
        return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))

    change = lambda old, new: size(np.asarray(new) - np.asarray(old)) / size(old)
    # In contrast to max, NumPy's maximum is NaN if any change is.
    return float(np.max(jax.tree.leaves(jax.tree.map(change, before, after))))


def _own_shards(tree) -> dict:
    """Return the shards of this process by name and place, each of them once."""
    return {
        (
            jax.tree_util.keystr(path),
            tuple((part.start, part.stop) for part in shard.index),
        ): np.array(shard.data)
        for path, x in jax.tree.leaves_with_path(tree)
        for shard in x.addressable_shards
        if shard.replica_id == 0
    }
