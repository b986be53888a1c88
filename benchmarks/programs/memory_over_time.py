"""Memory during a training step, instruction by instruction, compiled for an H200.

    .venv/bin/python -m benchmarks memory_over_time

The model has layers tanh(h @ w), which the loss calls one by one, and the gradients are
clipped to a global norm. XLA reports which values are in memory at each instruction.
Nothing is run.
"""

import functools
import pathlib
import re
import tempfile

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import pictures, records
from lowbit_optax import release

NEEDS = ("jax_plugins.xla_cuda12",)

BF16, GIB = jnp.bfloat16, 2**30
FREE = re.compile(r"constant|bitcast|tuple|get-tuple-element|params|opt_state|h\.\d")
"""Names of instructions that take no time."""


def cases(steps) -> dict:
    """Return the function that makes the step, and the optimizer, of each case."""
    clip, low = optax.clip_by_global_norm(1.0), lowbit_optax.lowbit_adamw(1e-3)
    usual = optax.chain(clip, optax.adamw(1e-3))
    released = functools.partial(release.value_and_update, max_grad_norm=1.0)
    return {
        "float32 master": (steps.usual_mixed_precision, usual),
        "lowbit_adamw": (steps.plain, optax.chain(clip, low)),
        "lowbit_adamw, release": (released, low),
    }


def measure(args) -> dict:
    from tools.gpu_program import release_steps, targets
    from tools.gpu_program.steps import bytes_of

    layer = jax.ShapeDtypeStruct((args.width, args.width), BF16)
    model_params = {f"{i:02}": layer for i in range(args.layers)}
    batch = jax.ShapeDtypeStruct((args.batch_size, args.width), BF16)
    found = {}
    for name, (make_step, tx) in cases(release_steps).items():
        is_usual = make_step is release_steps.usual_mixed_precision
        params = release_steps.to_float32(model_params) if is_usual else model_params
        state = jax.eval_shape(tx.init, params)
        step = make_step(loss_fn, tx)
        arguments = params, state, batch
        lowered = targets.lower_for(
            targets.gpu_mesh(1), step, *arguments, donate=(0, 1)
        )
        with tempfile.TemporaryDirectory() as folder:
            options = {**release_steps.MEMORY_FIRST, "xla_dump_to": folder}
            compiled = targets.compile_lowered(lowered, options)
            temporary = temporary_over_time(pathlib.Path(folder))
        allocated = compiled.memory_analysis().temp_size_in_bytes
        if not 0.95 * allocated <= max(temporary) <= allocated:
            raise RuntimeError(f"values need {max(temporary)} of {allocated} bytes")
        found[name] = {"held": bytes_of(params, state), "temporary": temporary}
    return {"parameters": args.layers * args.width**2, "cases": found}


def loss_fn(params, h):
    for name in sorted(params):
        h = jnp.tanh(h @ params[name])
    return jnp.mean(h.astype(jnp.float32) ** 2)


def temporary_over_time(folder: pathlib.Path) -> list[int]:
    """Return the bytes of temporary memory in use at each instruction."""
    (ranges,) = folder.glob("*after_optimizations-live-range.txt")
    (assignment,) = folder.glob("*after_optimizations-buffer-assignment.txt")
    order, _, lives = ranges.read_text().partition("BufferLiveRange:")
    names = re.findall(r"^ +\d+:(\S+)$", order, re.MULTILINE)
    lives = re.findall(r"^ +(\S+?\{[\d,]*\}):(\d+)-(\d+)$", lives, re.MULTILINE)
    (values,) = re.findall(
        r"^allocation \d+: size \d+, preallocated-temp:\n((?: value: .*\n)*)",
        assignment.read_text(),
        re.MULTILINE,
    )
    places = {
        name if name.endswith("}") else f"{name}{{}}": (int(offset), int(size))
        for name, size, offset in re.findall(
            r"value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\)", values
        )
    }
    used: list[list[tuple[int, int]]] = [[] for _ in range(len(names) + 1)]
    for value, first, last in lives:
        for time in range(int(first), int(last) + 1) if value in places else ():
            used[time].append(places[value])
    return [
        _covered(used[time]) for time, name in enumerate(names) if not FREE.match(name)
    ]


def _covered(places: list[tuple[int, int]]) -> int:
    """Return the size of the union of (offset, size), since values may share bytes."""
    total = end = 0
    for offset, size in sorted(places):
        total += max(0, offset + size - max(end, offset))
        end = max(end, offset + size)
    return total


def text(record: dict) -> str:
    rows = [
        (name, f"{found['held'] / GIB:.2f}", f"{max(found['temporary']) / GIB:.2f}")
        for name, found in record["cases"].items()
    ]
    return records.table(("", "held, GiB", "most temporary, GiB"), rows)


@pictures.panels(3.3)
def draw(record: dict, axes) -> str:
    looks = pictures.looks(record["cases"])
    peaks = {}
    for name, found in record["cases"].items():
        temporary = found["temporary"]
        places = [i / (len(temporary) - 1) for i in range(len(temporary))]
        sizes = [(found["held"] + x) / GIB for x in temporary]
        look = {"color": looks[name]["color"], "ls": looks[name]["ls"]}
        axes.step(places, sizes, where="post", label=name, **look)
        peaks[name] = max(sizes)
    axes.set(xlabel="position in the compiled program", ylabel="GiB in use")
    axes.set(ylim=(0, None), xlim=(0, 1))
    axes.set_xticks([0, 1], ["first instruction", "last"])
    before, after = peaks["lowbit_adamw"], peaks["lowbit_adamw, release"]
    return (
        f"With release, gradients no longer add up: the peak of "
        f"{record['parameters'] / 1e9:.1f} billion parameters falls from "
        f"{before:.1f} to {after:.1f} GiB."
    )


SIZES = {"layers": 24, "width": 4096, "batch_size": 1024}
main = records.program(__name__, ran=records.COMPILED, **SIZES)
