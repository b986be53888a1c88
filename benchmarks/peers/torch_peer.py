"""Times torch's fused AdamW for ``gpu_step.py``, in a process of its own.

Reads ``{"sets": {name: shapes}, "rounds": .., "measure": .., "seconds": .., "rate": ..,
"decay": ..}`` from standard input and writes rows as one line of JSON. torch keeps
gradients in the parameters' dtype: the float32 rows read float32 gradients.
"""

import json
import math
import sys
import time

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def nbytes(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def build(shapes, dtype, device: str, rate: float, decay: float):
    """Parameters with gradients, and the optimizer after its first step."""
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=device))
        param.grad = torch.randn(shape, dtype=dtype, device=device)
        params.append(param)
    optimizer = torch.optim.AdamW(params, lr=rate, weight_decay=decay, fused=True)
    optimizer.step()
    return params, optimizer


def timed(optimizer, device: str, calls: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        optimizer.step()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def measure(name: str, shapes, dtype: str, device: str, task: dict) -> dict:
    params, optimizer = build(
        shapes, DTYPES[dtype], device, task["rate"], task["decay"]
    )
    once = timed(optimizer, device, 3)
    calls = max(1, min(2000, math.ceil(task["measure"] / max(once, 1e-7))))
    times = [timed(optimizer, device, calls) for _ in range(task["rounds"])]
    states = [x for each in optimizer.state.values() for x in each.values()]
    states = [x for x in states if isinstance(x, torch.Tensor)]
    stored = nbytes(params) + nbytes(states)
    return {
        "set": name,
        "optimizer": f"torch_adamw_{dtype}",
        "parameters": sum(p.numel() for p in params),
        "times": times,
        "calls": calls,
        "stored_bytes": stored,
        "moved_bytes": 2 * stored + nbytes(p.grad for p in params),
    }


def main():
    task = json.load(sys.stdin)
    device = task["device"]
    end = time.perf_counter() + task["seconds"]
    rows, skipped = [], []
    for name, shapes in task["sets"].items():
        for dtype in DTYPES:
            case = {"set": name, "optimizer": f"torch_adamw_{dtype}"}
            if time.perf_counter() > end:
                skipped.append({**case, "reason": "no time left"})
                continue
            try:
                rows.append(measure(name, shapes, dtype, device, task))
            except Exception as error:
                skipped.append({**case, "reason": str(error)[:500]})
    print(json.dumps({"torch": torch.__version__, "rows": rows, "skipped": skipped}))


if __name__ == "__main__":
    main()
