"""Memory of a training step of a 2-billion-parameter model, compiled for an H200.

    .venv/bin/python -m benchmarks memory_profile

Lewandowski and Kosson 2023, figure 2: peak memory of SGD with momentum on a dummy
2-billion-parameter model is 54% lower with extra bits and the update in the backward
pass than with torch's mixed precision. Here it is layers tanh(h @ w); the baseline is
optax on float32 parameters, by bfloat16 gradients at a copy, as XLA compiles it.
"""

import optax

import lowbit_optax
from benchmarks import pictures, records
from lowbit_optax import release

GIB = 2**30
PAPER = -0.54
PARTS = {
    "parameters": "parameters",
    "state": "extra bits and momentum",
    "temporary": "gradients, copies, activations",
}


def cases(steps) -> dict:
    """How to make each step, and its optimizer."""
    rate, momentum = 1e-3, 0.9
    whole = lowbit_optax.extra_bits_sgd(rate, momentum, bits=16)
    eight = lowbit_optax.extra_bits_sgd(rate, momentum, bits=8)
    low = lowbit_optax.lowbit_sgd(rate, momentum)
    return {
        "float32 master": (steps.usual_mixed_precision, optax.sgd(rate, momentum)),
        "16 extra bits": (steps.plain, whole),
        "16 extra bits, release": (release.value_and_update, whole),
        "8 extra bits, release": (release.value_and_update, eight),
        "lowbit_sgd": (steps.plain, low),
        "lowbit_sgd, release": (release.value_and_update, low),
    }


def measure(layers: int, width: int, batch: int) -> dict[str, dict]:
    """Bytes of each case, by part."""
    from tools.gpu_program import release_steps
    from tools.gpu_program.steps import bytes_of

    model = release_steps.matrices(layers, width, batch)
    found = {}
    for name, (make_step, tx) in cases(release_steps).items():
        step = release_steps.compile_step(make_step, model, tx)
        params = bytes_of(model.params)
        if make_step is release_steps.usual_mixed_precision:
            params = bytes_of(release_steps.to_float32(model.params))
        found[name] = {
            "parameters": params,
            "state": step.stored - params,
            "temporary": step.temporary,
            "peak": step.peak,
        }
        peak, master = step.peak, found["float32 master"]["peak"]
        print(f"{name:24} {peak / GIB:6.2f} GiB {peak / master - 1:+.0%}", flush=True)
    return found


def draw(record: dict, is_apart: bool) -> None:
    cases = record["cases"]
    master = cases["float32 master"]["peak"]

    def text(peak: int) -> str:
        share = f", {peak / master - 1:+.0%}" if peak != master else ""
        return f"{peak / GIB:.1f} GiB{share}"

    texts = {name: text(found["peak"]) for name, found in cases.items()}
    with pictures.drawn(pictures.picture_of("memory_profile", is_apart), 3, (1,)) as (
        bars,
    ):
        pictures.stacked(bars, cases, PARTS, GIB, texts)
        bars.set(xlabel="GiB of one H200, from the compiled program; nothing was run")
        bars.legend(loc="lower right")


def main(argv: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--layers", type=int, help="30 by default: 2.0e9 parameters")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=2048, help="rows")
    args = parser.parse_args(argv)
    args.layers = args.layers or (120 if args.full else 30)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        found = measure(args.layers, args.width, args.batch_size)
        records.save(
            path,
            args,
            "compiled for an H200; not run",
            parameters=args.layers * args.width**2,
            paper=PAPER,
            cases=found,
        )
    draw(records.load(path), args.is_apart)
