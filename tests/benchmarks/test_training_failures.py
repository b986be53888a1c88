"""Training runs end with a sentence where they cannot go on, and lose no checkpoint."""

import functools
import json
import resource
import signal

import pytest
from places import run_python

import lowbit_optax
from benchmarks.training import cifar_optimizers
from benchmarks.training.images import checkpoints, training_loop
from tools.models.resnet import ResNet

pytestmark = [pytest.mark.example, pytest.mark.standard_promotion]

FEW = ["--dataset", "digits", "--train-size", "64", "--test-size", "32", "--width", "8"]
FEW += ["--batch-size", "16", "--epochs", "3", "--optimizer", "lowbit_sgd"]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """``run(*flags)``: `cifar_optimizers` with a small network, in this process."""
    small = functools.partial(ResNet, blocks=(1,))
    monkeypatch.setattr(cifar_optimizers, "ResNet", small)

    def main(*more, folder=tmp_path / "out"):
        return cifar_optimizers.main([*FEW, "--output-dir", str(folder), *more])

    return main


@pytest.fixture
def never_trains(monkeypatch):
    def fit(*_):
        raise AssertionError("it has trained")

    monkeypatch.setattr(training_loop, "fit", fit)


@pytest.mark.usefixtures("never_trains")
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("flag", ["--learning-rate", "--weight-decay"])
def test_rates_that_are_no_rates_are_named(run, capsys, flag, value):
    with pytest.raises(SystemExit):
        run(f"{flag}={value}")
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{flag}: {value} is not a finite number of 0 or more" in said


@pytest.mark.usefixtures("never_trains")
@pytest.mark.parametrize("flag", ["--output-dir", "--checkpoint-dir"])
def test_a_folder_that_cannot_be_written_is_an_error_before_training(
    run, tmp_path, flag
):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit, match=r"error: .*file"):
        run(flag, str(tmp_path / "file" / "out"))


@pytest.mark.usefixtures("never_trains")
def test_a_data_set_that_is_not_there_is_an_error(run, tmp_path):
    with pytest.raises(SystemExit, match=r"error: --data-dir .*data_batch_1"):
        run("--dataset", "cifar10", "--data-dir", str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ([], "with --checkpoint-dir FOLDER a run can be resumed"),
        (["--checkpoint-dir", "kept"], "goes on from the last epoch's checkpoint"),
    ],
)
def test_ctrl_c_says_how_to_go_on(run, monkeypatch, capsys, tmp_path, flags, hint):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_loop, "fit", interrupted)
    with pytest.raises(SystemExit) as ended:
        run(*flags)
    assert ended.value.code == 130
    assert hint in capsys.readouterr().err


def _numbers(folder):
    (run,) = json.loads((folder / "results.json").read_text())["runs"]
    return run["metrics"]["loss"], run["metrics"]["test"]


def _steps(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(
    run, monkeypatch, tmp_path
):
    run(folder=tmp_path / "whole")
    kept = tmp_path / "kept" / "lowbit_sgd-seed0"
    flags = ["--checkpoint-dir", str(tmp_path / "kept")]
    save = checkpoints.Checkpoints.save

    def save_with_little_room(self, step, *args):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if step > 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            save(self, step, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with monkeypatch.context() as full:
        full.setattr(checkpoints.Checkpoints, "save", save_with_little_room)
        message = r"step 8 cannot be written \(File too large.*that of step 4 is in"
        with pytest.raises(SystemExit, match=message):
            run(*flags)
    assert _steps(kept) == ["4"]
    with monkeypatch.context() as full:
        usage = lambda _: type("usage", (), {"free": 1000})
        full.setattr(checkpoints.shutil, "disk_usage", usage)
        with pytest.raises(SystemExit, match=r"No space left on device: .* 1,000 free"):
            run(*flags)
    assert _steps(kept) == ["4"]
    run(*flags)
    assert _numbers(tmp_path / "out") == _numbers(tmp_path / "whole")


def test_a_damaged_checkpoint_is_put_aside_for_the_one_before(run, tmp_path, capsys):
    flags = ["--checkpoint-dir", str(tmp_path / "kept")]
    run(*flags)
    whole = _numbers(tmp_path / "out")
    kept = tmp_path / "kept" / "lowbit_sgd-seed0"
    assert _steps(kept) == ["12", "8"]

    def truncate(step):
        files = (f for f in (kept / step).rglob("*") if f.is_file())
        largest = max(files, key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:100])

    truncate("12")
    run(*flags)
    said = capsys.readouterr().out
    assert "damaged checkpoints are put aside: step 12" in said
    assert "resumed after step 8" in said
    assert _numbers(tmp_path / "out") == whole
    assert _steps(kept) == ["12", "8", "damaged-12"]

    truncate("8")
    truncate("12")
    with pytest.raises(
        SystemExit, match=r"no checkpoint in .* can be restored: step 12"
    ):
        run(*flags)
    assert _steps(kept) == ["12", "8", "damaged-12"], "nothing is moved"


def test_a_checkpoint_of_other_formats_is_refused_by_name(run, tmp_path, monkeypatch):
    flags = ["--checkpoint-dir", str(tmp_path / "kept")]
    run(*flags, "--steps", "1")
    build = cifar_optimizers.optimizer_choice.build

    def with_other_weights(name, options):
        inner = build(name, options).update.__self__.inner
        return lowbit_optax.lowbit(inner, weights=lowbit_optax.kahan())

    monkeypatch.setattr(cifar_optimizers.optimizer_choice, "build", with_other_weights)
    with pytest.raises(
        SystemExit,
        match=r"other formats: params\[.*nearest_8_bits_v2.*compensation",
    ):
        run(*flags)


KILLED = """
import functools, os, signal, sys, threading
from benchmarks.training import cifar_optimizers
from benchmarks.training.images import checkpoints
from tools.models.resnet import ResNet

cifar_optimizers.ResNet = functools.partial(ResNet, blocks=(1,))
delay, first = float(sys.argv[1]), []
save = checkpoints.Checkpoints.save

def killed(self, step, *args):
    if delay >= 0 and not first:
        first.append(step)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    save(self, step, *args)

checkpoints.Checkpoints.save = killed
cifar_optimizers.main(sys.argv[2:])
"""


def test_a_run_that_is_killed_again_and_again_has_the_numbers_of_one_that_is_not(
    run, tmp_path
):
    run(folder=tmp_path / "whole")
    flags = [*FEW, "--checkpoint-dir", str(tmp_path / "kept")]
    flags += ["--output-dir", str(tmp_path / "out")]
    codes = []
    for delay in (0.02, 0.2, -1):
        ended = run_python("-c", KILLED, delay, *flags)
        codes.append(ended.returncode)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert codes[-1] == 0
    assert len(codes) == 3
    assert _numbers(tmp_path / "out") == _numbers(tmp_path / "whole")
    left = _steps(tmp_path / "kept" / "lowbit_sgd-seed0")
    assert left == ["12", "8"], "nothing half-written stays"
