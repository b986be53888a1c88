"""Compare the weights of a run with float32 weights, on a random sample of blocks.

    gradients --+--> step of the run ----------> low-bit weights --+--> error, lost
                +--> sample --> inner update --> float32 weights --+

The sample has float32 weights and float32 moments of its own, and the inner
transformation updates it with the gradients of the run. It therefore shows where
float32 storage would have led, given the same gradients.
"""

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from lowbit_optax._arguments import (
    check_number,
    check_static_int,
    check_transformation,
)
from lowbit_optax._numerics.random_bits import leaf_number
from lowbit_optax._step import context, trees
from lowbit_optax._step.step import Step
from lowbit_optax._step.stepper import with_extra_args
from lowbit_optax._tables import Table, Tabular
from lowbit_optax._types import OptState, PyTree, Transformation
from lowbit_optax.lpmm.sums import zeros
from lowbit_optax.states.masters import master_weights
from lowbit_optax.states.state_leaves import state_leaves
from pallas_kernels.fused_update.shards import has_explicit_axes

BLOCK = 32
"""Number of neighboring elements along the last axis that are sampled together."""

Blocks = jax.Array | None
"""The int32 numbers of the sampled blocks; None for a leaf that is kept as a whole."""


class LeafProbe(typing.NamedTuple):
    """The comparison of a leaf with float32, in float32 scalars; see :class:`Probe`.

    Here a is where the sample started, b is where float32 storage led, and c is the
    master weight of the run.

    Args:
      error: ``|c - b| / |b - a|``, the distance from the float32 weights relative to
        the distance that these have moved.
      margin: half the length of the 95% interval of ``error`` for the whole leaf; 0 if
        the sample is the whole leaf, and infinity if it is one or two blocks of more.
      lost: ``1 - <c - a, b - a> / <b - a, b - a>``, the share of the movement that was
        lost; negative if the run has moved too far.
      moved: ``|b - a|`` per square root of the number of elements.
    """

    error: jax.Array
    margin: jax.Array
    lost: jax.Array
    moved: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class ProbeReport(Tabular):
    """The result of :meth:`Probe.report`; ``print`` it, or log its ``scalars()``.

    Args:
      leaves: dict from the path of a leaf to its :class:`LeafProbe`.
    """

    leaves: dict[str, LeafProbe]

    def scalars(self) -> dict[str, jax.Array]:
        """Return all scalars by path, such as ``"['w']/error"``, for a logger."""
        return {
            f"{name}/{field}": x
            for name, leaf in self.leaves.items()
            for field, x in leaf._asdict().items()
        }

    def table(self) -> Table:
        """Return all scalars, with a row for each leaf."""
        rows = [
            [name, *(f"{float(x):.3g}" for x in leaf)]
            for name, leaf in self.leaves.items()
        ]
        head = ["leaf", *LeafProbe._fields]
        return Table("distance from float32 weights", [head, *rows])


jax.tree_util.register_dataclass(ProbeReport, ["leaves"], [])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["blocks", "start", "masters", "inner_state"],
    meta_fields=["names"],
)
@dataclasses.dataclass(frozen=True)
class _Twin:
    """The sample of the leaves that one ``lowbit`` updates.

    Args:
      names: paths of the leaves.
      blocks: the sampled blocks of each leaf.
      start, masters: the float32 weights of the sample at its start, and now.
      inner_state: the float32 state of the inner transformation for the sample.
    """

    names: tuple[str, ...]
    blocks: list[Blocks]
    start: list
    masters: list
    inner_state: typing.Any

    def after(self, step: Step, update: Callable) -> "_Twin":
        """Return the sample after a step of the run."""
        grads = list(map(_sampled, step.grads, self.blocks))
        given = step.tree(self.masters)
        updates, inner_state = update(step.tree(grads), self.inner_state, given)
        updates = step.parts_of_updates(updates)
        masters = list(map(_moved, self.masters, updates))
        new = step.guard.chosen(
            (masters, inner_state), (self.masters, self.inner_state)
        )
        return dataclasses.replace(self, masters=new[0], inner_state=new[1])

    def compared(self, masters: dict) -> dict[str, LeafProbe]:
        """Compare the sample with the master weights of the run, by path."""
        each = zip(self.names, self.blocks, self.start, self.masters, strict=True)
        return {
            name: _compared(masters[name], blocks, start, master)
            for name, blocks, start, master in each
            if trees.is_inexact(master) and master.size
        }


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["twins"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Probe:
    """A sample of a run that is also trained in float32; see :func:`probe`.

    It is a pytree of arrays: jit it, carry it through ``jax.lax.scan``, and store it in
    checkpoints.

    Args:
      twins: a sample for each ``lowbit`` in the transformation.
    """

    twins: list[_Twin]

    def follow(
        self,
        tx: Transformation,
        params: PyTree,
        state: OptState,
        grads: PyTree,
        **extra_args: typing.Any,
    ) -> "Probe":
        """Return the probe after the step that ``lowbit_optax.step`` is about to do.

        Args:
          tx, params, state, grads: the arguments of the step, before it happens.
          **extra_args: passed to ``tx.update``.

        Raises:
          ValueError: if ``tx`` updates other leaves than in :func:`probe`.
        """
        twins = {twin.names: twin for twin in self.twins}

        def measure(step: Step, update: Callable, _) -> dict:
            names = tuple(step.names)
            if names not in twins:
                raise ValueError(
                    "follow: tx must update the same params as in probe, "
                    f"{', '.join(itertools.chain(*twins))}, got {', '.join(names)}"
                )
            return {names: twins[names].after(step, update)}

        found = _reported(measure, tx, params, state, grads, extra_args)
        return Probe(list(found.values()))

    def report(self, params: PyTree, state: OptState) -> ProbeReport:
        """Compare the sample with the weights of the run after the same steps.

        Args:
          params, state: the parameters and the optimizer state of the run.
        """
        masters = trees.by_path(master_weights(params, state))
        leaves: dict[str, LeafProbe] = {}
        for twin in self.twins:
            leaves |= twin.compared(masters)
        return ProbeReport(leaves)


def probe(
    tx: Transformation,
    params: PyTree,
    state: OptState,
    share: float = 0.006,
    seed: int = 0,
    **extra_args: typing.Any,
) -> Probe:
    """Choose a random sample of each leaf, and train it in float32 along with the run.

    The default sample of an AdamW run needs 0.1 bytes per parameter. Call ``follow``
    before each step with the arguments of the step, and ``report`` as often as you
    like:

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> tx = lowbit_optax.sr_adamw(1e-3)
    >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
    >>> state = tx.init(params)
    >>> sample = probe(tx, params, state)
    >>> grads = {"w": jnp.ones((256, 256), jnp.bfloat16)}
    >>> sample = sample.follow(tx, params, state, grads)
    >>> params, state = lowbit_optax.step(tx, params, state, grads)
    >>> report = sample.report(params, state)
    >>> round(float(report.leaves["['w']"].moved), 4), report.leaves["['w']"].error > 0
    (0.001, Array(True, dtype=bool))

    Args:
      tx: an optax transformation. A :func:`lowbit_optax.lowbit` may be anywhere inside
        it except within a conditional, which ``optax.MultiSteps`` uses.
      params, state: the parameters and the optimizer state of the run, at any step.
      share: the share of the elements to sample, at least one block of 32 per leaf.
      seed: seed of the choice.
      **extra_args: passed to ``tx.update``.

    Returns:
      A :class:`Probe`.

    Raises:
      ValueError: if ``share`` is not in (0, 1], if the arguments are traced, if the
        inner transformation is not elementwise, such as Muon, factored moments or
        clipping inside of ``lowbit``, or if ``tx`` contains no ``lowbit``.
    """
    check_transformation("probe", "tx", tx)
    is_share, accepted = lambda x: 0 < x <= 1, "a number above 0 and at most 1"
    check_number("probe", "share", share, is_share, accepted)
    check_static_int("probe", "seed", seed, 0)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((params, state))):
        raise ValueError("probe: call it outside of jax.jit, got traced arrays")

    def measure(step: Step, update: Callable, _) -> dict:
        twin = _begun(step, share, seed)
        _check_elementwise(step, update, twin)
        return {twin.names: twin}

    grads = jax.tree.map(zeros, params, is_leaf=trees.is_quantized)
    return Probe(
        list(_reported(measure, tx, params, state, grads, extra_args).values())
    )


def _reported(measure, tx, params, state, grads, extra_args) -> dict:
    # A step widens gradients before wrappers such as clipping change them.
    wide = lambda x: x.astype(jnp.float32) if trees.is_narrow_array(x) else x
    with context.reporting("probe", measure) as found:
        tx = with_extra_args(tx)
        tx.update(jax.tree.map(wide, grads), state, params, **extra_args)
    if not found:
        raise ValueError("probe: tx must contain a lowbit transformation, got none")
    return found


def _begun(step: Step, share: float, seed: int) -> _Twin:
    """Return a sample of the leaves of a step, with their weights and moments."""
    shapes = {n: x.shape for n, x in zip(step.names, step.masters, strict=True)}
    blocks = {
        name: _chosen(x, share, (seed, leaf_number(name)))
        for name, x in zip(step.names, step.masters, strict=True)
    }
    parts = step.plan.decode(step.parts)
    inner_state = step.structure.unflatten(parts)
    sampled = []
    for part in state_leaves(step.tree(step.params), inner_state):
        owner = part.owner
        if owner is None or not part.leaf.shape:
            sampled.append(part.leaf)
        elif part.leaf.shape == shapes[owner]:
            sampled.append(_sampled(part.leaf, blocks[owner]))
        else:
            raise ValueError(
                f"probe: the inner transformation must be elementwise, but its state "
                f"{jax.tree_util.keystr(part.path)} has shape {list(part.leaf.shape)} "
                f"for params{owner} of shape {list(shapes[owner])}"
            )
    masters = list(map(_sampled, step.masters, blocks.values()))
    inner_state = jax.tree.unflatten(jax.tree.structure(inner_state), sampled)
    names = tuple(step.names)
    twin = _Twin(names, list(blocks.values()), masters, masters, inner_state)
    # A program cannot donate two arguments that share an array.
    return jax.tree.map(jnp.copy, twin)


def _chosen(x, share: float, seed: Sequence[int]) -> Blocks:
    """Return the numbers of randomly chosen blocks of a leaf."""
    if not x.size or not x.ndim or not trees.is_inexact(x):
        return None
    total = math.prod(_grid(x.shape))
    count = max(1, round(share * total))
    chosen = np.random.default_rng(seed).choice(total, count, replace=False)
    return jnp.asarray(np.sort(chosen), jnp.int32)


def _grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of blocks along each axis. The last block may overlap."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def _sampled(x, blocks: Blocks):
    """Return the elements of an array in these blocks.

    The sample has as many axes as the leaf, because optimizers may treat vectors and
    matrices differently: ``[1, ..., blocks, BLOCK]``, or all elements of a vector.
    """
    if blocks is None:
        return x
    width = min(BLOCK, x.shape[-1])
    *rows, block = jnp.unravel_index(blocks, _grid(x.shape))
    first = jnp.minimum(block * width, x.shape[-1] - width)
    columns = first[:, None] + jnp.arange(width, dtype=jnp.int32)
    mesh = jax.typeof(x).sharding.mesh
    whole = NamedSharding(mesh, PartitionSpec()) if has_explicit_axes(mesh) else None
    found = x.at[(*(r[:, None] for r in rows), columns)].get(out_sharding=whole)
    return found.reshape((1,) * (x.ndim - 2) + found.shape if x.ndim > 1 else -1)


def _moved(master, update):
    return master + update if trees.is_inexact(master) else master


def _check_elementwise(step: Step, update: Callable, twin: _Twin) -> None:
    """Refuse an update that depends on gradients or weights of other elements."""
    few = lambda x: x[..., :1, :8] if x.ndim > 1 else x[:8] if x.ndim else x
    masters = list(map(few, twin.masters))
    inner_state = jax.tree.map(
        lambda x: few(x) if isinstance(x, jax.Array) and x.ndim else x, twin.inner_state
    )
    keys = jax.random.split(jax.random.key(0), len(masters))
    grads = [
        jax.random.normal(key, x.shape) if trees.is_inexact(x) else grad
        for key, x, grad in zip(keys, masters, step.grads, strict=True)
    ]
    is_first = [jnp.arange(x.size).reshape(x.shape) == 0 for x in masters]
    larger = lambda leaves: [
        jnp.where(at, 1e4 * x + 1, x) if trees.is_inexact(x) else x
        for at, x in zip(is_first, leaves, strict=True)
    ]

    def updates(grads, masters):
        given = step.tree(grads), inner_state, step.tree(masters)
        return step.parts_of_updates(update(*given)[0])

    pairs = updates(grads, masters), updates(*map(larger, (grads, masters)))
    pairs = zip(*pairs, strict=True)
    for name, at, (x, y) in zip(twin.names, is_first, pairs, strict=True):
        if not bool(jnp.all((x == y) | at | (jnp.isnan(x) & jnp.isnan(y)))):
            raise ValueError(
                "probe: the inner transformation must be elementwise, but the update "
                f"of params{name} depends on other gradients or weights. Move clipping "
                "by a global norm out of lowbit, as in optax.chain(optax."
                "clip_by_global_norm(1.0), lowbit_optax.lowbit_adamw(...))"
            )


def _compared(master, blocks: Blocks, start, wide) -> LeafProbe:
    """Return the comparison of a leaf, with the interval of a ratio of sums."""
    own = _sampled(master, blocks)
    width = min(BLOCK, own.shape[-1]) if own.ndim else 1
    dot = lambda x, y: jnp.sum((x * jnp.conj(y)).real.reshape(-1, width), axis=1)
    away, went, moved = own - wide, own - start, wide - start
    squares, along, errors = dot(moved, moved), dot(went, moved), dot(away, away)
    total, count = jnp.sum(squares), squares.size
    safe = jnp.where(total > 0, total, jnp.float32(1))
    ratio = jnp.sum(errors) / safe
    of_all = 1 if blocks is None else count / math.prod(_grid(master.shape))
    spread = jnp.sum((errors - ratio * squares) ** 2) / safe**2
    spread = spread * (1 - of_all) * count / max(count - 1, 1)
    error = jnp.sqrt(ratio)
    if count > 2:
        margin = _t_quantile(count - 1) * jnp.sqrt(spread)
        margin = margin / jnp.maximum(2 * error, jnp.float32(1e-30))
    else:
        margin = jnp.float32(math.inf if of_all < 1 else 0)
    lost = jnp.where(total > 0, 1 - jnp.sum(along) / safe, jnp.float32(0))
    return LeafProbe(error, margin, lost, jnp.sqrt(total / own.size))


def _t_quantile(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t, for two or more degrees of freedom.

    References:
      Abramowitz and Stegun 1964, equation 26.7.5, with the first three terms.
    """
    z = 1.959964
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
