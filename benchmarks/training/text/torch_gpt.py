"""The PyTorch part of ``compute_optimal``, which runs as torch_gpt.py JOB.npz.

It uses the same model, initial weights, batches and schedule as the JAX part, and needs
torch and torchao. It writes a file for each run into the folder of the job.
"""

import json
import os
import pathlib
import sys
import warnings

warnings.simplefilter("ignore")
# torchao would compile each shape, which takes minutes on a CPU; results are the same.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torchao import optim  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.peers.torch_peers import arrays, set_rate  # noqa: E402
from benchmarks.training.text import kept_runs, stdlib_text  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32
ROWS = {
    "torch AdamW, float32": (torch.optim.AdamW, {}, F32),
    "torchao AdamW8bit, stochastic": (
        optim.AdamW8bit,
        {"bf16_stochastic_round": True},
        BF16,
    ),
    "torchao AdamW4bit, stochastic": (
        optim.AdamW4bit,
        {"bf16_stochastic_round": True},
        BF16,
    ),
}


def losses_of(params: dict, tokens: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the mean loss of ``tools.models.gpt.GPT``, with norms in float32."""
    wide = {name: x.float() for name, x in params.items()}
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    batch, length = inputs.shape
    x = wide["embedding"][inputs] + wide["positions"][:length]
    width = x.shape[-1]
    for i in range(len(wide["layers/qkv"])):
        of = {name[7:]: y[i] for name, y in wide.items() if name.startswith("layers/")}
        qkv = (_norm(x, of["norm_1"]) @ of["qkv"]).view(batch, length, 3, heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(batch, length, width) @ of["out"]
        hidden = F.gelu(_norm(x, of["norm_2"]) @ of["up"], approximate="tanh")
        x = x + hidden @ of["down"]
    logits = _norm(x, wide["norm"]) @ wide["embedding"].T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _norm(x, scale):
    return F.layer_norm(x, x.shape[-1:], eps=1e-5) * scale


def train(name: str, job, settings: dict) -> dict:
    """Train one row with one seed."""
    make, options, dtype = ROWS[name]
    torch.manual_seed(settings["seed"])
    params = {}
    for key in job:
        if key in ("embedding", "positions", "norm") or key.startswith("layers/"):
            x = torch.tensor(job[key])
            # Norms stay float32, as in the other rows.
            params[key] = torch.nn.Parameter(x if "norm" in key else x.to(dtype))
    shared = {"betas": tuple(settings["betas"]), "weight_decay": settings["decay"]}
    optimizer = make(list(params.values()), lr=1e-3, eps=1e-8, **shared, **options)
    run = {"losses": [], "held_out": []}
    points, steps = settings["points"], settings["steps"]
    many = steps // points
    bar = tqdm(range(points), name, disable=None)
    for point in bar:
        windows = stdlib_text.random_windows(
            job["train"],
            (settings["seed"], point),
            (many, settings["batch_size"]),
            job["held_out"].shape[-1],
        )
        losses = []
        for i, tokens in enumerate(windows):
            set_rate(optimizer, float(job["rates"][point * many + i]))
            optimizer.zero_grad()
            loss = losses_of(params, torch.tensor(tokens).long(), settings["heads"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params.values(), settings["clip"])
            optimizer.step()
            losses.append(loss.item())
        run["losses"].append(float(np.mean(losses)))
        if point >= points - settings["tail"]:
            run["held_out"].append(_held_out(params, job, settings))
        bar.set_postfix(loss=f"{run['losses'][-1]:.3f}")
    kept = list(params.values())
    for state in optimizer.state.values():
        kept += [each for x in state.values() for each in arrays(x)]
    size = sum(x.numel() for x in params.values())
    run["bytes"] = sum(x.numel() * x.element_size() for x in kept) / size
    return run


def _held_out(params, job, settings) -> float:
    with torch.no_grad():
        windows = torch.tensor(job["held_out"]).long()
        losses = [losses_of(params, x, settings["heads"]).item() for x in windows]
    return float(np.mean(losses))


def main() -> None:
    path = pathlib.Path(sys.argv[1])
    with np.load(path) as archive:
        job = {name: archive[name] for name in archive.files}
    settings = json.loads(str(job["settings"]))
    torch.set_num_threads(1)  # more threads make steps of small models slower
    for name in ROWS:
        if name not in settings["complete"]:
            run = train(name, job, settings)
            kept_runs.write(path.parent, name, settings["seed"], run)


if __name__ == "__main__":
    main()
