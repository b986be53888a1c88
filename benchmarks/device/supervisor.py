"""Runs the jobs of ``first_device``, each in a process of its own.

Several compile at once, and one has the device, in the order of the jobs. A process
that ends or falls silent takes only the trial with it that it was at: the job goes on
with the next trial in a new process.
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
"""What becomes of a job: each is in the record from the start, as not run."""

_FRAME = re.compile(r"\s+@ |\*\*\* ")

TAIL = 3000
"""Characters that are kept of what a process wrote before it ended."""


@dataclasses.dataclass
class Process:
    """A job that runs.

    Attributes:
      entry: the job's part of the record.
      child: the process.
      errors: the file of what it writes beside its answers.
      heard: when it last answered.
      trial: what it is at.
      device: None, or "wanted", or "given".
      killed: why, if it was.
    """

    entry: dict
    child: subprocess.Popen
    errors: typing.IO[bytes]
    heard: float
    trial: str | None = None
    device: str | None = None
    killed: str | None = None

    def kill(self, why: str) -> None:
        """End it, and the compilers that it started."""
        self.killed = self.killed or why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def end(self) -> str:
        """Why it ended."""
        code = self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        self.errors.close()
        # Without the stack of what ended it, which says less than the line before.
        said = [x for x in lines if x.strip() and not _FRAME.match(x)] or ["nothing"]
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        whole = "\n".join(said)[-TAIL:]
        return f"{self.killed or 'the process ended'} ({how}): {said[-1]}\n{whole}"


@dataclasses.dataclass
class Supervisor:
    """What runs, and what is yet to run.

    Args:
      entries: the jobs in the record, in order; see :func:`entry_of`.
      request: what all of them are asked, beside their section and name.
      environment: of their processes.
      workers: how many run at once.
      shared: sections whose jobs use the device beside each other.
      end: when all must be over, by ``time.monotonic``.
      silence: seconds without an answer after which a process is given up.
      changed: called when the record has changed, with a line to print or None.
      command: of a process, which is told what to do.
      folder: in which it runs.
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
        """Run all that there is time for."""
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
        """To the first job that wants it, once no other has it."""
        holds = lambda p: p.device == "given" or p.entry["section"] in self.shared
        if any(map(holds, self.running)):
            return
        wanting = (p for p in self.running if p.device == "wanted")
        first = min(wanting, key=lambda p: self.entries.index(p.entry), default=None)
        if first is not None:
            first.device, first.heard = "given", time.monotonic()
            tell(first, "go on")

    def _listen(self) -> None:
        """Take an answer, and give up who has been silent for too long."""
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
            entry["status"] = NOT_RUN  # the rest of it, in a new process
        else:
            failed = any("error" in found for found in entry["trials"].values())
            entry.update(status=FAILED if failed else DONE, reason="")
        self.changed(None)

    def _stop(self) -> None:
        """End what still runs, and say of all what became of it."""
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
    """A job in the record, before it runs."""
    return {
        "section": section,
        "name": name,
        "status": NOT_RUN,
        "reason": "not reached",
        "trials": {},
        "programs": [],
    }
