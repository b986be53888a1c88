"""What devices send each other in a compiled program."""

import re

_COLLECTIVE = re.compile(
    r"\b(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter"
    r"|collective-broadcast)"
)


def collectives(compiled) -> set[str]:
    """The kinds of instructions by which devices exchange data; empty if none does."""
    return set(_COLLECTIVE.findall(compiled.as_text()))
