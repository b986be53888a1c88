"""What a choice costs and saves: memory by part, and updates that rounding eats."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import apply_leaf
from lowbit_optax._step import trees
from lowbit_optax._step.state import LowbitState
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax.formats import quantized_tensor

_PARTS = ("params", "residual", "moments", "accumulators", "other")

# The fields of accumulate_gradients' state and of MultiSteps' that hold sums.
_ACCUMULATORS = (".accumulators", ".acc_grads")


@dataclasses.dataclass(frozen=True)
class LeafMemory:
    """Bytes of one leaf, by part; ``float32_master`` is what optax would keep.

    Sums of microbatches' gradients are a part of their own, ``accumulators``: they are
    there because of ``accumulate_gradients``, whatever the optimizer in it keeps.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    params: int
    residual: int
    moments: int
    accumulators: int
    other: int
    float32_master: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in _PARTS)


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The table that :func:`memory_report` makes; ``str`` prints it.

    Args:
      leaves: one entry a parameter leaf.
      total: their sum, with state that belongs to no leaf (counts) under ``other``.
    """

    leaves: tuple[LeafMemory, ...]
    total: LeafMemory

    @property
    def bytes_per_param(self) -> float:
        """Parameters and optimizer state, without gradients."""
        return self.total.total / max(self.total.size, 1)

    def __str__(self) -> str:
        width = max([len("total"), *(len(leaf.name) for leaf in self.leaves)])
        header = ["leaf".ljust(width), f"{'parameters':>12}", f"{'dtype':>14}"]
        shown = ["params", "residual", "moments", "total"]
        if self.total.accumulators:
            shown.insert(3, "accumulators")
        wide = {part: max(len(part), 9) for part in shown}
        header += [f"{part:>{wide[part]}}" for part in shown] + ["f32 master"]
        lines = ["bytes a parameter", "  ".join(header)]
        for leaf in (*self.leaves, self.total):
            size = max(leaf.size, 1)
            cells = [leaf.name.ljust(width), f"{leaf.size:>12,}", f"{leaf.dtype:>14}"]
            cells += [f"{getattr(leaf, p) / size:>{wide[p]}.3f}" for p in shown]
            cells.append(f"{leaf.float32_master / size:>10.3f}")
            lines.append("  ".join(cells))
        saved = self.total.float32_master - self.total.total
        lines.append(
            f"{self.total.total:,} bytes of parameters and optimizer state; optax with "
            f"a float32 master:\n{self.total.float32_master:,} ({saved:,} more). "
            "Gradients come on top."
        )
        return "\n".join(lines)


def memory_report(
    tx: optax.GradientTransformation, params: optax.Params
) -> MemoryReport:
    """Bytes a parameter, by part, by leaf and in total, without allocating any state.

    Args:
      tx: an optax transformation; those of :func:`lowbit_optax.lowbit` may be anywhere
        inside it.
      params: tree of arrays or ShapeDtypeStructs. A QuantizedTensor is one leaf, of its
        logical shape.

    Returns:
      A :class:`MemoryReport`; ``print`` it. "f32 master" is the usual step with the
      same inner transformation: the parameters, a float32 master of those that are
      narrower, and float32 moments and accumulators. Of a QuantizedTensor, float32
      parameters.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    >>> report = memory_report(lowbit_optax.extra_bits_adamw(1e-3, bits=8), params)
    >>> round(report.bytes_per_param, 2)
    11.0
    """
    names, leaves, _ = quantized_tensor.named_leaves(params)
    state = jax.eval_shape(tx.init, params)
    parts = ("residual", "moments", "accumulators", "float32")
    found = {name: dict.fromkeys(parts, 0) for name in names}
    shapes = {name: tuple(leaf.shape) for name, leaf in zip(names, leaves, strict=True)}
    loose = 0
    by_length = sorted(names, key=len, reverse=True)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        text = jax.tree_util.keystr(path)
        size = leaf.size * leaf.dtype.itemsize
        owner = next((name for name in by_length if text.endswith(name)), None)
        field = "" if owner is None else text.removesuffix(owner)
        part = "accumulators" if any(x in field for x in _ACCUMULATORS) else "moments"
        if ".residual" in field:
            found[owner]["residual"] += size
        elif field.endswith(".codes") and leaf.dtype == jnp.uint32:
            found[owner][part] += size
            found[owner]["float32"] += 4 * math.prod(shapes[owner])
        elif field.endswith(".scales"):
            found[owner][part] += size
        elif owner is None or _is_scalar_of_the_state(leaf, shapes[owner], text, owner):
            loose += size
        else:
            found[owner][part] += size
            # Moments of another shape, such as factored ones, are what they are.
            same = leaf.shape == shapes[owner]
            found[owner]["float32"] += 4 * leaf.size if same else size
    rows = []
    for name, leaf in zip(names, leaves, strict=True):
        dtype, stored, usual = _parameters(leaf)
        rows.append(
            LeafMemory(
                name,
                tuple(leaf.shape),
                dtype,
                stored,
                *(found[name][part] for part in parts[:3]),
                0,
                usual + found[name]["float32"],
            )
        )
    add = lambda part: sum(getattr(row, part) for row in rows)
    total = LeafMemory(
        "total",
        (add("size"),),
        "",
        *(add(part) for part in _PARTS[:4]),
        loose,
        add("float32_master"),
    )
    return MemoryReport(tuple(rows), total)


def _parameters(leaf) -> tuple[str, int, int]:
    """A leaf's dtype, its bytes, and those of the usual step, a master included."""
    size, dtype = math.prod(leaf.shape), jnp.dtype(leaf.dtype)
    usual = size * dtype.itemsize + (4 * size if is_narrow(dtype) else 0)
    if quantized_tensor.is_quantized(leaf):
        return f"{leaf.bits} bits", leaf.nbytes, usual
    return dtype.name, size * dtype.itemsize, usual


def _is_scalar_of_the_state(
    leaf, shape: tuple[int, ...], path: str, owner: str
) -> bool:
    """Whether a state leaf at a parameter's path is a count or hyperparameter."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return True
    if leaf.shape:
        return False
    return bool(shape) or (not owner and ".hyperparams" in path)


def cancelled_updates(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    **extra_args,
):
    """The share of non-zero updates that rounding to nearest would cancel, per leaf.

        share = #{u != 0 and round(p + u) == p} / #{u != 0}

    with u the float32 update of the inner transformation and p the stored parameter. Of
    a QuantizedTensor ``round`` is to the nearest code, with the steps of p + u.
    A share near 1 says that plain training in this dtype has stopped learning there.

    Args:
      tx: an optax transformation; for one of :func:`lowbit_optax.lowbit`, the update
        its inner transformation makes is meant.
      grads, state, params: as for ``tx.update``.
      **extra_args: for ``tx.update``.

    Returns:
      A tree like ``params`` (a QuantizedTensor is one leaf) of float32 scalars from 0
      to 1 (0 where no update is non-zero). jit it with the step.

    References:
      Zamirai et al. 2020, figure 9.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> tx = lowbit_optax.kahan_sgd(1.0)
    >>> params = jnp.ones(4, jnp.bfloat16)
    >>> grads = jnp.array([0.0, 1e-5, 1e-4, 1.0])
    >>> cancelled_updates(tx, grads, tx.init(params), params)
    Array(0.6666667, dtype=float32)
    """
    stepper = stepper_of(tx)
    if stepper is not None:
        updates = stepper.inner_update(params, state, grads, **extra_args)
    else:
        parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, LowbitState))
        if any(isinstance(part, LowbitState) for part in parts):
            raise ValueError(
                "cancelled_updates: give the transformation that lowbit returned, not "
                "a wrapper around it, whose updates are rounded already"
            )
        tx = optax.with_extra_args_support(tx)
        updates, _ = tx.update(grads, state, params, **extra_args)

    def share(param, update):
        if not trees.is_float(param):
            return jnp.float32(0)
        moved = update != 0
        if quantized_tensor.is_quantized(param):
            old = param.dequantize()
            sums = old + update.astype(jnp.float32)
            same = quantized_tensor.requantize(sums, param, None).dequantize() == old
        else:
            same = apply_leaf(param, update) == param
        count = jnp.sum(moved, dtype=jnp.float32)
        cancelled = jnp.sum(moved & same, dtype=jnp.float32)
        return cancelled / jnp.maximum(count, jnp.float32(1))

    return jax.tree.map(share, params, updates, is_leaf=quantized_tensor.is_quantized)
