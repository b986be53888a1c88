"""The inputs that every optimizer of the comparison gets. Needs only numpy."""

import dataclasses
import itertools
import typing

import numpy as np

B1, B2, EPS = 0.9, 0.999, 1e-8
DECAY = 0.01
SHAPE = (64, 64)
HALF = 150
"""The number of steps in each half of a case."""


def bfloat16(x) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even, and return float32 values."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """Gradients that are known to make low-bit optimizers fail.

    Attributes:
      gradients: float32 values that bfloat16 can represent, with shape
        ``(2 * HALF, *SHAPE)``.
      rate: the learning rate.
      counted: a mask of the weights that are compared; all weights if None.
      since: the step at which the compared movement starts.
    """

    gradients: np.ndarray
    rate: float = 1e-3
    counted: np.ndarray | None = None
    since: int = 0


def start(seed: int = 0) -> np.ndarray:
    """Return the initial weights of every case, which bfloat16 can represent."""
    return bfloat16(np.random.default_rng(seed).standard_normal(SHAPE))


def cases() -> dict[str, Case]:
    """Return the cases, keyed by the names that the table shows."""
    draws = np.random.default_rng(1).standard_normal((2 * HALF, *SHAPE))
    one = bfloat16(draws)
    outlier = np.zeros(SHAPE, bool)
    outlier.ravel()[::1024] = True
    stops = one.copy()
    stops[HALF:] = 0
    return {
        "gradients of 1e-8": Case(bfloat16(draws * 1e-8)),
        "gradients of 1e6": Case(bfloat16(draws * 1e6)),
        "outliers of 1000": Case(
            bfloat16(np.where(outlier, 1000 * draws, draws)), counted=~outlier
        ),
        "gradients stop": Case(stops, since=HALF),
        "rate 1e-6": Case(one, rate=1e-6),
        "rate 1e-6, one sign": Case(abs(one), rate=1e-6),
    }


def adamw(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 AdamW's weights after half of the steps and after all steps."""
    w = start().astype(np.float64)
    m, v, half = np.zeros_like(w), np.zeros_like(w), w
    for t, g in enumerate(case.gradients.astype(np.float64), 1):
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * g * g
        update = (m / (1 - B1**t)) / (np.sqrt(v / (1 - B2**t)) + EPS)
        w = w - case.rate * (update + DECAY * w)
        half = w if t == HALF else half
    return half, w


def error(case: Case, half: np.ndarray, end: np.ndarray) -> float | None:
    """Return the error of a movement, relative to the length of the float64 movement.

    0 is exact, and 1 means that the weights did not move.

    Args:
      case: the case that ran.
      half, end: the weights after half of the steps, and after all steps.

    Returns:
      The error, or None if a weight is not finite.
    """
    want_half, want = adamw(case)
    before = (half, want_half) if case.since else (start(), start())
    counted = np.ones(SHAPE, bool) if case.counted is None else case.counted
    gone = (np.asarray(end, np.float64) - before[0])[counted]
    wanted = (want - before[1])[counted]
    found = float(np.linalg.norm(gone - wanted) / np.linalg.norm(wanted))
    return found if np.isfinite(found) else None


# A small task: a network of three matrices learns the classes of another network.

WIDTHS = (64, 128, 128, 32)
BATCH = 128
STEPS = 600
RATE = 3e-3
TEST_SIZE = 4096


def rate_at(step: int) -> float:
    """Return a cosine to zero. The last updates are far below a weight's last bit."""
    return RATE * 0.5 * (1 + np.cos(np.pi * step / STEPS))


def _matrices(random) -> list[np.ndarray]:
    pairs = itertools.pairwise(WIDTHS)
    return [
        random.standard_normal((a, b)).astype(np.float32) / np.sqrt(a) for a, b in pairs
    ]


class Training(typing.NamedTuple):
    """Initial weights, and the inputs and classes of each step and of the test."""

    weights: list[np.ndarray]
    inputs: np.ndarray
    classes: np.ndarray
    test_inputs: np.ndarray
    test_classes: np.ndarray


def training(seed: int) -> Training:
    """Return the initial weights, batches and test data of one seed."""
    random = np.random.default_rng(100 + seed)
    teacher = _matrices(random)

    def drawn(count):
        inputs = random.standard_normal((count, WIDTHS[0])).astype(np.float32)
        x = inputs
        for matrix in teacher[:-1]:
            x = np.tanh(x @ matrix)
        logits = 4 * x @ teacher[-1] + random.gumbel(size=(count, WIDTHS[-1]))
        return inputs, logits.argmax(-1).astype(np.int32)

    inputs, classes = drawn(STEPS * BATCH)
    weights = [bfloat16(w) for w in _matrices(random)]
    shape = (STEPS, BATCH)
    return Training(
        weights, inputs.reshape(*shape, -1), classes.reshape(shape), *drawn(TEST_SIZE)
    )


# Sizes of the other measurements.

STORED = (1024, 1024)
TIMED = (1024, 1024)
ROUNDS = 15
