"""The type of a jaxpr that holds its constants, in every version of JAX."""

from jax.extend import core

# From JAX 0.12 on every jaxpr does, and the type has no name of its own any more. The
# old name is still there, but type checkers are told that it is not exported.
ClosedJaxpr = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
