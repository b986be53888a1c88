"""The transformation that is around an optax one, and two that go beside it."""
