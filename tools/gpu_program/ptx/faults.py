"""What can go wrong while a kernel is executed; messages name the instruction."""


class Fault(Exception):
    """A kernel did what no kernel may do."""


class OutOfBounds(Fault):
    """An access outside of the arrays that the kernel was given to read or write."""


class Misaligned(Fault):
    """An access at an address that its width does not divide."""


class Uninitialised(Fault):
    """A read of a register or of memory that nothing has written."""


class Race(Fault):
    """Accesses of two threads to one address with no barrier to order them."""


class Divergence(Fault):
    """A barrier or an exchange of lanes that some of its threads do not reach."""


class Endless(Fault):
    """More steps than any kernel here takes."""


class UnknownInstruction(Fault):
    """An instruction, or a form of one, that the interpreter does not know."""
