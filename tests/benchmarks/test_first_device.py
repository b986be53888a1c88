"""``python -m benchmarks first_device`` keeps its results, whatever happens later."""

import itertools
import json
import math
import os
import string
import sys
import time

import pytest

from benchmarks.device import first_device, first_device_page, optimizers
from benchmarks.device.supervisor import Supervisor, entry_of
from tests.helpers.places import run_python

# A stand-in for a job's process, without JAX. Each letter of its name is a trial: a
# works, b fails, c ends the process, d prints nothing, e uses the device for a while, f
# returns its working directory, g needs some time, and h ends its first step and waits.
STAND_IN = """
import json, os, sys, time
say = lambda **x: print(json.dumps(x), flush=True)
request = json.loads(sys.stdin.readline())
for trial in request["name"]:
    if trial in request["skip"]:
        continue
    say(begin=trial)
    if trial == "c":
        print("the last words", file=sys.stderr, flush=True)
        os.abort()
    if trial == "d":
        time.sleep(60)
    found = {"figures": {}}
    if trial == "b":
        found = {"error": "ValueError: no"}
    if trial == "e":
        say(wants_device=True)
        sys.stdin.readline()
        start = time.monotonic()
        time.sleep(0.2)
        found["figures"] = {"from": start, "to": time.monotonic()}
    if trial == "g":
        time.sleep(0.7)
        found["figures"]["to"] = time.monotonic()
    if trial == "h":
        say(step=1)
        time.sleep(60)
    if trial == "f":
        found["figures"]["folder"] = os.getcwd()
    say(trial=trial, **found)
"""


def supervised(*jobs, seconds=20.0, silence=10.0, workers=2, changed=None, folder=None):
    """The record's jobs after stand-ins ran, named by section and trials."""
    entries = [entry_of(*job.split("/")) for job in jobs]
    changed = changed or (lambda line: None)
    Supervisor(
        entries,
        {},
        os.environ,
        workers,
        ("shared",),
        time.monotonic() + seconds,
        silence,
        changed,
        (sys.executable, "-c", STAND_IN),
        folder,
    ).run()
    return entries


def test_what_fails_does_not_stop_the_rest():
    (job,) = supervised("shared/ab")
    assert job["status"] == "failed"
    assert job["trials"] == {
        "a": {"figures": {}},
        "b": {"error": "ValueError: no"},
    }


def test_a_process_that_ends_loses_the_trial_that_it_was_at_alone():
    first, second = supervised("times/ace", "shared/a")
    assert [*first["trials"]] == ["a", "c", "e"]
    assert "signal 6" in first["trials"]["c"]["error"]
    assert "the last words" in first["trials"]["c"]["error"]
    assert "figures" in first["trials"]["e"]
    assert (first["status"], second["status"]) == ("failed", "done")


def test_a_process_that_falls_silent_is_given_up():
    (job,) = supervised("shared/da", silence=1.0)
    assert "no answer for 1 s" in job["trials"]["d"]["error"]
    assert job["trials"]["a"] == {"figures": {}}


def test_jobs_without_time_left_are_reported_as_not_run():
    seen = []
    entries = supervised("one/ad", "two/a", "three/a", seconds=1.0, workers=1,
                         changed=seen.append)  # fmt: skip
    assert [job["status"] for job in entries] == ["cut off", "not run", "not run"]
    assert entries[0]["trials"] == {"a": {"figures": {}}}
    assert entries[0]["reason"] == "no time left, at d"
    assert entries[1]["reason"] == "no time left"
    assert [line for line in seen if line] == ["one/ad: a: {}"]


def test_the_step_of_a_run_without_time_left_is_reported():
    (job,) = supervised("one/h", seconds=1.0)
    assert (job["status"], job["step"]) == ("cut off", 1)
    assert job["reason"] == "no time left, at h, step 1"


def test_one_job_has_the_device_at_a_time_and_after_shared_ones():
    shared, *jobs = supervised("shared/g", "times/e", "times/e", "times/e", workers=4)
    spans = [each["figures"] for job in jobs for each in job["trials"].values()]
    assert len(spans) == 3
    spans.sort(key=lambda span: span["from"])
    for before, after in itertools.pairwise([shared["trials"]["g"]["figures"], *spans]):
        assert before["to"] <= after["from"]


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = tmp_path / "record.json"
    first_device.records.write(path, {"a": 1})
    with pytest.raises(TypeError):
        first_device.records.write(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(("exact", "differ"), [(True, 0), (True, 1), (False, 1)])
def test_a_bit_that_differs_where_none_may_is_a_failure(exact, differ):
    job = entry_of("bits", "kahan") | {"status": "done"}
    figures = {"exact": exact, "parameters": 0, "state": differ, "furthest": 1e-7}
    job["trials"] = {"even, mosaic": {"figures": figures}}
    assert first_device_page.is_good({"jobs": [job]}) == (not (exact and differ))


def test_the_page_is_that_of_the_records():
    assert first_device_page.PAGE.read_text() == first_device_page.drawn()


def test_a_section_shows_the_newest_result_of_each_job(tmp_path, monkeypatch):
    def record(date, name, differ, ran="NVIDIA A"):
        job = entry_of("bits", name) | {"status": "done"}
        figures = {"exact": True, "parameters": differ, "state": 0, "furthest": 0.0}
        job["trials"] = {"even, triton": {"figures": figures}}
        late = entry_of("training", "kahan_adamw")
        found = {"ran": ran, "date": date, "jobs": [job, late], "command": date}
        found |= {"python": "", "versions": {}, "processors": 1}
        return found | {"elapsed_seconds": 60.0}

    kept = [record("2", "kahan", 0), record("1", "kahan", 7), record("1", "sr", 5),
            record("3", "kahan", 9, "NVIDIA B")]  # fmt: skip
    for number, each in enumerate(kept):
        path = tmp_path / f"first_device_{number}.json"
        path.write_text(json.dumps(each))
    monkeypatch.setattr(first_device_page, "RECORDS", tmp_path)
    page = first_device_page.drawn().partition(first_device_page.MARK)[2]
    a, b = page.split("\n## ")[1:]
    assert a.startswith("NVIDIA A")
    assert "| kahan | 0 |" in a
    assert "| kahan | 7 |" not in a
    assert "| sr | 5 |" in a
    assert "`training/kahan_adamw`" in a
    assert "| kahan | 9 |" in b


def test_a_toolkit_without_wheels_is_found(tmp_path, monkeypatch):
    for name in ("bin/nvcc", "bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o755)
    monkeypatch.setattr(first_device.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_ROOT", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert first_device.cuda_toolkit() == str(tmp_path)


def test_processes_run_where_mosaic_finds_a_toolkit(tmp_path):
    """Mosaic looks in the working directory, even if other settings name a toolkit."""
    (job,) = supervised("shared/f", folder=tmp_path)
    assert job["trials"]["f"]["figures"]["folder"] == str(tmp_path)


def run(*options, **environment):
    command = ("-m", "benchmarks", "first_device", *options)
    return run_python(*command, **{"JAX_PLATFORMS": "cpu"} | environment)


@pytest.mark.example
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--out", "."), "--rehearse H200"),
        (("--out", "./file"), "--out"),
        (("--only", "bit/*"), "bit/*"),
    ],
)
def test_errors_are_one_sentence(options, said, tmp_path):
    (tmp_path / "file").touch()
    done = run(*(x.replace(".", str(tmp_path)) for x in options))
    assert done.returncode == 2
    assert said in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


SMALL = (
    "bits/lpmm_adam",
    "bits/kahan",
    "step_times/lowbit_adamw",
    "step_times/optax, float32 master",
    "training/lowbit_adamw, released",
    "training/optax, float32",
    "first_compile/optax, float32 master",
    "shakespeare_runs/float32",
)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A record of all sections at a small size."""
    folder = tmp_path_factory.mktemp("first_device")
    flags = "--xla_backend_optimization_level=0"
    (folder / "text.txt").write_text(string.printable[:65] * 20)
    options = ["--size", "small", "--text", str(folder / "text.txt"), "--only", *SMALL]
    done = run("--out", str(folder), *options, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| format | pallas |" in done.stdout
    assert "| kahan | 0 |" in done.stdout
    assert "not run" not in done.stdout
    assert "failed" not in done.stdout
    return json.loads((folder / "first_device_cpu_small.json").read_text())


def trials_of(record, section):
    return {
        job["name"]: {t: found["figures"] for t, found in job["trials"].items()}
        for job in record["jobs"]
        if job["section"] == section
    }


@pytest.mark.example
def test_every_section_runs_at_a_small_size(record):
    assert [f"{job['section']}/{job['name']}" for job in record["jobs"]] == [*SMALL]
    assert {job["status"] for job in record["jobs"]} == {"done"}
    assert record["ran"].startswith("CPU")
    assert first_device_page.is_good(record)
    for found in trials_of(record, "bits")["kahan"].values():
        assert found["exact"]
        assert found["parameters"] == found["state"] == 0
        assert found["elements"] >= 4096


@pytest.mark.example
def test_shakespeare_is_trained_after_all_other_jobs(record):
    (trials,) = trials_of(record, "shakespeare_runs").values()
    (found,) = trials.values()
    assert found["step"] == found["steps"] == 200
    assert found["best"] <= found["validation"] < found["first_loss"] - 0.5
    assert "--text text.txt" in record["command"]
    page = first_device_page.section([record])
    assert f"| float32 | 200 | {found['ms_per_step']:.2f} |" in page
    cut = trials | {"Shakespeare": {"figures": found | {"step": 100}}}
    job = record["jobs"][-1] | {"trials": cut}
    assert "incomplete: 100 of 200" in first_device_page.text_table([job])


@pytest.mark.example
def test_bytes_of_steps_are_those_counted_by_hand_and_training_learns(record):
    found = trials_of(record, "step_times")["optax, float32 master"]["16x4096"]
    # bfloat16 parameters, which are only written; float32 master, mu and nu, which are
    # read and written; bfloat16 gradients; and a count.
    parameters = 14 * 64 * 64
    assert found["parameters"] == parameters
    assert found["stored_bytes"] == 14 * parameters + 4
    assert found["moved_bytes"] == (2 + 24 + 2) * parameters + 8
    assert found["ps_per_parameter"] == pytest.approx(
        1e9 * found["ms"] / parameters, rel=1e-3
    )
    for trials in trials_of(record, "step_times").values():
        assert set(trials) == {"16x4096", "gpt2"}
        for figures in trials.values():
            assert all(math.isfinite(x) and x > 0 for x in figures.values())
    for trials in trials_of(record, "training").values():
        (found,) = trials.values()
        assert found["finite"]
        assert found["last_loss"] < found["first_loss"] - 0.1


def test_all_optimizers_of_the_table_are_timed():
    assert set(optimizers.OPTIMIZERS) - {optimizers.PEER} <= {*optimizers.timed_here()}
