"""The verdicts of the equivalence test, on differences with known means."""

import numpy as np
import pytest

from benchmarks.training import equivalence
from benchmarks.training.text import stdlib_text

SPREAD = np.linspace(-1, 1, 14)


@pytest.mark.parametrize(
    ("mean", "width", "word"),
    [
        (0.000, 0.004, "equivalent"),
        (0.002, 0.002, "equivalent"),
        (0.011, 0.001, "worse"),
        (0.004, 0.002, "worse"),
        (-0.011, 0.001, "better"),
        (0.003, 0.010, "undecided"),
        (0.000, 0.020, "undecided"),
    ],
)
def test_a_verdict_needs_both_one_sided_tests(mean, width, word):
    found = equivalence.verdict(list(mean + width * SPREAD), planned=14)
    assert found["verdict"] == word
    assert found["mean"] == pytest.approx(mean, abs=1e-12)


def test_a_row_with_too_few_pairs_has_no_verdict():
    found = equivalence.verdict(list(1e-4 * SPREAD[:13]), planned=14)
    assert found["verdict"] == "not finished"


def test_equivalence_is_shown_wrongly_in_five_percent_of_experiments():
    # The worst case is a true difference as large as the margin.
    draws = np.random.default_rng(0).normal(equivalence.MARGIN, 1e-3, (4000, 14))
    words = [equivalence.verdict(each, 14)["verdict"] for each in draws]
    assert np.mean(np.equal(words, "equivalent")) == pytest.approx(0.05, abs=0.01)


def test_runs_are_paired_by_seed():
    run = lambda loss: {"bytes": 5.0, "held_out": loss}
    found = {
        "float32": {0: run(1.0), 1: run(2.0), 2: run(9.0)},
        "lowbit_adamw": {0: run(1.5), 1: run(2.25), 3: run(0.0)},
    }
    rows = equivalence.figures(found)["rows"]
    assert rows["lowbit_adamw"]["pairs"] == [0.5, 0.25]
    assert rows["lowbit_adamw"]["verdict"] == "not finished"


def test_a_text_file_replaces_the_standard_library(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes(bytes(range(200)))
    text = stdlib_text.load_file(path)
    assert text.train.tolist() == list(range(190))
    assert text.held_out.tolist() == list(range(190, 200))
