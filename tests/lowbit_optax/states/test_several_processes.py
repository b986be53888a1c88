"""A run continues in another number of processes, bit for bit, and sends patches."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import lowbit_optax
from lowbit_optax import patches
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.places import ROOT
from tests.helpers.processes import one_of_several as program

# Starting six processes that each import JAX is slow.
pytestmark = [pytest.mark.slow_to_compile, pytest.mark.standard_promotion]

_SECONDS = 400


def _run(count: int, folder: Path, action: str) -> None:
    """Runs the program in ``count`` processes, which share eight devices."""
    port = _free_port()
    runs = [(rank, count, port, folder, action) for rank in range(count)]
    _run_together(program.__file__, runs)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _run_together(file, runs) -> str:
    """Runs one program in parallel processes and returns what they print."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = [
        subprocess.Popen(
            [sys.executable, file, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments in runs
    ]
    printed = ""
    try:
        for process in started:
            output, _ = process.communicate(timeout=_SECONDS)
            assert process.returncode == 0, output[-4000:]
            printed += output
    finally:
        for process in started:
            process.kill()
    return printed


@functools.cache
def _uninterrupted(name):
    """Trains in this process on one device; returns the run and its views."""
    tx = program.MADE[name]
    start = functools.partial(lowbit_optax.from_master, tx)
    run = jax.jit(start)(program.weights())
    target = program.weights(1)
    for _ in range(2):
        run = program.train(tx, *run, target)
    return run, jax.jit(functools.partial(program.views, tx))(*run, target)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_continues_in_another_number_of_processes(tmp_path, before, after):
    _run(before, tmp_path, "save")
    _run(after, tmp_path, "resume")
    for name in program.MADE:
        want = _uninterrupted(name)
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, want)
        with ocp.StandardCheckpointer() as checkpointer:
            run, seen = checkpointer.restore(tmp_path / f"{name}_end", like)
        assert_same_bits(run, want[0])
        assert_same_bits(seen[:2], want[1][:2])
        jax.tree.map(np.testing.assert_allclose, seen[2], want[1][2])
        assert_same_bits(_sampled(name, tmp_path, after), want[0][0])


def _sampled(name: str, folder: Path, count: int):
    """Apply the patches of all processes to the weights in the middle of the run."""
    tx = program.MADE[name]
    start = jax.jit(functools.partial(lowbit_optax.from_master, tx))
    params, _ = program.train(tx, *start(program.weights()), program.weights(1))
    stamps = [patches.start(params)] * count
    for number in range(program.STEPS):
        for process in range(count):
            path = program.path_of_patch(folder / f"{name}_patches", process, number)
            patch, stamp = path.read_bytes(), stamps[process]
            params, stamps[process] = patches.apply(params, patch, stamp)
    return params


def test_the_program_trains():
    # Without training, equal bits would prove little.
    (params, state), _ = _uninterrupted("lowbit")
    moved = lowbit_optax.master_weights(params, state)["kernel"]
    assert np.all(moved != program.weights()["kernel"])


def test_the_example_runs(tmp_path):
    file = ROOT / "examples" / "two_processes.py"
    address = f"localhost:{_free_port()}"
    printed = _run_together(file, [(address, rank, tmp_path) for rank in range(2)])
    assert "the loss is 0.96" in printed
    assert (tmp_path / "3.json").exists()
