"""The machine code (SASS) of a program's kernels: registers, spills, instructions.

XLA writes the PTX of every kernel, Pallas kernels included, where ``xla_dump_to``
says. ptxas and nvdisasm, which need no GPU, turn it into machine code and back into
text. Both come with the ``gpu-program`` extra.

``program(lower_for(h200_mesh(), fn, *args)).kernels["name"]`` is one kernel.
"""

import collections
import dataclasses
import functools
import math
import operator
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from fractions import Fraction

import jax
import numpy as np

ARCHITECTURE = "sm_90a"
MOST_TRIPS = 1 << 16


class UnknownTrips(ValueError):
    """A loop's trip count is not a constant that this module could find."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its blocks, the threads of each, and shared memory.

    A launch in a loop of the program is one, however often the loop runs.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int

    @property
    def threads(self) -> int:
        return math.prod(self.grid) * math.prod(self.block)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of the machine code.

    ``trips`` is how often a thread enters its body each time that it comes to the loop
    (an average, where a loop around it changes that), or None if that was not found.
    ``body`` counts the instructions of its body once, those of loops inside included.
    """

    address: int
    body: int
    depth: int
    trips: float | None


@dataclasses.dataclass(frozen=True)
class Access:
    """An instruction that reads or writes global memory.

    ``masked`` if it has a predicate or some threads may not come to it. ``executed`` is
    how often one thread does, a loop of unknown trips counted once.
    """

    opcode: str
    bits: int
    store: bool
    masked: bool
    executed: float


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel's machine code; sizes are in bytes, counts are of one thread.

    ``static_shared`` is what the code itself declares; a launch's ``shared`` is what it
    asks for besides, as Triton's kernels do. ``instructions`` are those of the code
    that can be reached, each once.
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    launches: tuple[Launch, ...]
    instructions: int
    loops: tuple[Loop, ...]
    accesses: tuple[Access, ...]
    blocks: tuple["Block", ...] = dataclasses.field(repr=False)

    @property
    def grid(self) -> tuple[int, int, int] | None:
        """The blocks of a launch; None if not found or not the same in all of them."""
        grids = {launch.grid for launch in self.launches}
        return grids.pop() if len(grids) == 1 else None

    @property
    def block(self) -> tuple[int, int, int] | None:
        """The threads of a block, likewise."""
        blocks = {launch.block for launch in self.launches}
        return blocks.pop() if len(blocks) == 1 else None

    def executed(self, unknown: float | None = None, conditional: bool = True) -> float:
        """Instructions that a thread executes.

        Args:
          unknown: trips to assume for a loop whose trip count was not found.
          conditional: count both sides of every branch on data, an upper bound; if
            False, neither side, but for threads that leave the kernel.

        Raises:
          UnknownTrips: if there is such a loop and ``unknown`` is None.
        """
        return sum(self.opcodes(unknown, conditional).values())

    def opcodes(
        self, unknown: float | None = None, conditional: bool = True
    ) -> collections.Counter:
        """:meth:`executed` by opcode, such as ``LDG.E.64`` or ``MUFU.RCP``."""
        lost = [loop for loop in self.loops if loop.trips is None]
        if lost and unknown is None:
            raise UnknownTrips(
                f"{self.name}: trip counts not found for {len(lost)} of its "
                f"{len(self.loops)} loops: "
                + ", ".join(f"{x.body} instructions at {x.address:#x}" for x in lost)
            )
        counts = collections.Counter()
        for block in self.blocks:
            if conditional or not block.conditional:
                times = block.visits * (unknown or 0) ** block.unknown_loops
                for opcode in block.opcodes:
                    counts[opcode] += times
        return counts

    @property
    def global_loads(self) -> collections.Counter:
        """Load instructions in the code by their width in bits."""
        return collections.Counter(x.bits for x in self.accesses if not x.store)

    @property
    def global_stores(self) -> collections.Counter:
        """Store instructions in the code by their width in bits."""
        return collections.Counter(x.bits for x in self.accesses if x.store)

    @property
    def masked_stores(self) -> int:
        """Store instructions in the code that not every thread executes."""
        return sum(x.store and x.masked for x in self.accesses)


@dataclasses.dataclass(frozen=True)
class Block:
    """A basic block that a thread comes to ``visits`` times.

    That counts ``unknown_loops`` of the loops around it once, for want of their trips.
    ``conditional`` if it is on one side of a branch on data; ``masked`` if so or if
    some threads may have left the kernel before it.
    """

    address: int
    opcodes: tuple[str, ...]
    visits: float
    unknown_loops: int
    conditional: bool
    masked: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program and its kernels by name."""

    compiled: jax.stages.Compiled
    kernels: dict[str, Kernel]


def missing_tools() -> str | None:
    """Why nothing here can run, or None."""
    missing = [tool for tool in ("ptxas", "nvdisasm") if _find(tool) is None]
    if not missing:
        return None
    return f"needs {' and '.join(missing)}: install the gpu-program extra"


def program(lowered: jax.stages.Lowered, trips=None) -> Program:
    """Compile a program and read its kernels' machine code.

    Args:
      lowered: from ``harness.lower_for``, or any other program lowered for the H200.
      trips: kernels' names to the trip counts of their loops, in the order of
        ``Kernel.loops``; None in place of a count for one to be found.
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        files = sorted(pathlib.Path(folder).iterdir())
        sources = [f.read_text() for f in files if f.suffix == ".ptx"]
        thunks = [f.read_text() for f in files if f.name.endswith("thunk_sequence.txt")]
    if not any(sources):
        raise RuntimeError("XLA wrote no PTX: was the program in a compilation cache?")
    launches = collections.defaultdict(list)
    for name, *numbers in re.findall(
        r"(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]"
        r"\s+shared_memory: (\d+) bytes",
        "\n".join(thunks),
    ):
        *sizes, shared = map(int, numbers)
        launch = Launch(tuple(sizes[:3]), tuple(sizes[3:]), shared)
        launches[name].append(launch)
    found = {}
    for source in filter(None, sources):
        found |= kernels_of_ptx(source, launches, trips)
    return Program(compiled, found)


def kernels_of_ptx(source: str, launches=None, trips=None) -> dict[str, Kernel]:
    """Compile PTX and read its kernels' machine code.

    Args:
      source: PTX.
      launches: kernels' names to their launches, if known.
      trips: as in :func:`program`.
    """
    with tempfile.TemporaryDirectory() as folder:
        ptx = pathlib.Path(folder, "kernels.ptx")
        cubin = ptx.with_suffix(".cubin")
        ptx.write_text(source)
        report = _run("ptxas", "-v", f"-arch={ARCHITECTURE}", ptx, "-o", cubin)
        listing = _run("nvdisasm", "-c", cubin)
    sections = re.split(r"^\s*\.section\s+\.text\.(\S+?),.*$", listing, flags=re.M)
    code = dict(zip(sections[1::2], sections[2::2], strict=True))
    found = {}
    for part in report.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        properties = part.split(f"Function properties for {name}\n", 1)[1]

        def number(pattern, text=properties):
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        found[name] = Kernel(
            name=name,
            registers=number(r"Used (\d+) registers"),
            stack=number(r"(\d+) bytes stack frame"),
            spill_stores=number(r"(\d+) bytes spill stores"),
            spill_loads=number(r"(\d+) bytes spill loads"),
            static_shared=number(r"(\d+) bytes smem"),
            launches=tuple((launches or {}).get(name, ())),
            **_Code(code[name], (trips or {}).get(name)).facts(),
        )
    return found


def instructions_a_parameter(
    kernel: Kernel,
    parameters: int,
    unknown: float | None = None,
    conditional: bool = True,
) -> float:
    """Instructions that all threads of all launches execute, for each parameter.

    Args:
      kernel: from :func:`program`.
      parameters: how many the program updates.
      unknown: as in :meth:`Kernel.executed`.
      conditional: likewise.
    """
    if not kernel.launches:
        raise ValueError(f"no launch of {kernel.name} was found")
    threads = sum(launch.threads for launch in kernel.launches)
    return kernel.executed(unknown, conditional) * threads / parameters


@functools.cache
def _find(tool: str) -> pathlib.Path | None:
    # The wheels' tools first: their versions are this project's choice, not the
    # machine's.
    wheels = [f for p in sys.path for f in pathlib.Path(p).glob(f"nvidia/*/bin/{tool}")]
    if wheels:
        return max(wheels)
    found = shutil.which(tool)
    return pathlib.Path(found) if found else None


def _run(tool: str, *arguments) -> str:
    path = _find(tool)
    if path is None:
        raise FileNotFoundError(missing_tools())
    result = subprocess.run(
        [path, *arguments], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{tool}: {result.stdout}{result.stderr}")
    # ptxas reports on stderr, where nvdisasm writes only warnings.
    return result.stderr if tool == "ptxas" else result.stdout


class _Instruction:
    """A line of nvdisasm's listing, and what it reads and writes."""

    def __init__(self, address: int, guard: str | None, text: str):
        self.address, self.guard = address, guard
        self.opcode, _, operands = text.replace(".reuse", "").partition(" ")
        self.base, *self.modifiers = self.opcode.split(".")
        self.operands = [o.strip() for o in operands.split(",") if o.strip()]
        target = re.search(r"`\((.+?)\)", operands)
        self.target = target[1] if target else None
        self.results, self.sources = self._results()
        # Too many rather than too few: what they held is then no longer known.
        self.writes = [r for r in self.results if r[-1] not in "TZ"]
        self.reads = set(re.findall(r"\bU?[RP]\d+\b", f"{guard} {operands}"))

    def _results(self) -> tuple[list[str], list[str]]:
        """The registers and predicates that it writes, and its other operands."""
        rest = list(self.operands)
        if self.base in _NO_RESULT or self.target:
            return [], rest
        if self.base == "R2P":
            return [f"P{i}" for i in range(7)], rest
        # Results come first: one register at most, and predicates around it.
        results, predicates = [], 0
        register = self.base.endswith(("SETP", "PLOP3", "FCHK"))
        while rest:
            if re.fullmatch(r"U?P[\dT]", rest[0]) and predicates < 2:
                predicates += 1
                results.append(rest.pop(0))
            elif not register and re.fullmatch(r"U?R(\d+|Z)", rest[0]):
                register = True
                results += _consecutive(rest.pop(0), self._width())
            else:
                break
        return results, rest

    def _width(self) -> int:
        if "MMA" in self.base or "128" in self.modifiers or self.base == "LDSM":
            return 128 if "GMMA" in self.base else 4
        wide = {"64", "WIDE", "F64", "S64", "U64"} & set(self.modifiers)
        double = re.fullmatch(r"D(ADD|MUL|FMA|MNMX)", self.base)
        pair = self.base == "CS2R" and "32" not in self.modifiers
        return 2 if wide or double or pair else 1


# Stands in a state, among registers, for no thread having left the kernel.
_ALL_RUN = "all run"

_NO_RESULT = {"BAR", "BRA", "BSSY", "BSYNC", "EXIT", "NOP", "RED", "REDG", "RET"}
_NO_RESULT |= {"ST", "STG", "STL", "STS", "STSM", "WARPSYNC", "YIELD"}
_ENDS = {"BRA", "BSYNC", "CALL", "EXIT", "KILL", "RET"}
_INDIRECT = {"BRX", "BRXU", "JMP", "JMX", "JMXU"}
_READS_MEMORY = {"LD", "LDG", "LDGSTS"}
_WRITES_MEMORY = {"ST", "STG", "ATOM", "ATOMG", "RED", "REDG"}


def _consecutive(register: str, count: int) -> list[str]:
    kind, number = re.fullmatch(r"(U?R)(\d+|Z)", register).groups()
    if number == "Z":
        return [register] * count
    return [f"{kind}{int(number) + i}" for i in range(count)]


def _access(instruction: _Instruction, block: Block) -> Access:
    bits = [
        int(match[1])
        for match in (re.fullmatch(r"[US]?(\d+)", m) for m in instruction.modifiers)
        if match
    ]
    return Access(
        opcode=instruction.opcode,
        bits=bits[0] if bits else 32,
        store=instruction.base in _WRITES_MEMORY,
        masked=instruction.guard is not None or block.masked,
        executed=block.visits,
    )


class _Code:
    """One kernel's instructions, basic blocks and loops.

    Trip counts come from executing the code on what is known of the registers that
    branches depend on: constants and what is computed from them. That holds however
    ptxas has unrolled, rotated or counted a loop.
    """

    def __init__(self, listing: str, trips=None):
        self._split(*_parse(listing))
        self._find_loops()
        self._find_needed()
        headers = sorted(h for h in self.loops if h in self.order)
        trips = [None] * len(headers) if trips is None else trips
        if len(trips) != len(headers):
            raise ValueError(f"{len(trips)} trip counts for {len(headers)} loops")
        self.given = {
            h: n for h, n in zip(headers, trips, strict=True) if n is not None
        }
        self.lost = set()
        lost = None
        # A loop whose trips are not found the second time that a thread comes to it is
        # counted as one whose trips never are.
        while lost != self.lost:
            lost = set(self.lost)
            self.visits = collections.Counter()
            self.entries, self.rounds = collections.Counter(), collections.Counter()
            self.conditional, self.after_exit = set(), set()
            self._walk(self.first, self.blocks, {_ALL_RUN: True}, 1, Fraction(1))

    def facts(self) -> dict:
        """The fields of a :class:`Kernel` that come from its code."""
        blocks, accesses = [], []
        for start in sorted(self.visits):
            around = [h for h, body in self.loops.items() if start in body]
            block = Block(
                address=start,
                opcodes=tuple(i.opcode for i in self.blocks[start]),
                visits=self.visits[start],
                unknown_loops=sum(h in self.lost for h in around),
                conditional=start in self.conditional,
                masked=start in self.conditional | self.after_exit,
            )
            blocks.append(block)
            accesses += [
                _access(i, block)
                for i in self.blocks[start]
                if i.base in _READS_MEMORY | _WRITES_MEMORY and i.guard != "!PT"
            ]
        loops = tuple(
            Loop(
                address=header,
                body=sum(len(self.blocks[b]) for b in body if b in self.visits),
                depth=sum(header in other for other in self.loops.values()) - 1,
                trips=None
                if header in self.lost
                else self.rounds[header] / max(self.entries[header], 1),
            )
            for header, body in sorted(self.loops.items())
            if header in self.order
        )
        return {
            "instructions": sum(len(block.opcodes) for block in blocks),
            "loops": loops,
            "accesses": tuple(accesses),
            "blocks": tuple(blocks),
        }

    def _split(self, instructions, labels) -> None:
        """Cut the code into basic blocks and find where each can go."""
        leaders = {instructions[0].address, *labels.values()}
        for i in instructions:
            if i.base in _INDIRECT:
                raise ValueError(f"{i.opcode} at {i.address:#x}: an indirect branch")
            if i.base == "CALL" and i.target not in labels:
                raise ValueError(
                    f"{i.opcode} at {i.address:#x}: a call out of the code"
                )
            if i.base in _ENDS:
                leaders.add(i.address + 16)
        self.first, self.blocks = instructions[0].address, {}
        for i in instructions:
            if i.address in leaders:
                current = self.blocks.setdefault(i.address, [])
            current.append(i)
        # The address that threads which BSYNC joins go on from is BSSY's operand.
        joins = {}
        self.successors, self.callees = {}, {}
        for start, block in self.blocks.items():
            joins |= {
                i.operands[0]: labels[i.target] for i in block if i.base == "BSSY"
            }
            last = block[-1]
            after = last.address + 16
            after = [after] if after in self.blocks else []
            if last.base == "CALL":
                self.callees[start] = labels[last.target]
                self.successors[start] = after
            elif last.base == "BRA" and "DIV" in last.modifiers:
                # Taken by a warp whose threads have parted, to shuffle one by one.
                self.successors[start] = after
            elif last.base in ("BRA", "BSYNC"):
                to = labels[last.target] if last.base == "BRA" else joins[_join(last)]
                conditions = _conditions(last)
                self.successors[start] = [to, *(after if conditions else [])]
            elif last.base in _ENDS:
                self.successors[start] = after if last.guard else []
            else:
                self.successors[start] = after

    def _find_loops(self) -> None:
        """Natural loops by their headers: an edge to a dominator closes one."""
        roots = [self.first, *self.callees.values()]
        order, seen = [], set()
        for root in roots:
            stack = [(root, iter(self.successors[root]))] if root not in seen else []
            seen.add(root)
            while stack:
                node, following = stack[-1]
                step = next((n for n in following if n not in seen), None)
                if step is None:
                    order.append(stack.pop()[0])
                else:
                    seen.add(step)
                    stack.append((step, iter(self.successors[step])))
        self.order = {node: i for i, node in enumerate(reversed(order))}
        before = collections.defaultdict(list)
        for node in order:
            for n in self.successors[node]:
                before[n].append(node)
        dominators = {node: set(order) for node in order} | {r: {r} for r in roots}
        changed = True
        while changed:
            changed = False
            for node in self.order:
                if node not in roots:
                    common = set.intersection(*(dominators[b] for b in before[node]))
                    changed |= common | {node} != dominators[node]
                    dominators[node] = common | {node}
        self.loops = {}
        for node in order:
            for header in self.successors[node]:
                if header not in dominators[node]:
                    if self.order[header] <= self.order[node]:
                        raise ValueError(f"a loop with two entries, at {header:#x}")
                    continue
                body, stack = self.loops.setdefault(header, {header}), [node]
                while stack:
                    if (inside := stack.pop()) not in body:
                        body.add(inside)
                        stack += before[inside]

    def _find_needed(self) -> None:
        """Keep the instructions that what branches depend on is computed by."""
        ends = [block[-1] for block in self.blocks.values() if block[-1].base in _ENDS]
        needed = {p for i in ends for p, _ in _conditions(i) if p not in ("PT", "UPT")}
        every = [i for block in self.blocks.values() for i in block]
        size = -1
        while size != len(needed):
            size = len(needed)
            for i in every:
                if needed.intersection(i.writes):
                    needed |= i.reads
        self.steps = {
            start: [i for i in block if needed.intersection(i.writes)]
            for start, block in self.blocks.items()
        }

    def _walk(self, start, inside, state, times, weight, loop=False):
        """Go once through blocks, and through the loops among them.

        Args:
          start: the first block.
          inside: the blocks; an edge out of them is not followed.
          state: what is known of registers, and ``_ALL_RUN``.
          times: how often the walk stands for.
          weight: what share of the threads' paths comes to ``start``, if a branch on
            data sends half of them each way: 1 if all do.
          loop: ``start`` is a loop's header; an edge back to it is not followed.

        Returns:
          ``(back, exits)``: the state and weight on edges to ``start``, or None, and
          those on edges out of ``inside`` by target.
        """
        pending, back, exits = {start: (state, weight)}, None, {}
        while pending:
            node = min(pending, key=self.order.__getitem__)
            state, weight = pending.pop(node)
            if node in self.loops and not (loop and node == start):
                edges = self._loop(node, state, times, weight).items()
            else:
                edges = self._block(node, dict(state), times, weight)
            for target, reached in edges:
                if loop and target == start:
                    back = _merge(back, reached)
                elif target in inside:
                    pending[target] = _merge(pending.get(target), reached)
                else:
                    exits[target] = _merge(exits.get(target), reached)
        return back, exits

    def _loop(self, header, state, times, weight) -> dict:
        """Go through a loop until it ends; the states and weights it ends with."""
        body = self.loops[header]
        self.entries[header] += times
        if header not in self.lost and header not in self.given:
            for _ in range(MOST_TRIPS):
                self.rounds[header] += times
                back, exits = self._walk(header, body, state, times, weight, True)
                if back is None:
                    return exits
                if exits:
                    break
                state = back[0]
            self.lost.add(header)
        trips = self.given.get(header, 1)
        self.rounds[header] += times * trips
        state = {**state}
        for block in body:
            self._forget(block, state)
        _, exits = self._walk(header, body, state, times * trips, weight, True)
        total = sum(share for _, share in exits.values())
        return {t: (s, share / total * weight) for t, (s, share) in exits.items()}

    def _forget(self, start, state) -> None:
        for i in self.steps[start]:
            for name in i.writes:
                state.pop(name, None)
        if start in self.callees:
            for block in self._reachable(self.callees[start]):
                self._forget(block, state)

    def _reachable(self, start) -> frozenset:
        seen, stack = set(), [start]
        while stack:
            if (node := stack.pop()) not in seen:
                seen.add(node)
                stack += self.successors[node]
        return frozenset(seen)

    def _block(self, start, state, times, weight) -> list:
        """Go through a block; the states and weights on the edges that it may take."""
        self.visits[start] += times
        if weight != 1:
            self.conditional.add(start)
        if _ALL_RUN not in state:
            self.after_exit.add(start)
        for i in self.steps[start]:
            holds = True if i.guard is None else _predicate(i.guard, state)
            if holds is False:
                continue
            results = _execute(i, state)
            for name in i.writes:
                value = results.get(name)
                if holds is None and value != state.get(name):
                    value = None
                if value is None:
                    state.pop(name, None)
                else:
                    state[name] = value
        last = self.blocks[start][-1]
        taken = True
        for name, wanted in _conditions(last):
            holds = _predicate(name, state)
            known = None if holds is None else holds == wanted
            taken = known if taken is True or known is False else taken
        if start in self.callees and taken is not False:
            share = weight if taken else weight / 2
            known = {_ALL_RUN: True} if _ALL_RUN in state else {}
            self._walk(self.callees[start], self.blocks, known, times, share)
            self._forget(start, state)
        to = self.successors[start]
        if last.base not in ("BRA", "BSYNC") or "DIV" in last.modifiers:
            if last.base in ("EXIT", "KILL") and taken is None:
                state.pop(_ALL_RUN, None)
            stops = last.base in ("EXIT", "KILL", "RET") and taken is True
            return [] if stops else [(t, (state, weight)) for t in to]
        if taken is None and len(to) == 2 and to[0] != to[1]:
            return [(t, (state, weight / 2)) for t in to]
        return [(to[0] if taken is not False else to[-1], (state, weight))]


def _parse(listing: str) -> tuple[list[_Instruction], dict[str, int]]:
    """A kernel's instructions, and the addresses of its labels."""
    instructions, labels, waiting = [], {}, []
    for line in listing.splitlines():
        if label := re.match(r"\s*([.$\w]+):\s*$", line):
            waiting.append(label[1])
        elif match := re.match(
            r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(\S+)\s+)?(.+?)\s*;", line
        ):
            address = int(match[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting = []
            instructions.append(_Instruction(address, match[2], match[3]))
    return instructions, labels


def _join(instruction: _Instruction) -> str:
    return next(o for o in instruction.operands if re.fullmatch(r"B\d+", o))


def _conditions(instruction: _Instruction) -> list[tuple[str, bool]]:
    """Predicates a branch depends on, and what they have to be for it to be taken."""
    tokens = [instruction.guard] if instruction.guard else []
    if instruction.base in _ENDS:
        tokens += [o for o in instruction.operands if re.fullmatch(r"!?U?P[\dT]", o)]
    return [(t.lstrip("!"), not t.startswith("!")) for t in tokens]


def _merge(one, other):
    if one is None:
        return other
    (a, share), (b, more) = one, other
    return {k: v for k, v in a.items() if b.get(k) == v}, share + more


def _predicate(token: str, state) -> bool | None:
    name = token.lstrip("!")
    value = True if name in ("PT", "UPT") else state.get(name)
    return value if value is None else value != token.startswith("!")


def _word(token: str, state) -> int | None:
    """An operand's 32 bits, if they are known."""
    if re.fullmatch(r"[UC]?S?RZ", token):
        return 0
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", token):
        return int(token, 0) % 2**32
    if token[:1] in "-~" and (value := _word(token[1:], state)) is not None:
        return (-value if token[0] == "-" else ~value) % 2**32
    return state.get(token)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _execute(i: _Instruction, state) -> dict:
    """What an instruction writes, as far as that is known."""
    base = i.base[1:] if i.base.startswith("U") else i.base
    model = _MODELS.get(base)
    if model is None:
        return {}
    values = model(i, [_word(s, state) for s in i.sources], state)
    return dict(zip(i.results, values, strict=False))


def _move(i, words, state):
    return words[:1]


def _zero_pair(i, words, state):
    return [0, 0] if i.sources == ["SRZ"] else []


def _half_constants(i, words, state):
    """``HFMA2 R0, -RZ, RZ, high, low``: how ptxas likes to write a constant."""
    if i.sources[:2] != ["-RZ", "RZ"] or "BF16_V2" in i.modifiers:
        return []
    try:
        high, low = (int(np.float16(float(x)).view(np.uint16)) for x in i.sources[2:])
    except ValueError:
        return []
    return [high << 16 | low]


def _add(i, words, state):
    """IADD3, whose predicates are carries, in the results out and in the others in."""
    carries = [_predicate(s, state) for s in i.sources if _is_predicate(s)]
    terms = [w for s, w in zip(i.sources, words, strict=True) if not _is_predicate(s)]
    if None in terms or None in carries:
        return []
    negated = any(s[0] in "-~" and s[1:2] in "RU" for s in i.sources)
    total = sum(terms) + sum(carries)
    carry = total >> 32 if total >> 32 < 2 and not negated else None
    return [total % 2**32, None if carry is None else bool(carry)]


def _multiply_add(i, words, state):
    carry = _predicate(i.sources[3], state) if "X" in i.modifiers else False
    a, b, c = words[:3]
    product = 0 if 0 in (a, b) else None if None in (a, b) else a * b
    if {"HI", "WIDE"} & set(i.modifiers) or None in (product, c, carry):
        return []
    return [(product + c + carry) % 2**32]


def _shift_add(i, words, state):
    if len(i.modifiers) or len(words) != 3 or None in words or len(i.results) > 1:
        return []
    return [((words[0] << words[2]) + words[1]) % 2**32]


def _shift(i, words, state):
    low, by, high = words
    kind = i.opcode.partition("SHF.")[2]
    if by is None or by > 31:
        return []
    if kind == "L.U32" and low is not None:
        return [(low << by) % 2**32]
    if kind == "R.U32.HI" and high is not None:
        return [high >> by]
    if kind == "R.S32.HI" and high is not None:
        return [(_signed(high) >> by) % 2**32]
    return []


def _logic(i, words, state):
    """LOP3: a truth table of three words, and whether the result has a bit set."""
    *words, table = words[:4]
    if table is None:
        return []
    # A word that is not known does not matter where the table ignores it.
    result = 0
    for k in range(8):
        if table >> k & 1:
            term = 2**32 - 1
            for word, bit in zip(words, (4, 2, 1), strict=True):
                if word is None:
                    if (table >> (k ^ bit)) & 1 == 0:
                        return []
                else:
                    term &= word if k & bit else ~word
            result |= term
    result %= 2**32
    if _is_predicate(i.results[0]):
        plain = i.sources[4:] in (["!PT"], ["!UPT"])
        return [bool(result) if plain else None, result]
    return [result]


def _logic_predicates(i, words, state):
    inputs = [_predicate(s, state) for s in i.sources[:3]]
    if None in inputs:
        return []
    index = sum(bit * value for bit, value in zip((4, 2, 1), inputs, strict=True))
    return [bool(table >> index & 1) for table in words[3:5]]


def _select(i, words, state):
    holds = _predicate(i.sources[2], state)
    return [] if holds is None else [words[0] if holds else words[1]]


def _compare(i, words, state):
    """ISETP, whose ``.EX`` goes on from the comparison of the words below."""
    compare = next((m for m in i.modifiers if m in _COMPARISONS), None)
    join = next((m for m in i.modifiers if m in _JOINS), None)
    known = {compare, join, "U32", "EX"}
    a, b, *_ = words
    if None in (compare, join, a, b) or set(i.modifiers) - known:
        return []
    others = [_predicate(s, state) for s in i.sources[2:]]
    if None in others:
        return []
    if "U32" not in i.modifiers:
        a, b = _signed(a), _signed(b)
    holds = _COMPARISONS[compare](a, b)
    if "EX" in i.modifiers:
        if compare in ("EQ", "NE"):
            holds = holds and others[1] if compare == "EQ" else holds or others[1]
        else:
            holds = others[1] if a == b else holds
    return [_JOINS[join](holds, others[0]), _JOINS[join](not holds, others[0])]


def _extreme(i, words, state):
    least = _predicate(i.sources[2], state)
    a, b = words[:2]
    if None in (least, a, b) or set(i.modifiers) - {"U32", "S32"}:
        return []
    key = None if "U32" in i.modifiers else _signed
    return [(min if least else max)(a, b, key=key)]


def _is_predicate(token: str) -> bool:
    return bool(re.fullmatch(r"!?U?P[\dT]", token))


_COMPARISONS = {
    name: getattr(operator, name.lower())
    for name in ("EQ", "NE", "LT", "LE", "GT", "GE")
}
_JOINS = {"AND": operator.and_, "OR": operator.or_, "XOR": operator.xor}
_MODELS = {
    "MOV": _move,
    "R2UR": _move,
    "CS2R": _zero_pair,
    "HFMA2": _half_constants,
    "IADD3": _add,
    "IADD": _add,
    "VIADD": _add,
    "IMAD": _multiply_add,
    "LEA": _shift_add,
    "SHF": _shift,
    "LOP3": _logic,
    "PLOP3": _logic_predicates,
    "SEL": _select,
    "ISETP": _compare,
    "IMNMX": _extreme,
    "VIMNMX": _extreme,
}
