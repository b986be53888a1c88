"""PTX as kernels of instructions."""

import dataclasses
import re

from tools.gpu_program.ptx.faults import UnknownInstruction

_TYPES = re.compile(r"[busf]\d+|pred|bf16|bf16x2")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
      text: as in the source, with the names of its scope made unique.
      name: the opcode's first part, such as ``ld``.
      parts: the opcode's other parts, such as ``("global", "v4", "b32")``.
      operands: their texts; vectors and addresses are one operand each.
      guard: the predicate that must hold, or None.
      negated: whether it must not hold instead.
    """

    text: str
    name: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None = None
    negated: bool = False

    @property
    def types(self) -> tuple[str, ...]:
        """Those parts of the opcode that are types."""
        return tuple(part for part in self.parts if _TYPES.fullmatch(part))

    @property
    def modifiers(self) -> tuple[str, ...]:
        """Those parts of the opcode that are not."""
        return tuple(part for part in self.parts if not _TYPES.fullmatch(part))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel.

    Args:
      name: of the entry.
      parameters: their names, all of them pointers.
      instructions: its code.
      labels: numbers of the instructions that they stand before.
      registers: their types.
      shared: offsets of the variables in shared memory.
      static_shared: bytes of these.
    """

    name: str
    parameters: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, str]
    shared: dict[str, int]
    static_shared: int


def parse(source: str) -> dict[str, Kernel]:
    """The kernels of a PTX module by name.

    Args:
      source: of the module.

    Raises:
      UnknownInstruction: for a declaration that the interpreter does not know.

    >>> kernel = parse('''
    ... .visible .entry k(.param .u64 out) {
    ...     .reg .b64 %rd<2>;
    ...     ld.param.u64 %rd1, [out];
    ...     ret;
    ... }''')["k"]
    >>> kernel.parameters, kernel.instructions[0].operands
    (('out',), ('%rd1', '[out]'))
    """
    # PTX 9 says of which function a parameter is.
    source = _without_comments(source).replace("ld.param::entry.", "ld.param.")
    shared, size = _shared_variables(source)
    found = {}
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{", source):
        body = _Body(source[match.end() :])
        found[match[1]] = Kernel(
            name=match[1],
            parameters=tuple(p.split()[-1] for p in match[2].split(",") if p.strip()),
            instructions=tuple(body.instructions),
            labels=body.labels,
            registers=body.registers,
            shared=shared,
            static_shared=size,
        )
    return found


def split_list(text: str) -> tuple[str, ...]:
    """The parts of a list between commas, or of one in braces.

    >>> split_list("{%r1, %r2}")
    ('%r1', '%r2')
    """
    return tuple(part.strip() for part in text.strip("{} ").split(",") if part.strip())


def _without_comments(source: str) -> str:
    source = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)
    return re.sub(r"^\s*\.(loc|file|pragma)\b.*$", "", source, flags=re.M)


def _shared_variables(source: str) -> tuple[dict[str, int], int]:
    """Offsets of variables in shared memory, and the bytes of all that have a size."""
    offsets, size = {}, 0
    pattern = (
        r"^\s*(?:\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)(?:\[(\d*)\])?;"
    )
    found = re.findall(pattern, source, flags=re.M)
    # What the launch gives the size of comes after all that has one.
    for align, name, count in sorted(found, key=lambda variable: not variable[2]):
        size = -(-size // int(align)) * int(align)
        offsets[name] = size
        size += int(count or 0)
    return offsets, size


class _Body:
    """Reads the statements of one kernel up to its closing brace."""

    def __init__(self, text: str):
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers: dict[str, str] = {}
        # Registers of inner scopes hide those of outer ones.
        self._scopes: list[dict[str, str]] = [{}]
        self._count = 0
        # A brace opens a scope where a statement may begin, and else a vector.
        token = re.compile(
            r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+):(?!:)|(?P<rest>[^;]*);)"
        )
        at = 0
        while self._scopes:
            match = token.match(text, at)
            if match is None:
                raise UnknownInstruction(f"not a statement: {text[at : at + 80]!r}")
            at = match.end()
            if match["open"]:
                self._count += 1
                self._scopes.append({})
            elif match["close"]:
                self._scopes.pop()
            elif match["label"]:
                self.labels[match["label"]] = len(self.instructions)
            elif match["rest"].strip():
                self._statement(" ".join(match["rest"].split()))

    def _statement(self, text: str) -> None:
        if text.startswith(".reg "):
            self._declare(*text.split(None, 2)[1:])
        elif text.startswith(".shared "):
            pass
        elif text.startswith("."):
            raise UnknownInstruction(f"{text}: not a declaration of registers")
        else:
            self.instructions.append(_instruction(self._with_unique_names(text)))

    def _declare(self, kind: str, names: str) -> None:
        for name in split_list(names):
            family = re.fullmatch(r"(.+)<(\d+)>", name)
            if family:
                for number in range(int(family[2])):
                    self.registers[f"{family[1]}{number}"] = kind[1:]
            else:
                unique = name if len(self._scopes) == 1 else f"{name}${self._count}"
                self._scopes[-1][name] = unique
                self.registers[unique] = kind[1:]

    def _with_unique_names(self, text: str) -> str:
        opcode, _, operands = text.partition(" ")
        if opcode.startswith("@"):
            return f"{self._renamed(opcode)} {self._with_unique_names(operands)}"
        return f"{opcode} {self._renamed(operands)}".strip()

    def _renamed(self, text: str) -> str:
        def unique(match):
            inner_first = reversed(self._scopes)
            return next((s[match[0]] for s in inner_first if match[0] in s), match[0])

        return re.sub(r"[%\w$]+", unique, text)


def _instruction(text: str) -> Instruction:
    guard = re.match(r"@(!?)(\S+) (.*)", text)
    opcode, _, operands = (guard[3] if guard else text).partition(" ")
    name, *parts = opcode.replace("::", ".").split(".")
    return Instruction(
        text=text,
        name=name,
        parts=tuple(parts),
        operands=tuple(
            operand.strip()
            for operand in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,][^,]*", operands)
        ),
        guard=guard[2] if guard else None,
        negated=bool(guard and guard[1]),
    )
