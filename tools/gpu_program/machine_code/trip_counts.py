"""Count how often a thread reaches each block and loop of a kernel.

The walk executes the instructions that compute branches, as far as their operands are
known: constants, and values computed from constants. The result is correct however
ptxas unrolls, rotates or counts a loop.
"""

import collections
import re
from collections.abc import Collection
from fractions import Fraction

from tools.gpu_program.machine_code.arithmetic import State, execute, predicate
from tools.gpu_program.machine_code.control_flow import ControlFlow
from tools.gpu_program.machine_code.kernel import Access, Block
from tools.gpu_program.machine_code.listing import Instruction

MOST_TRIPS = 1 << 16

# A key of a state that means that no thread has left the kernel yet.
_ALL_RUN = "all run"

_READS_MEMORY = {"LD", "LDG", "LDGSTS"}
_WRITES_MEMORY = {"ST", "STG", "ATOM", "ATOMG", "RED", "REDG"}

Reached = tuple[State, Fraction]
"""The state at the end of an edge, and the share of the paths that take the edge."""


def kernel_facts(listing: str) -> dict:
    """Return the fields of a :class:`Kernel` that come from its code.

    Args:
      listing: nvdisasm's listing of one kernel.
    """
    code = ControlFlow(listing)
    walk = Walk(code)
    blocks, accesses = [], []
    for start in sorted(walk.visits):
        block = Block(
            opcodes=tuple(i.opcode for i in code.blocks[start]),
            visits=walk.visits[start],
            conditional=start in walk.conditional,
            masked=start in walk.conditional | walk.after_exit,
        )
        blocks.append(block)
        accesses += [
            _access(i, block)
            for i in code.blocks[start]
            if i.base in _READS_MEMORY | _WRITES_MEMORY and i.guard != "!PT"
        ]
    return {
        "instructions": sum(len(block.opcodes) for block in blocks),
        "lost_loops": tuple(sorted(walk.lost)),
        "accesses": tuple(accesses),
        "blocks": tuple(blocks),
    }


def _access(instruction: Instruction, block: Block) -> Access:
    bits = re.search(r"\.[US]?(\d+)(?=\.|$)", instruction.opcode)
    return Access(
        bits=int(bits[1]) if bits else 32,
        store=instruction.base in _WRITES_MEMORY,
        masked=instruction.guard is not None or block.masked,
        executed=block.visits,
    )


class Walk:
    """The path of a thread through the blocks of a kernel.

    Args:
      code: the blocks of the kernel.

    Attributes:
      visits: how often a thread reaches each block. A loop with an unknown trip count
        counts once.
      lost: the loops with unknown trip counts.
      conditional: the blocks on one side of a branch on data.
      after_exit: the blocks before which some threads may leave the kernel.
    """

    def __init__(self, code: ControlFlow):
        self.code = code
        self.lost: set[int] = set()
        lost = None
        # If the trip count of a loop is unknown on a later visit, it counts as unknown
        # on every visit, so the walk starts over.
        while lost != self.lost:
            lost = set(self.lost)
            self.visits = collections.Counter()
            self.conditional, self.after_exit = set(), set()
            self._walk(code.first, code.blocks, {_ALL_RUN: True}, 1, Fraction(1))

    def _walk(
        self,
        start: int,
        inside: Collection[int],
        state: State,
        times: int,
        weight: Fraction,
        loop: bool = False,
    ) -> tuple[Reached | None, dict[int, Reached]]:
        """Walk once through some blocks, and through the loops among them.

        Args:
          start: the first block.
          inside: the blocks to walk through. The walk does not follow edges that leave
            them.
          state: the known values of registers, and ``_ALL_RUN``.
          times: the number of visits that this walk represents.
          weight: the share of the paths that reach ``start``, if half of the paths take
            each side of a branch on data.
          loop: whether ``start`` is the header of a loop. Then the walk does not follow
            edges back to it.

        Returns:
          ``(back, exits)``: the state and weight on edges to ``start``, or None, and
          the states and weights on edges that leave ``inside``, keyed by target.
        """
        pending, back, exits = {start: (state, weight)}, None, {}
        while pending:
            node = min(pending, key=self.code.order.__getitem__)
            state, weight = pending.pop(node)
            if node in self.code.loops and not (loop and node == start):
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

    def _loop(
        self, header: int, state: State, times: int, weight: Fraction
    ) -> dict[int, Reached]:
        """Walk through a loop, and return the states and weights after its end."""
        body = self.code.loops[header]
        if header not in self.lost:
            for _ in range(MOST_TRIPS):
                back, exits = self._walk(header, body, state, times, weight, True)
                if back is None:
                    return exits
                if exits:
                    break
                state = back[0]
            self.lost.add(header)
        state = {**state}
        for block in body:
            self._forget(block, state)
        _, exits = self._walk(header, body, state, times, weight, True)
        total = sum(share for _, share in exits.values())
        return {t: (s, share / total * weight) for t, (s, share) in exits.items()}

    def _forget(self, start: int, state: State) -> None:
        """Remove the registers that a block may write from the state."""
        for i in self.code.computing_branches[start]:
            for name in i.writes:
                state.pop(name, None)
        if start in self.code.callees:
            for block in self.code.reachable(self.code.callees[start]):
                self._forget(block, state)

    def _block(
        self, start: int, state: State, times: int, weight: Fraction
    ) -> list[tuple[int, Reached]]:
        """Walk through a block, and return states and weights on its outgoing edges."""
        self.visits[start] += times
        if weight != 1:
            self.conditional.add(start)
        if _ALL_RUN not in state:
            self.after_exit.add(start)
        self._execute(start, state)
        last = self.code.blocks[start][-1]
        taken = True
        for name, wanted in last.conditions:
            holds = predicate(name, state)
            met = None if holds is None else holds == wanted
            taken = met if taken is True or met is False else taken
        if start in self.code.callees and taken is not False:
            share = weight if taken else weight / 2
            known: State = {_ALL_RUN: True} if _ALL_RUN in state else {}
            self._walk(self.code.callees[start], self.code.blocks, known, times, share)
            self._forget(start, state)
        to = self.code.successors[start]
        if last.base not in ("BRA", "BSYNC") or "DIV" in last.modifiers:
            if last.base in ("EXIT", "KILL") and taken is None:
                state.pop(_ALL_RUN, None)
            stops = last.base in ("EXIT", "KILL", "RET") and taken is True
            return [] if stops else [(t, (state, weight)) for t in to]
        if taken is None and len(to) == 2 and to[0] != to[1]:
            return [(t, (state, weight / 2)) for t in to]
        return [(to[0] if taken is not False else to[-1], (state, weight))]

    def _execute(self, start: int, state: State) -> None:
        """Update the state with the instructions of a block."""
        for i in self.code.computing_branches[start]:
            holds = True if i.guard is None else predicate(i.guard, state)
            if holds is False:
                continue
            results = execute(i, state)
            for name in i.writes:
                value = results.get(name)
                if holds is None and value != state.get(name):
                    value = None
                if value is None:
                    state.pop(name, None)
                else:
                    state[name] = value


def _merge(one: Reached | None, other: Reached) -> Reached:
    """Merge two edges to a block, keeping the values that are known on both edges."""
    if one is None:
        return other
    (a, share), (b, more) = one, other
    return {k: v for k, v in a.items() if b.get(k) == v}, share + more
