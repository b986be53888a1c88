"""Runs of text models are stored in files, and are not repeated."""

from benchmarks.training.text import kept_runs


def test_only_missing_runs_are_trained(tmp_path):
    rows, trained = ["float32", "4 bits, nearest"], []

    def train(row, seed):
        trained.append((row, seed))
        return {"loss": float(seed)}

    recorded = {"float32": {0: {"loss": 5.0}}}
    kept_runs.write(tmp_path, "4 bits, nearest", 1, {"loss": 7.0})
    found = kept_runs.complete(tmp_path, recorded)
    kept_runs.train_missing(rows, 2, tmp_path, found, train)
    assert trained == [("4 bits, nearest", 0), ("float32", 1)]
    assert kept_runs.complete(tmp_path, recorded) == {
        "float32": {0: {"loss": 5.0}, 1: {"loss": 1.0}},
        "4 bits, nearest": {0: {"loss": 0.0}, 1: {"loss": 7.0}},
    }
