"""Memory of a training step of a 2-billion-parameter model, compiled for an H200.

    .venv/bin/python -m benchmarks memory_profile

Lewandowski and Kosson 2023, figure 2: extra bits and updates in the backward pass
reduce the peak memory of SGD with momentum by 54%, compared with PyTorch's mixed
precision. The paper uses a dummy model of 2 billion parameters; this benchmark uses
layers tanh(h @ w). The baseline is optax with float32 parameters and bfloat16 gradients
of a bfloat16 copy, as XLA compiles it.
"""

import optax

import lowbit_optax
from benchmarks import pictures, records
from lowbit_optax import release

NEEDS = ("jax_plugins.xla_cuda12",)

GIB = 2**30
PAPER = -0.54
PARTS = {
    "parameters": "parameters",
    "state": "extra bits and momentum",
    "temporary": "gradients, copies, activations",
}


def cases(steps) -> dict:
    """Return the function that makes the step, and the optimizer, of each case."""
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


def measure(args) -> dict:
    from tools.gpu_program import release_steps
    from tools.gpu_program.steps import bytes_of

    model = release_steps.matrices(args.layers, args.width, args.batch_size)
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
    size = args.layers * args.width**2
    return {"parameters": size, "paper": PAPER, "cases": found}


def _texts(record: dict) -> dict[str, str]:
    """Return each case's peak and its difference from the float32 master's peak."""
    peaks = {name: found["peak"] for name, found in record["cases"].items()}
    master = peaks["float32 master"]
    share = lambda peak: f", {peak / master - 1:+.0%}" if peak != master else ""
    return {n: f"{peak / GIB:.1f} GiB{share(peak)}" for n, peak in peaks.items()}


@pictures.panels(3.7)
def draw(record: dict, bars) -> str:
    cases = record["cases"]
    pictures.stacked(bars, cases, PARTS, GIB, _texts(record))
    bars.set(xlabel="GiB on one H200, compiled and not run (lower is better)")
    share = cases["lowbit_sgd, release"]["peak"] / cases["float32 master"]["peak"]
    return (
        f"For {record['parameters'] / 1e9:.0f} billion parameters, lowbit_sgd with "
        f"gradient release needs {1 - share:.0%} less memory than a float32 master"
    )


SIZES = {"layers": 30, "width": 8192, "batch_size": 2048}
main = records.program(__name__, ran=records.COMPILED, **SIZES)
