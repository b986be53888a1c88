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
from lowbit_optax._jaxprs.ownership import owners_of_results
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
        the sample is the whole leaf, and infinity if fewer than three of its blocks
        have moved. The interval is too short if few blocks of the leaf move.
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
        twin, owners = _begun(step, share, seed)
        _check_elementwise(step, update, twin, owners)
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


def _begun(step: Step, share: float, seed: int) -> tuple[_Twin, list[str | None]]:
    """Return a sample of the leaves of a step, and the owners of their moments."""
    shapes = {n: x.shape for n, x in zip(step.names, step.masters, strict=True)}
    blocks = {
        name: _chosen(x, share, (seed, leaf_number(name)))
        for name, x in zip(step.names, step.masters, strict=True)
    }
    parts = step.plan.decode(step.parts)
    inner_state = step.structure.unflatten(parts)
    sampled, owners = [], []
    for part in state_leaves(step.tree(step.params), inner_state):
        leaf, owner = part.leaf, part.owner
        if owner is not None and leaf.shape == shapes[owner]:
            sampled.append(_sampled(leaf, blocks[owner]))
            owners.append(owner)
        elif not leaf.shape or (owner is None and not trees.is_inexact(leaf)):
            sampled.append(leaf)
            owners.append(None)
        else:
            of = "and belongs to no parameter"
            if owner is not None:
                of = f"for params{owner} of shape {list(shapes[owner])}"
            raise ValueError(
                f"probe: the inner transformation must be elementwise, but its state "
                f"{jax.tree_util.keystr(part.path)} has shape {list(leaf.shape)} {of}"
            )
    masters = list(map(_sampled, step.masters, blocks.values()))
    inner_state = jax.tree.unflatten(jax.tree.structure(inner_state), sampled)
    names = tuple(step.names)
    twin = _Twin(names, list(blocks.values()), masters, masters, inner_state)
    # A program cannot donate two arguments that share an array.
    return jax.tree.map(jnp.copy, twin), owners


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
    *rows, block = jnp.unravel_index(blocks, _grid(x.shape))
    columns = _columns(x.shape, block)
    mesh = jax.typeof(x).sharding.mesh
    whole = NamedSharding(mesh, PartitionSpec()) if has_explicit_axes(mesh) else None
    found = x.at[(*(r[:, None] for r in rows), columns)].get(out_sharding=whole)
    return found.reshape((1,) * (x.ndim - 2) + found.shape if x.ndim > 1 else -1)


def _columns(shape: tuple[int, ...], block: jax.Array) -> jax.Array:
    """Return the columns of blocks with these numbers along the last axis."""
    width = min(BLOCK, shape[-1])
    first = jnp.minimum(block * width, shape[-1] - width)
    return first[:, None] + jnp.arange(width, dtype=jnp.int32)


def _is_counted(shape: tuple[int, ...], blocks: Blocks) -> jax.Array:
    """Return a mask of the sample without what the last block of a row repeats."""
    if blocks is None:
        return jnp.ones(shape, jnp.bool_)
    block = blocks % _grid(shape)[-1]
    return _columns(shape, block) >= block[:, None] * min(BLOCK, shape[-1])


def _moved(master, update):
    return master + update if trees.is_inexact(master) else master


def _check_elementwise(
    step: Step, update: Callable, twin: _Twin, owners: list[str | None]
) -> None:
    """Refuse an update that depends on gradients or weights of other elements."""

    def after(grads, inner_state, masters):
        given = step.tree(grads), inner_state, step.tree(masters)
        updates, inner_state = update(*given)
        updates = zip(masters, step.parts_of_updates(updates), strict=True)
        trained = [update for x, update in updates if trees.is_inexact(x)]
        return trained, jax.tree.leaves(inner_state)

    grads = list(map(_sampled, step.grads, twin.blocks))
    closed = jax.make_jaxpr(after)(grads, twin.inner_state, twin.masters)
    each = zip(twin.names, twin.masters, strict=True)
    trained = [name for name, x in each if trees.is_inexact(x)]
    count, given = len(trained), [*twin.names, *owners, *twin.names]
    carried = {count + i: len(twin.names) + i for i in range(len(owners))}
    found = owners_of_results(closed, given, carried)
    for name, owner in zip(trained, found[:count], strict=True):
        if owner not in (None, name):
            raise ValueError(
                "probe: the inner transformation must be elementwise, but the update "
                f"of params{name} depends on other gradients or weights. Move clipping "
                "by a global norm out of lowbit, as in optax.chain(optax."
                "clip_by_global_norm(1.0), lowbit_optax.lowbit_adamw(...))"
            )


def _compared(master, blocks: Blocks, start, wide) -> LeafProbe:
    """Return the comparison of a leaf, with the interval of a ratio of sums."""
    own = _sampled(master, blocks)
    is_counted = _is_counted(master.shape, blocks)
    width = is_counted.shape[-1] if own.ndim else 1

    def dot(x, y):
        products = (x * jnp.conj(y)).real.reshape(is_counted.shape)
        return jnp.sum((products * is_counted).reshape(-1, width), axis=1)

    away, went, moved = own - wide, own - start, wide - start
    squares, along, errors = dot(moved, moved), dot(went, moved), dot(away, away)
    total, count = jnp.sum(squares), squares.size
    safe = jnp.where(total > 0, total, jnp.float32(1))
    ratio = jnp.sum(errors) / safe
    error = jnp.sqrt(ratio)
    lost = jnp.where(total > 0, 1 - jnp.sum(along) / safe, jnp.float32(0))
    of_all = 1 if blocks is None else count / math.prod(_grid(master.shape))
    # Blocks that did not move say nothing about the distance of those that did.
    informative = jnp.sum(squares > 0)
    spread = jnp.sum(((errors - ratio * squares) / safe) ** 2)
    spread = spread * (1 - of_all) * count / max(count - 1, 1)
    margin = _t_quantile(jnp.maximum(informative - 1, 1)) * jnp.sqrt(spread)
    margin = margin / jnp.maximum(2 * error, jnp.float32(1e-30))
    unknown = jnp.float32(math.inf if of_all < 1 else 0)
    margin = jnp.where(informative > 2, margin, unknown)
    return LeafProbe(error, margin, lost, jnp.sqrt(total / jnp.sum(is_counted)))


def _t_quantile(freedom: jax.Array) -> jax.Array:
    """Return the 0.975 quantile of Student's t, for two or more degrees of freedom.

    It is at most 0.8% too small.

    References:
      Abramowitz and Stegun 1964, equation 26.7.5.
    """
    z = 1.959964
    terms = (
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (z**3 + z) / 4,
        z,
    )
    return jnp.polyval(jnp.array(terms, jnp.float32), 1 / freedom)
