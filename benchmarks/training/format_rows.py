"""Ways to keep weights and moments, each beside the same optimizer in float32."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records
from lowbit_optax import extra_bits, stochastic_rounding


class Row(NamedTuple):
    """An optimizer and its formats.

    Attributes:
      base: the row in float32 that it is compared with; its own name if it is that one.
      inner: of a learning rate, what is wrapped.
      weights, moments: formats of ``lowbit``.
      dtype: of the parameters.
      color, style: of its curve.
    """

    base: str
    inner: Callable[[optax.Schedule], optax.GradientTransformation]
    weights: Any = None
    moments: Any = None
    dtype: Any = jnp.bfloat16
    color: str = "black"
    style: str = "-"

    def build(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """``inner`` in float32 for a base, in its formats otherwise."""
        inner = self.inner(rate)
        if self.dtype == jnp.float32:
            return inner
        return lowbit_optax.lowbit(inner, weights=self.weights, moments=self.moments)

    def start(self, tx, master):
        """Parameters and state from float32 weights; vectors and norms keep float32."""
        if self.dtype == jnp.float32:
            return master, tx.init(master)
        keep = lambda path, leaf: leaf.ndim < 2 or "norm" in path.lower()
        dtypes = lowbit_optax.param_dtypes(master, self.dtype, keep)
        return lowbit_optax.from_master(tx, master, dtypes)

    def bytes_per_parameter(self, master) -> float:
        """Of parameters and state from float32 shapes; nothing is allocated."""
        tx = self.build(optax.constant_schedule(1e-3))
        params, _ = jax.eval_shape(functools.partial(self.start, tx), master)
        return lowbit_optax.memory_report(tx, params).bytes_per_param


def adamw() -> dict[str, Row]:
    """Rows of AdamW."""

    def row(weights, moments, color: str, style: str = "-", dtype=jnp.bfloat16):
        color = pictures.COLORS[color]
        return Row("float32", optax.adamw, weights, moments, dtype, color, style)

    into = stochastic_rounding(error_into="mu")
    return {
        "float32": Row("float32", optax.adamw, dtype=jnp.float32),
        "bfloat16, nearest": row(
            lowbit_optax.nearest(), lowbit_optax.cast(jnp.bfloat16), "nearest"
        ),
        "8 extra bits": row(extra_bits(8), None, "lowbit"),
        "8 extra bits, low moments": row(extra_bits(8), "low", "lowbit", "--"),
        "stochastic": row(stochastic_rounding(), None, "stochastic"),
        "error into mu": row(into, None, "extra bits"),
        "error into mu, low moments": row(into, "low", "extra bits", "--"),
        "float16, 8 extra bits": row(extra_bits(8), None, "lowbit", ":", jnp.float16),
    }


class Run(NamedTuple):
    """What a seed of training gives: losses of all steps, and figures at the end."""

    losses: Sequence[float]
    ends: dict[str, float]


def figures(
    found: dict[str, list[Run]], rows: dict[str, Row], points: int, master
) -> dict:
    """For the record: by row, the spreads of its figures and of gaps to its base.

    Args:
      found: by row, a run for each seed.
      rows: by name.
      points: how many a curve has; each is the mean loss of as many steps.
      master: float32 shapes of a large model, for the bytes.
    """
    curves = {
        name: np.reshape([run.losses for run in runs], (len(runs), points, -1)).mean(2)
        for name, runs in found.items()
    }

    def of(name: str) -> dict:
        base = rows[name].base
        ends = {"training": (curves[name][:, -1], curves[base][:, -1])}
        for end in found[name][0].ends:
            both = ([run.ends[end] for run in found[each]] for each in (name, base))
            ends[end] = tuple(map(np.asarray, both))
        return {
            "bytes_per_parameter": rows[name].bytes_per_parameter(master),
            "curves": curves[name],
            **{end: records.spread(own) for end, (own, _) in ends.items()},
            "gaps": {e: records.spread(own - wide) for e, (own, wide) in ends.items()},
        }

    return {name: of(name) for name in found}


def table(runs: dict, rows: dict[str, Row], ends: dict[str, int]) -> str:
    """Markdown: bytes, then each figure of ``ends`` by its digits, and its gap."""
    heads = ["", "bytes"]
    for end in ends:
        heads += [end, "minus float32's"]
    lines = []
    for name, each in runs.items():
        line = [name, f"{each['bytes_per_parameter']:.2f}"]
        for end, digits in ends.items():
            gap = records.shown(each["gaps"][end], digits) if end in each else ""
            own = records.shown(each[end], digits) if end in each else ""
            line += [own, "" if rows[name].base == name else gap]
        lines.append(line)
    return records.table(heads, lines)


def draw(record: dict, rows: dict[str, Row], path, steps: int, least: float) -> None:
    """Curves of the training loss, and how far they are from float32's, into a PNG.

    Args:
      record: with ``runs`` of :func:`figures`.
      rows: by name.
      path: of the PNG.
      steps: how many a point of the record stands for; each drawn is the mean of three.
      least: the part of the training that is left out at the start.
    """
    recent = lambda curve: np.convolve(curve, np.ones(3) / 3, "valid")
    with pictures.drawn(path, 3.6, (4, 5)) as (losses, gaps):
        for name, run in record["runs"].items():
            row, base = rows[name], record["runs"][rows[name].base]
            look = {"color": row.color, "ls": row.style, "lw": 1.2, "label": name}
            curve = np.asarray(run["curves"])
            at = steps * np.arange(3, 1 + curve.shape[1])
            late = at > least * at[-1]
            losses.plot(at[late], recent(curve.mean(0))[late], **look)
            gap = recent((curve - np.asarray(base["curves"])).mean(0))
            gaps.plot(at[late], gap[late], **look)
        losses.set(xlabel="step", ylabel="training loss, mean of all seeds")
        gaps.set(xlabel="step", ylabel="minus that of float32")
        gaps.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
