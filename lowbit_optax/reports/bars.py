"""The plot of a :class:`MemoryReport`: bytes per parameter as stacked bars."""

import typing

# The colors of Okabe and Ito, which people with color blindness can distinguish.
_COLOURS = {
    "parameters": "#0072B2",
    "float32 master and moments": "#999999",
    "residual": "#56B4E9",
    "moments": "#009E73",
    "accumulators": "#F0E442",
    "other": "#CC79A7",
    "gradients": "#E69F00",
}


def bars(report: typing.Any) -> dict[str, dict[str, float]]:
    """Return a dict from each bar to the bytes per parameter of its parts, in order.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    >>> tx = lowbit_optax.kahan_adamw(1e-3)
    >>> found = bars(lowbit_optax.memory_report(tx, params))
    >>> {part: round(size, 3) for part, size in found["this optimizer"].items()}
    {'parameters': 2.0, 'residual': 2.0, 'moments': 4.0, 'gradients': 2.0}
    """
    total = report.total
    of_state = ("residual", "moments", "accumulators", "other")
    held = {"parameters": total.params}
    held |= {part: getattr(total, part) for part in of_state}
    usual = {
        "parameters": total.params,
        "float32 master and moments": max(total.float32_master - total.params, 0),
    }
    found = {
        "optax, float32 master": usual | {"gradients": report.gradients},
        "this optimizer": held | {"gradients": report.gradients},
        "with gradient release": held | {"gradients": report.released_gradients},
    }
    size = max(total.size, 1)
    return {
        name: {part: n / size for part, n in parts.items() if n / size >= 0.0005}
        for name, parts in found.items()
    }


def draw(report: typing.Any, ax: typing.Any = None):
    """Draw the bars with matplotlib; see :meth:`MemoryReport.plot`."""
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError(
                "MemoryReport.plot needs matplotlib; install it with pip install "
                "matplotlib, or use print(report), which shows the same figures"
            ) from error
        ax = pyplot.subplots(figsize=(7, 2.6), layout="constrained")[1]
    found = bars(report)
    names = list(found)
    for row, name in enumerate(names):
        left = 0.0
        for part, size in found[name].items():
            ax.barh(row, size, left=left, color=_COLOURS[part], height=0.6)
            left += size
        ax.annotate(
            f"{left:.2f}", (left, row), (4, 0), textcoords="offset points", va="center"
        )
    for part, colour in _COLOURS.items():
        if any(part in parts for parts in found.values()):
            ax.barh(0, 0, color=colour, label=part)  # for the legend, in this order
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_xlabel("bytes per parameter (without activations)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    return ax
