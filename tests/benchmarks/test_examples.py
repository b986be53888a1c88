"""The examples as users run them: output, resuming, and one-sentence errors."""

import ast
import os
import pathlib
import re
import runpy
import signal
import sys

import jax.numpy as jnp
import pytest
from flax.serialization import msgpack_restore
from matplotlib.image import imread

from tests.helpers.places import ROOT, run_python

EXAMPLES = ROOT / "examples"
NAMES = ["fsdp.py", "gpt.py", "resnet_cifar.py"]
SHORT = [  # no arguments
    "block_scaled_float8.py",
    "logical_axes.py",
    "lookahead.py",
    "weight_patches.py",
]
ELSEWHERE = ["large_model.py", "two_processes.py"]  # test_rehearsal and states
SUPPORT = "cifar_support"  # what resnet_cifar.py imports
SMALL = "--width 4 --pixels 8 --batch-size 64 --steps 3"
TINY = {
    "resnet_cifar.py": SMALL.split(" "),
    "gpt.py": ["--layers", "2", "--width", "32", "--context", "16", "--steps", "4"],
    "fsdp.py": ["--steps", "12", "--learning-rate", "1e-2"],
}

pytestmark = pytest.mark.example


@pytest.fixture
def run(tmp_path, tmp_path_factory):
    """``run(name, *flags)`` returns an example's output; CIFAR-10 is missing."""

    def run(name, *flags, before="", status=0):
        program = [str(EXAMPLES / name), *TINY.get(name, []), *flags]
        if before:
            start = f"import runpy, sys\nsys.argv = {program}\n{before}\n"
            start += f"runpy.run_path({program[0]!r}, run_name='__main__')"
            program = ["-c", start]
        ended = run_python(
            *program,
            cwd=tmp_path,
            HOME=str(tmp_path),
            PYTHONPATH=os.pathsep.join(map(str, (ROOT, EXAMPLES))),
            JAX_PLATFORMS="cpu",
            JAX_COMPILATION_CACHE_DIR=str(tmp_path_factory.getbasetemp() / "compiled"),
            https_proxy="http://127.0.0.1:9",  # nothing is downloaded
        )
        assert ended.returncode == status, ended.stderr
        if status > 0:
            assert "Traceback" not in ended.stderr
            return ended.stderr.splitlines()[-1]
        return ended.stdout

    return run


def test_each_is_a_short_file_that_imports_what_is_installed():
    files = sorted(EXAMPLES.glob("[!_]*.py"))
    tested = [*NAMES, *SHORT, *ELSEWHERE, f"{SUPPORT}.py"]
    assert [path.name for path in files] == sorted(tested)
    others = {path.stem for path in files} | {"benchmarks", "tools"}
    for path in files:
        is_short = len(path.read_text().splitlines()) <= 260
        assert is_short or path.name == "large_model.py", path
        refused = others - {SUPPORT} if path.stem == "resnet_cifar" else others
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert refused.isdisjoint(name.name for name in node.names), path
            if isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] not in refused, path


def _rows(shown):
    """The lines of the last table, by format."""
    table = shown[shown.index("format ") :].split("plot of")[0].splitlines()[1:]
    return {line.split()[0]: line.split()[1:] for line in table}


def test_formats_are_compared_on_the_digits_where_there_is_no_cifar(run, tmp_path):
    shown = run("resnet_cifar.py", "--compare")
    assert "CIFAR-10 cannot be downloaded" in shown
    assert "digits: 1,497 images to train on, 300 to test on" in shown
    rows = _rows(shown)
    assert list(rows) == ["float32", "nearest", "sr", "kahan", "extra_bits", "lowbit"]
    for trained, loss, accuracy, _ in rows.values():
        assert float(trained) < 10
        assert float(loss) < 10
        assert re.fullmatch(r"\d+\.\d\d%", accuracy)
    size = {name: float(row[-1]) for name, row in rows.items()}
    assert size["nearest"] < size["lowbit"] < size["float32"] == 12
    assert "\r" not in shown, "plain lines in a pipe"
    picture = pathlib.Path(re.search(r"plot .*: (.*)", shown).group(1))
    assert picture == tmp_path / "resnet_cifar.png"
    assert imread(picture).shape[2] == 4


def test_released_steps_train_the_same_and_their_memory_is_shown(run):
    flags = ["--steps", "11"]
    plain, released = (
        run("resnet_cifar.py", *flags, *more) for more in ([], ["--release"])
    )
    memory = r"{}: .* [\d.]+ MiB"
    for step in ("train_step", "release_step"):
        assert re.search(memory.format(step), released)
    loss = [float(re.search(r"test loss ([\d.]+)", x)[1]) for x in (plain, released)]
    assert loss[0] == pytest.approx(loss[1], abs=0.01)


def test_a_killed_run_resumes_with_the_numbers_of_one_that_was_not(run, tmp_path):
    def last_lines(shown):
        return shown[shown.index("kahan step 3") :]

    whole = run("resnet_cifar.py")
    flags = ["--checkpoint-dir", str(tmp_path / "kept")]
    killed = """
import os, pathlib
write, calls = pathlib.Path.write_bytes, []
def killed(path, content):
    calls.append(path)
    write(path, content if len(calls) < 3 else content[:1000])
    if len(calls) == 3:
        os.kill(os.getpid(), 9)
pathlib.Path.write_bytes = killed
"""
    run("resnet_cifar.py", *flags, before=killed, status=-signal.SIGKILL)
    shown = run("resnet_cifar.py", *flags)
    assert "kahan resumes after step 2" in shown
    assert last_lines(shown) == last_lines(whole)
    (kept,) = (tmp_path / "kept").iterdir()
    assert "-digits-" in kept.name  # another dataset needs another run
    state = msgpack_restore(kept.read_bytes())["0"]
    assert state["params"]["Conv_1"]["kernel"].dtype == jnp.bfloat16
    assert state["batch_stats"]["BatchNorm_1"]["mean"].dtype == jnp.float32


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["nan", "0"])
def test_learning_rates_that_are_none_are_named(run, name, value):
    assert "learning-rate" in run(name, f"--learning-rate={value}", status=2)


def test_what_cannot_be_read_or_written_is_a_sentence(run, tmp_path):
    (tmp_path / "file").write_text("in the way")
    folder = ["--checkpoint-dir", str(tmp_path / "file" / "kept")]
    assert re.match(r"error: .*file", run("resnet_cifar.py", *folder, status=1))
    folder = ["--data-dir", str(tmp_path / "none")]
    assert re.match(r"error: .*none/cifar", run("resnet_cifar.py", *folder, status=1))
    (tmp_path / "name.png").mkdir()
    for name in ("no/losses.png", "file/losses.png", "name.png", "losses.nothing"):
        plot = ["--compare", "--plot", str(tmp_path / name)]
        assert name in run("resnet_cifar.py", *plot, status=1)
    damaged = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    damaged.parent.mkdir()
    damaged.write_bytes(b"\x80\x04")
    folder = ["--data-dir", str(tmp_path)]
    assert run("resnet_cifar.py", *folder, status=1).startswith("error: ")
    many = run("resnet_cifar.py", "--batch-size", "1498", status=2)
    assert "--batch-size: more than 1497 images" in many


@pytest.mark.parametrize("file", [*NAMES, "../benchmarks/__init__.py"])
def test_an_older_python_is_a_sentence(file, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    monkeypatch.setattr(sys, "version", "3.10.13 (main)")
    with pytest.raises(SystemExit, match=r"3\.11 or newer is needed, not 3\.10\.13$"):
        runpy.run_path(str(EXAMPLES / file))


CIFAR = """
import pickle, sys, numpy as np, pathlib
random = np.random.default_rng(0)
for i, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
    count = 200 if name == "test_batch" else 40
    labels = random.integers(10, size=count)
    images = np.repeat(25 * labels, 3072).reshape(count, 3072).astype(np.uint8)
    path = pathlib.Path(sys.argv[1]) / "cifar-10-batches-py" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps({b"data": images, b"labels": labels.tolist()}))
"""


def test_cifar_is_read_from_its_folder(run, tmp_path):
    run_python("-c", CIFAR, tmp_path).check_returncode()
    shown = run("resnet_cifar.py", "--data-dir", str(tmp_path))
    assert "CIFAR-10: 200 images to train on, 200 to test on" in shown


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_says_how_to_go_on(run, name):
    interrupted = """
import tqdm
def interrupted(*args, **options):
    raise KeyboardInterrupt
tqdm.tqdm = interrupted
"""
    said = run(name, before=interrupted, status=1)
    hint = "--checkpoint-dir" if name == "resnet_cifar.py" else "not saved"
    assert hint in said


def test_the_gpt_shows_its_memory_and_trains_the_same_with_and_without_release(run):
    losses = []
    for flag in ("--release", "--no-release"):
        shown = run("gpt.py", flag)
        sizes = [
            float(re.search(rf"{name} release +[\d.]+ +([\d.]+)", shown).group(1))
            for name in ("without", "with")
        ]
        assert sizes[1] < sizes[0]
        losses.append([float(x) for x in re.findall(r": ([\d.]+) nats", shown)])
    # XLA may contract the gradients of the two programs differently.
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert len(losses[0]) == 4


def test_each_device_holds_an_eighth_of_the_weights_and_the_loss_falls(run):
    shown = run("fsdp.py")
    found = re.search(r"8 devices .* ([\d.]+) of ([\d.]+) MiB", shown)
    held, whole = map(float, found.groups())
    assert whole / 8 <= held < whole / 8 + 0.05
    assert float(re.search(r"loss ([\d.]+) nats", shown).group(1)) < 5


@pytest.mark.parametrize(
    ("name", "first", "last_line"),
    [
        (
            "block_scaled_float8.py",
            42.2,
            "codes float8_e4m3fn(64, 64), scales float8_e8m0fnu(2, 64)",
        ),
        ("logical_axes.py", None, "residuals P('fsdp', 'tensor')"),
    ],
)
def test_short_examples_train(run, name, first, last_line):
    shown = run(name)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", shown)]
    assert first in (None, losses[0])
    assert len(losses) == 3
    assert losses == sorted(set(losses), reverse=True)
    assert shown.splitlines()[-1] == last_line


def test_lookahead_trains(run):
    assert float(run("lookahead.py").removeprefix("loss ")) < 1


def test_patches_are_sent_to_another_process(run):
    page = (ROOT / "docs" / "patches.md").read_text()
    (printed,) = re.findall(r"```text\n(.*?)```", page, re.S)
    assert sorted(run("weight_patches.py").splitlines()) == sorted(printed.splitlines())
