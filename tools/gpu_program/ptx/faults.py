"""Errors of executed kernels. Their messages name the instruction."""


class Fault(Exception):
    """A kernel did something that is not allowed."""


class OutOfBounds(Fault):
    """An access outside of the arrays that the kernel may read or write."""


class Misaligned(Fault):
    """An access to an address that is not a multiple of the access's width."""


class Uninitialised(Fault):
    """A read from a register or from memory that was not written before."""


class Race(Fault):
    """Accesses of two threads to one address without a barrier between them."""


class Divergence(Fault):
    """A barrier or a lane exchange that some of its threads do not reach."""


class Endless(Fault):
    """The kernel runs for more steps than any kernel should need."""


class UnknownInstruction(Fault):
    """An instruction, or a form of one, that the interpreter does not support."""
