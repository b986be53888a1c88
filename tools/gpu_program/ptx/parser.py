"""Parse PTX into kernels and instructions."""

import dataclasses
import re

from tools.gpu_program.ptx.faults import UnknownInstruction

_TYPES = re.compile(r"[busf]\d+|pred|bf16|bf16x2")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
      text: the source of the instruction, in which the names of its scope are unique.
      name: the first part of the opcode, such as ``ld``.
      parts: the other parts of the opcode, such as ``("global", "v4", "b32")``.
      operands: the texts of the operands. A vector or an address is one operand.
      guard: the predicate that must be true, or None.
      negated: whether the predicate must be false instead.
    """

    text: str
    name: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None = None
    negated: bool = False

    @property
    def types(self) -> tuple[str, ...]:
        """The parts of the opcode that are types."""
        return tuple(part for part in self.parts if _TYPES.fullmatch(part))

    @property
    def modifiers(self) -> tuple[str, ...]:
        """The parts of the opcode that are not types."""
        return tuple(part for part in self.parts if not _TYPES.fullmatch(part))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel.

    Args:
      name: the name of the entry function.
      parameters: the names of the parameters, which are all pointers.
      instructions: the instructions of the kernel.
      labels: the index of the instruction after each label.
      registers: the type of each register.
      shared: the offset of each variable in shared memory.
      static_shared: the number of bytes of the variables whose size is declared.
    """

    name: str
    parameters: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, str]
    shared: dict[str, int]
    static_shared: int


def parse(source: str) -> dict[str, Kernel]:
    """Parse the kernels of a PTX module, and return them by name.

    Args:
      source: the PTX of the module.

    Raises:
      UnknownInstruction: if the interpreter does not support a declaration.

    >>> kernel = parse('''
    ... .visible .entry k(.param .u64 out) {
    ...     .reg .b64 %rd<2>;
    ...     ld.param.u64 %rd1, [out];
    ...     ret;
    ... }''')["k"]
    >>> kernel.parameters, kernel.instructions[0].operands
    (('out',), ('%rd1', '[out]'))
    """
    # PTX 9 names the kind of function to which a parameter belongs.
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
    """Split a list at its commas. The list may be in braces.

    >>> split_list("{%r1, %r2}")
    ('%r1', '%r2')
    """
    return tuple(part.strip() for part in text.strip("{} ").split(",") if part.strip())


def _without_comments(source: str) -> str:
    source = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)
    return re.sub(r"^\s*\.(loc|file|pragma)\b.*$", "", source, flags=re.M)


def _shared_variables(source: str) -> tuple[dict[str, int], int]:
    """Return offsets of shared variables, and the number of bytes of sized ones."""
    offsets, size = {}, 0
    pattern = (
        r"^\s*(?:\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)(?:\[(\d*)\])?;"
    )
    found = re.findall(pattern, source, flags=re.M)
    # Variables without a size come last, because the launch chooses their size.
    for align, name, count in sorted(found, key=lambda variable: not variable[2]):
        size = -(-size // int(align)) * int(align)
        offsets[name] = size
        size += int(count or 0)
    return offsets, size


class _Body:
    """The statements of one kernel, up to its closing brace."""

    def __init__(self, text: str):
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers: dict[str, str] = {}
        # A register of an inner scope hides a register of an outer scope.
        self._scopes: list[dict[str, str]] = [{}]
        self._count = 0
        # A brace at the start of a statement opens a scope. Other braces are vectors.
        token = re.compile(
            r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+):(?!:)|(?P<rest>[^;]*);)"
        )
        at = 0
        while self._scopes:
            match = token.match(text, at)
            if match is None:
                raise UnknownInstruction(f"cannot parse {text[at : at + 80]!r}")
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
            raise UnknownInstruction(f"the interpreter does not support {text!r}")
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
