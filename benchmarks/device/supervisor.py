"""Run the jobs of ``first_device``, each in its own process.

Several processes compile at the same time. One process at a time uses the device, in
the order of the jobs. If a process crashes or stops answering, only its current trial
is lost: the job continues with the next trial in a new process.
"""

import contextlib
import dataclasses
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Mapping

NOT_RUN, RUNNING, DONE, FAILED, CUT = "not run", "running", "done", "failed", "cut off"
"""The status of a job. The record lists all jobs from the start, as not run."""

_FRAME = re.compile(r"\s+@ |\*\*\* ")

TAIL = 3000
"""The number of characters that the record keeps of the output of a failed process."""


@dataclasses.dataclass
class Process:
    """A process that runs a job.

    Attributes:
      entry: the job's part of the record.
      child: the process.
      errors: a file with the output of the process, except for its answers.
      heard: the time of its last answer.
      trial: the name of its current trial.
      device: None, "wanted" or "given".
      killed: the reason why it was killed, or None.
    """

    entry: dict
    child: subprocess.Popen
    errors: typing.IO[bytes]
    heard: float
    trial: str | None = None
    device: str | None = None
    killed: str | None = None

    def kill(self, why: str) -> None:
        """Kill the process and the compilers that it started."""
        self.killed = self.killed or why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def end(self) -> str:
        """Wait for the process to end, and return the reason."""
        code = self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        self.errors.close()
        # The line before the stack trace explains more than the stack trace.
        said = [x for x in lines if x.strip() and not _FRAME.match(x)] or ["nothing"]
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        whole = "\n".join(said)[-TAIL:]
        return f"{self.killed or 'the process ended'} ({how}): {said[-1]}\n{whole}"


@dataclasses.dataclass
class Supervisor:
    """The jobs that are running or waiting.

    Args:
      entries: the jobs in the record, in order; see :func:`entry_of`.
      request: the part of a task that is the same for all jobs.
      environment: the environment variables of the processes.
      workers: the number of processes that run at the same time.
      shared: the sections whose jobs may use the device at the same time.
      end: the value of ``time.monotonic`` at which all jobs must have ended.
      silence: the number of seconds without an answer after which a process is killed.
      changed: called after each change of the record, with a line to print or None.
      command: the command that starts a process.
      folder: the working directory of the processes.
    """

    entries: list[dict]
    request: dict
    environment: Mapping[str, str]
    workers: int
    shared: tuple[str, ...]
    end: float
    silence: float
    changed: Callable[[str | None], None]
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "benchmarks.device.job")
    folder: str | None = None
    running: list[Process] = dataclasses.field(default_factory=list)
    answers: queue.Queue = dataclasses.field(default_factory=queue.Queue)

    def run(self) -> None:
        """Run jobs until all have ended or the time is over."""
        try:
            while time.monotonic() < self.end:
                waiting = [e for e in self.entries if e["status"] == NOT_RUN]
                if not waiting and not self.running:
                    return
                for entry in waiting[: self.workers - len(self.running)]:
                    self._start(entry)
                self._give_device()
                self._listen()
        finally:
            self._stop()

    def _start(self, entry: dict) -> None:
        entry.update(status=RUNNING, reason="not ended")
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        child = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=self.folder,
            env=dict(self.environment),
            text=True,
            start_new_session=True,
        )
        process = Process(entry, child, errors, time.monotonic())
        self.running.append(process)
        named = {key: entry[key] for key in ("section", "name")}
        tell(process, json.dumps(self.request | named | {"skip": [*entry["trials"]]}))
        self.changed(None)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: Process) -> None:
        for line in process.child.stdout or ():
            self.answers.put((process, line))
        self.answers.put((process, None))

    def _give_device(self) -> None:
        """Give the free device to the first job that waits for it."""
        holds = lambda p: p.device == "given" or p.entry["section"] in self.shared
        if any(map(holds, self.running)):
            return
        wanting = (p for p in self.running if p.device == "wanted")
        first = min(wanting, key=lambda p: self.entries.index(p.entry), default=None)
        if first is not None:
            first.device, first.heard = "given", time.monotonic()
            tell(first, "continue")

    def _listen(self) -> None:
        """Read an answer, and kill the processes that have been silent for too long."""
        with contextlib.suppress(queue.Empty):
            process, line = self.answers.get(timeout=0.5)
            process.heard = time.monotonic()
            if line is None:
                self._ended(process)
            else:
                self._answered(process, json.loads(line))
        for process in self.running:
            silent = time.monotonic() - process.heard
            if silent > self.silence and process.device != "wanted":
                process.kill(f"no answer for {silent:.0f} s")

    def _answered(self, process: Process, answer: dict) -> None:
        entry = process.entry
        if "begin" in answer:
            process.trial = answer["begin"]
        elif "wants_device" in answer:
            process.device = "wanted"
        elif "program" in answer:
            entry["programs"].append(answer)
            self.changed(None)
        elif "trial" in answer:
            process.device = None
            self._note(process, answer.pop("trial"), answer)
        else:
            entry.update(answer)

    def _note(self, process: Process, trial: str, found: dict) -> None:
        process.entry["trials"][trial] = found
        process.trial = None
        where = f"{process.entry['section']}/{process.entry['name']}: {trial}"
        said = found.get("error") or json.dumps(found["figures"])
        self.changed(f"{where}: {said}"[:300])

    def _ended(self, process: Process) -> None:
        self.running.remove(process)
        entry, why = process.entry, process.end()
        if process.child.returncode:
            if process.trial is None:
                entry.update(status=FAILED, reason=why)
                self.changed(f"{entry['section']}/{entry['name']}: {why}")
                return
            self._note(process, process.trial, {"error": why})
            entry["status"] = NOT_RUN  # its other trials run in a new process
        else:
            failed = any("error" in found for found in entry["trials"].values())
            entry.update(status=FAILED if failed else DONE, reason="")
        self.changed(None)

    def _stop(self) -> None:
        """Kill the processes that still run, and record which jobs did not finish."""
        for process in self.running:
            process.kill("no time left")
        while self.running:
            process, line = self.answers.get()
            if line is not None:
                self._answered(process, json.loads(line))
                continue
            self.running.remove(process)
            process.end()
            at = f", at {process.trial}" if process.trial else ""
            at += f", step {process.entry['step']}" if "step" in process.entry else ""
            process.entry.update(status=CUT, reason=f"no time left{at}")
        for entry in self.entries:
            if entry["status"] == NOT_RUN:
                cut = CUT if entry["trials"] else NOT_RUN
                entry.update(status=cut, reason="no time left")
        self.changed(None)


def tell(process: Process, line: str) -> None:
    """Write a line to a process, unless it has ended."""
    with contextlib.suppress(BrokenPipeError):
        process.child.stdin.write(line + "\n")  # type: ignore[union-attr]
        process.child.stdin.flush()  # type: ignore[union-attr]


def entry_of(section: str, name: str) -> dict:
    """Return the entry of a job in the record before it runs."""
    return {
        "section": section,
        "name": name,
        "status": NOT_RUN,
        "reason": "not reached",
        "trials": {},
        "programs": [],
    }
