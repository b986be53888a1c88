"""How often a thread comes to each block and loop of a kernel.

The code is executed on what is known of the registers that branches depend on:
constants and what is computed from them. That holds however ptxas has unrolled, rotated
or counted a loop.
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

# Stands in a state, among registers, for no thread having left the kernel.
_ALL_RUN = "all run"

_READS_MEMORY = {"LD", "LDG", "LDGSTS"}
_WRITES_MEMORY = {"ST", "STG", "ATOM", "ATOMG", "RED", "REDG"}

Reached = tuple[State, Fraction]
"""What is known where an edge arrives, and which share of the paths takes it."""


def kernel_facts(listing: str) -> dict:
    """The fields of a :class:`Kernel` that come from its code.

    Args:
      listing: nvdisasm's, of one kernel.
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
    """A walk through a kernel's blocks as a thread takes it.

    Args:
      code: the blocks.

    Attributes:
      visits: how often a thread comes to each block; a loop of unknown trips is counted
        once.
      lost: the loops whose trip counts were not found.
      conditional: blocks on one side of a branch on data.
      after_exit: blocks before which some threads may have left the kernel.
    """

    def __init__(self, code: ControlFlow):
        self.code = code
        self.lost: set[int] = set()
        lost = None
        # A loop whose trips are not found the second time that a thread comes to it is
        # counted as one whose trips never are.
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
        """Go through a loop until it ends; the states and weights it ends with."""
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
        """Drop from the state what a block may write."""
        for i in self.code.computing_branches[start]:
            for name in i.writes:
                state.pop(name, None)
        if start in self.code.callees:
            for block in self.code.reachable(self.code.callees[start]):
                self._forget(block, state)

    def _block(
        self, start: int, state: State, times: int, weight: Fraction
    ) -> list[tuple[int, Reached]]:
        """Go through a block; the states and weights on the edges that it may take."""
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
        """Bring the state to the end of a block."""
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
    """What holds on both of two edges to one block."""
    if one is None:
        return other
    (a, share), (b, more) = one, other
    return {k: v for k, v in a.items() if b.get(k) == v}, share + more
