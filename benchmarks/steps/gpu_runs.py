"""Compiling and timing the cases of ``gpu_step.py``, and the rows of its record."""

import dataclasses
import functools
import statistics

from benchmarks.leaf_sets import LeafSet
from benchmarks.steps import gpu_cases, gpu_timing
from benchmarks.steps.gpu_cases import BASELINE, Entry, Live
from benchmarks.steps.gpu_timing import Budget, Compiled

MANY_LEAVES = 16
"""Sets of more leaves have loops of ``step`` only: compiling takes the time."""


@dataclasses.dataclass
class Case:
    """One entry of an optimizer on a set: compiled once plain and once as a loop."""

    live: Live
    entry: Entry
    plain: Compiled
    loop: Compiled | None
    calls: int = 0
    loop_calls: int = 0
    times: list[float] = dataclasses.field(default_factory=list)
    loop_times: list[float] = dataclasses.field(default_factory=list)

    @property
    def is_baseline(self) -> bool:
        return self.live.optimizer.name == BASELINE

    def prepare(self, seconds: float) -> None:
        """Warm up and choose how many calls make a measurement."""
        self.calls = gpu_timing.calls_for(self._advance(self.plain), seconds)
        if self.loop:
            self.loop_calls = gpu_timing.calls_for(self._advance(self.loop), seconds)

    def measure(self, loop_steps: int) -> None:
        self.times.append(gpu_timing.timed(self._advance(self.plain), self.calls))
        if self.loop:
            once = gpu_timing.timed(self._advance(self.loop), self.loop_calls)
            self.loop_times.append(once / loop_steps)

    def _advance(self, compiled: Compiled):
        return functools.partial(self.live.advance, compiled.call)


def build_live(leaf_set: LeafSet, names: list[str]) -> tuple[list[Live], list[dict]]:
    """Parameters and state of each optimizer, and those that could not be made."""
    grads = gpu_cases.gradients(leaf_set)
    optimizers = gpu_cases.optimizers()
    lives, skipped = [], []
    for name in names:
        try:
            lives.append(Live(optimizers[name], leaf_set, grads))
        except Exception as error:
            skipped.append(skip(leaf_set, name, None, error))
    return lives, skipped


def skip(leaf_set: LeafSet, name: str, entry: Entry | None, reason) -> dict:
    """A line of the record on what is missing from it."""
    if isinstance(reason, Exception):
        reason = f"{type(reason).__name__}: {reason}"[:1000]
    return {
        "set": leaf_set.name,
        "optimizer": name,
        "entry": entry and entry.name,
        "reason": reason or "no time left",
    }


def compile_cases(lives: list[Live], leaf_set: LeafSet, loop_steps: int, budget):
    """The set's cases that compiled in time, and the others, the important first."""
    few = len(leaf_set.shapes) <= MANY_LEAVES
    wanted = [
        (live, entry, loop)
        for live in lives
        for entry in live.optimizer.entries
        for loop in (False, True)
        if not loop or few or entry.entry == "step"
    ]
    wanted.sort(key=lambda each: (each[1].priority, each[2]))
    jobs = [
        functools.partial(
            gpu_timing.compile_donated,
            gpu_timing.looped(entry.step, loop_steps) if loop else entry.step,
            live.arguments,
        )
        for live, entry, loop in wanted
    ]
    results = gpu_timing.run_all(jobs, budget, f"{leaf_set.name}: compile")
    plain, loops, skipped = {}, {}, []
    for (live, entry, loop), result in zip(wanted, results, strict=True):
        key = live.optimizer.name, entry.name
        if isinstance(result, Compiled):
            (loops if loop else plain)[key] = live, entry, result
        else:
            line = skip(leaf_set, live.optimizer.name, entry, result)
            skipped.append({**line, "loop": loop})
    cases = [
        Case(*found, loops[key][2] if key in loops else None)
        for key, found in plain.items()
    ]
    return cases, skipped


def time_cases(cases: list[Case], leaf_set: LeafSet, args, budget: Budget, whole):
    """Interleaved rounds over all cases; returns those that ran, and the others.

    What is compiled is timed once at least while the whole run has time.
    """
    ready, skipped = [], []
    for case in gpu_timing.progress(cases, f"{leaf_set.name}: warm up"):
        reason = None
        try:
            if whole.left > 0:
                case.prepare(args.measure)
                ready.append(case)
                continue
        except Exception as error:
            reason = error
        skipped.append(skip(leaf_set, case.live.optimizer.name, case.entry, reason))
    for done in gpu_timing.progress(range(args.rounds), f"{leaf_set.name}: rounds"):
        if done and budget.left <= 0:
            break
        for case in ready:
            case.measure(args.loop_steps)
    return ready, skipped


def share(moved: int, seconds: float | None, copy: float) -> float | None:
    """Achieved share of the copy bandwidth."""
    return seconds and 1e-9 * moved / seconds / copy


def row_of(times, loop_times, live_bytes, leaf_set: LeafSet, copy: float) -> dict:
    """The figures that every kind of step has."""
    stored, moved = live_bytes
    once = statistics.median(times)
    looped = statistics.median(loop_times) if loop_times else None
    return {
        "leaves": len(leaf_set.shapes),
        "parameters": leaf_set.parameters,
        "rounds": len(times),
        "ms": 1e3 * once,
        "ms_low": 1e3 * min(times),
        "ms_high": 1e3 * max(times),
        "loop_ms": looped and 1e3 * looped,
        "stored_bytes": stored,
        "stored_bytes_per_param": stored / leaf_set.parameters,
        "moved_bytes": moved,
        "moved_bytes_per_param": moved / leaf_set.parameters,
        "gb_per_s": 1e-9 * moved / once,
        "copy_share": share(moved, once, copy),
        "loop_copy_share": share(moved, looped, copy),
    }


def case_row(case: Case, baseline: Case | None, leaf_set: LeafSet, copy: float) -> dict:
    """A timed case's line of the record."""
    live = case.live
    row = {
        "set": leaf_set.name,
        "optimizer": live.optimizer.name,
        "entry": case.entry.entry,
        "implementation": case.entry.implementation,
        **row_of(
            case.times,
            case.loop_times,
            (live.stored_bytes, live.moved_bytes),
            leaf_set,
            copy,
        ),
        "calls": case.calls,
        "loop_calls": case.loop_calls,
        "ratio_to_float32": None,
        "temp_bytes_per_param": case.plain.temp_bytes / leaf_set.parameters,
        "compile_seconds": case.plain.seconds,
    }
    if case.loop:
        row["loop_temp_bytes_per_param"] = case.loop.temp_bytes / leaf_set.parameters
    if baseline:
        pairs = zip(case.times, baseline.times, strict=True)
        row["ratio_to_float32"] = statistics.median(a / b for a, b in pairs)
    return row


def run_set(leaf_set: LeafSet, names, args, copy: float, budget: Budget, whole: Budget):
    """A set's rows, and what was skipped.

    Args:
      leaf_set: whose leaves are stepped.
      names: of optimizers.
      args: the command's.
      copy: its bandwidth in GB/s.
      budget: for this set.
      whole: for all that is yet to do.
    """
    lives, skipped = build_live(leaf_set, names)
    cases, more = compile_cases(lives, leaf_set, args.loop_steps, budget.part(0.65))
    skipped += more
    cases, more = time_cases(cases, leaf_set, args, budget, whole)
    skipped += more
    baseline = next((case for case in cases if case.is_baseline), None)
    return [case_row(case, baseline, leaf_set, copy) for case in cases], skipped
