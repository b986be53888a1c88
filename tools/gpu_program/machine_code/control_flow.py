"""Find the basic blocks, successors and loops of a kernel."""

import collections

from tools.gpu_program.machine_code.listing import (
    BLOCK_ENDS,
    INDIRECT_BRANCHES,
    Instruction,
    parse,
)

_INSTRUCTION_BYTES = 16


class ControlFlow:
    """The basic blocks of a kernel. A block is named by its first address.

    Args:
      listing: nvdisasm's listing of one kernel.

    Attributes:
      first: the first block of the kernel.
      blocks: the instructions of each block.
      successors: the blocks that can follow each block. The target of a branch comes
        first.
      callees: the first block of each called function, keyed by the calling block.
      order: the position of each reachable block. A block is before its successors,
        except for edges that close a loop.
      loops: the blocks of each loop, keyed by the first block of the loop.
      computing_branches: the instructions of each block that compute predicates of
        branches, directly or indirectly.
    """

    def __init__(self, listing: str):
        instructions, labels = parse(listing)
        self.first = instructions[0].address
        self.blocks = _basic_blocks(instructions, labels)
        self.callees: dict[int, int] = {}
        self.successors: dict[int, list[int]] = {}
        self._connect(labels)
        roots = [self.first, *self.callees.values()]
        order = self._depth_first(roots)
        self.order = {node: i for i, node in enumerate(order)}
        self.loops = self._natural_loops(roots)
        self.computing_branches = self._computing_branches()

    def reachable(self, start: int) -> frozenset[int]:
        """Return the blocks that threads can reach from a block."""
        seen, stack = set(), [start]
        while stack:
            if (node := stack.pop()) not in seen:
                seen.add(node)
                stack += self.successors[node]
        return frozenset(seen)

    def _connect(self, labels: dict[str, int]) -> None:
        # Threads that BSYNC joins continue at the address that BSSY names.
        joins = {}
        for start, block in self.blocks.items():
            joins |= {
                i.operands[0]: labels[i.target]
                for i in block
                if i.base == "BSSY" and i.target
            }
            last = block[-1]
            after = last.address + _INSTRUCTION_BYTES
            after = [after] if after in self.blocks else []
            if last.base == "CALL":
                self.callees[start] = labels[last.target or ""]
                self.successors[start] = after
            elif last.base == "BRA" and "DIV" in last.modifiers:
                # Only a diverged warp takes this branch, to shuffle one by one.
                self.successors[start] = after
            elif last.base == "BRA":
                target = labels[last.target or ""]
                self.successors[start] = [target, *(after if last.conditions else [])]
            elif last.base == "BSYNC":
                target = joins[last.convergence_barrier]
                self.successors[start] = [target, *(after if last.conditions else [])]
            elif last.base in BLOCK_ENDS:
                self.successors[start] = after if last.guard else []
            else:
                self.successors[start] = after

    def _depth_first(self, roots: list[int]) -> list[int]:
        """Return the blocks in reverse postorder of a depth-first search."""
        left, seen = [], set()
        for root in roots:
            stack = [(root, iter(self.successors[root]))] if root not in seen else []
            seen.add(root)
            while stack:
                _, following = stack[-1]
                step = next((n for n in following if n not in seen), None)
                if step is None:
                    left.append(stack.pop()[0])
                else:
                    seen.add(step)
                    stack.append((step, iter(self.successors[step])))
        return left[::-1]

    def _natural_loops(self, roots: list[int]) -> dict[int, set[int]]:
        """Return the loops whose header dominates the edge that closes them."""
        before = collections.defaultdict(list)
        for node in reversed(self.order):
            for n in self.successors[node]:
                before[n].append(node)
        dominators = self._dominators(roots, before)
        loops: dict[int, set[int]] = {}
        for node in reversed(self.order):
            for header in self.successors[node]:
                if header not in dominators[node]:
                    if self.order[header] <= self.order[node]:
                        raise ValueError(f"the loop at {header:#x} has two entries")
                    continue
                body, stack = loops.setdefault(header, {header}), [node]
                while stack:
                    if (inside := stack.pop()) not in body:
                        body.add(inside)
                        stack += before[inside]
        return loops

    def _dominators(self, roots: list[int], before) -> dict[int, set[int]]:
        """Return a dict from each block to the blocks that are on every path to it."""
        dominators = {node: set(self.order) for node in self.order}
        dominators |= {root: {root} for root in roots}
        changed = True
        while changed:
            changed = False
            for node in self.order:
                if node not in roots:
                    common = set.intersection(*(dominators[b] for b in before[node]))
                    changed |= common | {node} != dominators[node]
                    dominators[node] = common | {node}
        return dominators

    def _computing_branches(self) -> dict[int, list[Instruction]]:
        blocks = self.blocks.values()
        ends = [block[-1] for block in blocks if block[-1].base in BLOCK_ENDS]
        needed = {p for i in ends for p, _ in i.conditions if p not in ("PT", "UPT")}
        every = [i for block in blocks for i in block]
        size = -1
        while size != len(needed):
            size = len(needed)
            for i in every:
                if needed.intersection(i.writes):
                    needed |= i.reads
        return {
            start: [i for i in block if needed.intersection(i.writes)]
            for start, block in self.blocks.items()
        }


def _basic_blocks(
    instructions: list[Instruction], labels: dict[str, int]
) -> dict[int, list[Instruction]]:
    leaders = {instructions[0].address, *labels.values()}
    for i in instructions:
        if i.base in INDIRECT_BRANCHES:
            raise ValueError(
                f"{i.opcode} at {i.address:#x}: indirect branches are not supported"
            )
        if i.base == "CALL" and i.target not in labels:
            raise ValueError(
                f"{i.opcode} at {i.address:#x}: the listing lacks the called function"
            )
        if i.base in BLOCK_ENDS:
            leaders.add(i.address + _INSTRUCTION_BYTES)
    blocks, current = {}, []
    for i in instructions:
        if i.address in leaders:
            current = blocks.setdefault(i.address, [])
        current.append(i)
    return blocks
