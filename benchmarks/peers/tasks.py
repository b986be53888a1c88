"""What every optimizer of the comparison is given, in numpy alone."""

import dataclasses
import itertools

import numpy as np

B1, B2, EPS = 0.9, 0.999, 1e-8
DECAY = 0.01
SHAPE = (64, 64)
HALF = 150
"""Steps of a half of each case."""


def bfloat16(x) -> np.ndarray:
    """Float32 values that bfloat16 holds, rounded to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """Gradients that optimizers of few bits are known to fail on.

    Attributes:
      gradients: float32 that bfloat16 holds, of shape ``(2 * HALF, *SHAPE)``.
      rate: the learning rate.
      counted: which elements of the weights are compared; all if None.
      since: the step from which the movement is.
    """

    gradients: np.ndarray
    rate: float = 1e-3
    counted: np.ndarray | None = None
    since: int = 0


def start(seed: int = 0) -> np.ndarray:
    """The weights of every case, in bfloat16's values."""
    return bfloat16(np.random.default_rng(seed).standard_normal(SHAPE))


def cases() -> dict[str, Case]:
    """By name, as the table has them."""
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
    """Weights of AdamW in float64, after half of the steps and after all."""
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
    """Error of the way gone, to the length of float64's: 0 is exact, 1 if none is gone.

    None if a weight is not finite.

    Args:
      case: which one.
      half, end: the weights that the optimizer has after half of the steps and all.
    """
    want_half, want = adamw(case)
    before = (half, want_half) if case.since else (start(), start())
    counted = np.ones(SHAPE, bool) if case.counted is None else case.counted
    gone = (np.asarray(end, np.float64) - before[0])[counted]
    wanted = (want - before[1])[counted]
    found = float(np.linalg.norm(gone - wanted) / np.linalg.norm(wanted))
    return found if np.isfinite(found) else None


# One small task: a student of three matrices learns the classes of a teacher.

WIDTHS = (64, 128, 128, 32)
BATCH = 128
STEPS = 600
RATE = 3e-3
TEST_SIZE = 4096


def rate_at(step: int) -> float:
    """A cosine to zero: in its tail updates are far below a weight's last bit."""
    return RATE * 0.5 * (1 + np.cos(np.pi * step / STEPS))


def _matrices(random) -> list[np.ndarray]:
    pairs = itertools.pairwise(WIDTHS)
    return [
        random.standard_normal((a, b)).astype(np.float32) / np.sqrt(a) for a, b in pairs
    ]


@dataclasses.dataclass(frozen=True)
class Training:
    """Inputs and classes of each step, and those of the test."""

    weights: list[np.ndarray]
    inputs: np.ndarray
    classes: np.ndarray
    test_inputs: np.ndarray
    test_classes: np.ndarray


def training(seed: int) -> Training:
    """Start, batches and test of one seed."""
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
