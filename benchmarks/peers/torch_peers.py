"""The PyTorch side of ``peers``. It runs in a separate process and prints JSON.

It needs torch, and includes whichever of optimi, torchao, bitsandbytes and flashoptim
are installed. If an optimizer cannot run, its row states why.
"""

import importlib.metadata
import io
import json
import os
import pathlib
import sys
import time
import warnings

warnings.simplefilter("ignore")
# torchao compiles each shape, which takes minutes on a CPU and does not change results.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.peers import tasks  # noqa: E402

# Steps on this small number of parameters are slower with several threads.
torch.set_num_threads(1)

BETAS = (tasks.B1, tasks.B2)
SHARED = {"betas": BETAS, "eps": tasks.EPS, "weight_decay": tasks.DECAY}
BF16, F32 = torch.bfloat16, torch.float32


def _torch(params, lr):
    return torch.optim.AdamW(params, lr=lr, **SHARED)


def _optimi(params, lr):
    import optimi

    return optimi.AdamW(params, lr=lr, kahan_sum=True, **SHARED)


def _torchao(name):
    def make(params, lr):
        from torchao import optim

        options = {"bf16_stochastic_round": params[0].dtype == BF16}
        return getattr(optim, name)(params, lr=lr, **options, **SHARED)

    return make


def _bitsandbytes(params, lr):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=lr, **SHARED)


def _flash(params, lr):
    import flashoptim

    return flashoptim.FlashAdamW(params, lr=lr, master_weight_bits=24, **SHARED)


ROWS = {
    "torch AdamW, float32": (_torch, F32),
    "torch AdamW, bfloat16": (_torch, BF16),
    "optimi AdamW, Kahan": (_optimi, BF16),
    "torchao AdamW8bit, stochastic": (_torchao("AdamW8bit"), BF16),
    "torchao AdamW4bit, stochastic": (_torchao("AdamW4bit"), BF16),
    "torchao AdamWFp8, stochastic": (_torchao("AdamWFp8"), BF16),
    "bitsandbytes AdamW8bit, float32": (_bitsandbytes, F32),
    "bitsandbytes AdamW8bit, bfloat16": (_bitsandbytes, BF16),
    "FlashOptim AdamW": (_flash, BF16),
}
BASELINE = "torch AdamW, float32"


def parameter(values, dtype):
    return torch.nn.Parameter(torch.tensor(values).to(dtype))


def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def arrays(x):
    """Return the plain tensors inside one value of a state."""
    if not isinstance(x, torch.Tensor):
        return []
    if hasattr(x, "__tensor_flatten__") and type(x) is not torch.Tensor:
        names, _ = x.__tensor_flatten__()
        return [y for name in names for y in arrays(getattr(x, name))]
    return [x]


def stored(make, dtype) -> float:
    """Return the bytes of parameters and optimizer state, per parameter."""
    param = parameter(np.zeros(tasks.STORED, np.float32), dtype)
    param.grad = torch.ones_like(param)
    optimizer = make([param], 1e-3)
    optimizer.step()
    kept = [param]
    for state in optimizer.state.values():
        kept += [each for x in state.values() for each in arrays(x)]
    return sum(x.numel() * x.element_size() for x in kept) / param.numel()


def masters(optimizer, param) -> np.ndarray:
    """Return the weights that the next step starts from."""
    kept = optimizer.state.get(param, {}).get("kahan_comp")
    whole = param.detach().float()
    return (whole if kept is None else whole + kept.float()).numpy().copy()


def advance(optimizer, param, gradients):
    for gradient in gradients:
        param.grad = torch.tensor(gradient).to(param.dtype)
        optimizer.step()


def failures(make, dtype) -> dict:
    found = {}
    for name, case in tasks.cases().items():
        torch.manual_seed(0)
        param = parameter(tasks.start(), dtype)
        optimizer = make([param], case.rate)
        advance(optimizer, param, case.gradients[: tasks.HALF])
        half = masters(optimizer, param)
        advance(optimizer, param, case.gradients[tasks.HALF :])
        found[name] = tasks.error(case, half, masters(optimizer, param))
    return found


def resumes(make, dtype) -> str:
    """Return whether a restored run ends with the same bits as an uninterrupted run."""
    gradients = tasks.cases()["rate 1e-6"].gradients[:20]

    def run(interrupted: bool):
        torch.manual_seed(0)
        param = parameter(tasks.start(), dtype)
        optimizer = make([param], 1e-3)
        advance(optimizer, param, gradients[:10])
        if interrupted:
            file = io.BytesIO()
            torch.save((param.detach(), optimizer.state_dict()), file)
            file.seek(0)
            saved, state = torch.load(file, weights_only=False)
            param = torch.nn.Parameter(saved)
            optimizer = make([param], 1e-3)
            optimizer.load_state_dict(state)
        torch.manual_seed(1)
        advance(optimizer, param, gradients[10:])
        return param.detach().float()

    return "same bits" if torch.equal(run(False), run(True)) else "differs"


def trained(make, dtype, seed: int) -> float:
    """Return the final test loss."""
    torch.manual_seed(seed)
    task = tasks.training(seed)
    params = [parameter(w, dtype) for w in task.weights]
    optimizer = make(params, tasks.RATE)

    def loss_of(inputs, classes):
        x = torch.tensor(inputs)
        for param in params[:-1]:
            x = torch.tanh(x @ param.float())
        logits = x @ params[-1].float()
        return torch.nn.functional.cross_entropy(logits, torch.tensor(classes).long())

    for step in range(tasks.STEPS):
        set_rate(optimizer, tasks.rate_at(step))
        optimizer.zero_grad()
        loss_of(task.inputs[step], task.classes[step]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(task.test_inputs, task.test_classes))


def step_times(names) -> dict[str, list[float]]:
    """Return seconds per step. Each round times one step of every optimizer."""
    ready = {}
    for name in names:
        make, dtype = ROWS[name]
        param = parameter(np.ones(tasks.TIMED, np.float32), dtype)
        param.grad = torch.randn(tasks.TIMED).to(dtype)
        ready[name] = make([param], 1e-3)
        ready[name].step()
    times = {name: [] for name in names}
    for _ in range(tasks.ROUNDS):
        for name, optimizer in ready.items():
            start = time.perf_counter()
            optimizer.step()
            times[name].append(time.perf_counter() - start)
    return times


def measured(name: str, seeds: int) -> dict:
    make, dtype = ROWS[name]
    try:
        return {
            "stored": stored(make, dtype),
            "failures": failures(make, dtype),
            "resume": resumes(make, dtype),
            "losses": [trained(make, dtype, seed) for seed in range(seeds)],
        }
    except Exception as problem:
        return {"not_run": f"{type(problem).__name__}: {problem}".splitlines()[0]}


def main():
    seeds = int(sys.argv[1])
    rows = {}
    for name in ROWS:
        start = time.perf_counter()
        rows[name] = measured(name, seeds)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    # torchao is designed to be compiled, so its time without compilation is misleading.
    timed = [x for x in rows if "not_run" not in rows[x] and "torchao" not in x]
    times = step_times(timed)
    for name in timed:
        ratios = np.divide(times[name], times[BASELINE])
        rows[name]["time_ratio"] = float(np.median(ratios))
    versions = {}
    for name in ("torch", "torch-optimi", "torchao", "bitsandbytes", "flashoptim"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    print(json.dumps({"versions": versions, "rows": rows}))


if __name__ == "__main__":
    main()
