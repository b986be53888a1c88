"""The collectives of a compiled program."""

import re

_COLLECTIVE = re.compile(
    r"\b(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter"
    r"|collective-broadcast)"
)


def collectives(compiled) -> set[str]:
    """The kinds of instructions that exchange data between devices."""
    return set(_COLLECTIVE.findall(compiled.as_text()))
