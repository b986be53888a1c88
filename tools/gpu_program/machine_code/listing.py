"""Parse nvdisasm's listing of a kernel into instructions."""

import re

NO_RESULT = {"BAR", "BRA", "BSSY", "BSYNC", "EXIT", "NOP", "RED", "REDG", "RET"}
NO_RESULT |= {"ST", "STG", "STL", "STS", "STSM", "WARPSYNC", "YIELD"}
BLOCK_ENDS = {"BRA", "BSYNC", "CALL", "EXIT", "KILL", "RET"}
INDIRECT_BRANCHES = {"BRX", "BRXU", "JMP", "JMX", "JMXU"}


class Instruction:
    """An instruction of the listing.

    Args:
      address: the address of the instruction in bytes.
      guard: the predicate of the instruction, such as ``!P0``, or None.
      text: the opcode and the operands.
    """

    def __init__(self, address: int, guard: str | None, text: str):
        self.address, self.guard = address, guard
        self.opcode, _, operands = text.replace(".reuse", "").partition(" ")
        self.base, *self.modifiers = self.opcode.split(".")
        self.operands = [o.strip() for o in operands.split(",") if o.strip()]
        target = re.search(r"`\((.+?)\)", operands)
        self.target = target[1] if target else None
        self.results, self.sources = self._results()
        # Extra names are harmless: the values of these registers become unknown.
        self.writes = [r for r in self.results if r[-1] not in "TZ"]
        self.reads = set(re.findall(r"\bU?[RP]\d+\b", f"{guard} {operands}"))

    def _results(self) -> tuple[list[str], list[str]]:
        """Return the registers and predicates to write, and the source operands."""
        rest = list(self.operands)
        if self.base in NO_RESULT or self.target:
            return [], rest
        if self.base == "R2P":
            return [f"P{i}" for i in range(7)], rest
        # The first operands are results: at most one register, and predicates.
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
        """Return the number of registers of the result."""
        if "MMA" in self.base or "128" in self.modifiers or self.base == "LDSM":
            return 128 if "GMMA" in self.base else 4
        wide = {"64", "WIDE", "F64", "S64", "U64"} & set(self.modifiers)
        double = re.fullmatch(r"D(ADD|MUL|FMA|MNMX)", self.base)
        pair = self.base == "CS2R" and "32" not in self.modifiers
        return 2 if wide or double or pair else 1

    @property
    def convergence_barrier(self) -> str:
        """The barrier, such as ``B0``, at which BSYNC joins threads."""
        return next(o for o in self.operands if re.fullmatch(r"B\d+", o))

    @property
    def conditions(self) -> list[tuple[str, bool]]:
        """The predicates of a branch, and the values that they have if it is taken."""
        tokens = [self.guard] if self.guard else []
        if self.base in BLOCK_ENDS:
            tokens += [o for o in self.operands if re.fullmatch(r"!?U?P[\dT]", o)]
        return [(t.lstrip("!"), not t.startswith("!")) for t in tokens]


def parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a kernel, and the addresses of its labels."""
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
            instructions.append(Instruction(address, match[2], match[3]))
    return instructions, labels


def _consecutive(register: str, count: int) -> list[str]:
    kind, _, number = register.rpartition("R")
    if number == "Z":
        return [register] * count
    return [f"{kind}R{int(number) + i}" for i in range(count)]
