"""``python -m benchmarks`` lists all benchmarks and nothing else."""

import importlib
import json
import pathlib
import sys

import pytest

from benchmarks import pictures, records
from benchmarks.__main__ import main, missing
from benchmarks.registry import BENCHMARKS

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_benchmark_says_what_it_does(capsys, monkeypatch):
    """``--help`` prints a description and runs nothing."""
    monkeypatch.setattr(sys, "argv", [])
    tried = [name for name, each in BENCHMARKS.items() if not missing(each)]
    assert {"step_time", "kahan_parts"} < set(tried)
    for name in tried:
        with pytest.raises(SystemExit) as status:
            main([name, "--help"])
        assert status.value.code == 0
        shown = capsys.readouterr().out
        assert f"python -m benchmarks {name}" in shown


def test_every_benchmark_is_there_and_on_a_page():
    names = [path.stem for path in FOLDER.glob("*/*.py")]
    pages = [*(FOLDER.parent / "docs").rglob("*.md"), FOLDER / "README.md"]
    text = "\n".join(page.read_text() for page in pages)
    for name, each in BENCHMARKS.items():
        assert importlib.util.find_spec(each.module), name
        assert names.count(name) == 1, "another folder has one of this name"
        assert f"`{name}`" in text or f"-m benchmarks {name}" in text, name
    assert {"step_time", "kahan_parts", "compute_optimal"} < set(BENCHMARKS)
    assert "next_byte" not in BENCHMARKS, "it has no main(argv)"


def test_every_record_says_where_it_comes_from():
    for path in FOLDER.glob("*/*.json"):
        record = json.loads(path.read_text())
        program, name = record["command"].split()[:3], record["command"].split()[3]
        assert program == ["python", "-m", "benchmarks"], path
        stem = path.stem.removesuffix("_large")
        assert BENCHMARKS[name].module == f"benchmarks.{path.parent.name}.{stem}"
        assert record["ran"].startswith(("CPU", "compiled for", "NVIDIA")), path
        assert record["versions"]["jax"], path
        assert path.stat().st_size < 200_000


def test_a_try_with_other_options_leaves_the_record_that_is_kept():
    parser = records.Options("A benchmark.", seeds=3, steps=20)
    for options, is_apart in (
        ([], False),
        (["--draw"], False),
        (["--seeds", "1"], True),
    ):
        args = parser.parse_args(options)
        path = records.path_of("benchmarks.papers.kahan_parts", args.is_apart)
        assert (FOLDER in path.parents) != is_apart
    assert parser.parse_args(["--steps", "7"]).steps == 7


def test_a_run_is_saved_and_shown_and_a_try_apart(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    options = records.Options("A benchmark.", steps=20)
    drawn = []

    def run(*flags, measure=lambda args: {"figure": args.steps}):
        text = lambda record: f"figure {record['figure']}"
        draw = lambda record, path: drawn.append(path.relative_to(tmp_path).as_posix())
        args = options.parse_args(flags)
        records.run("benchmarks.papers.some", args, measure, text, draw)
        return capsys.readouterr().out

    (tmp_path / "benchmarks" / "papers").mkdir(parents=True)
    assert run() == "figure 20\n"
    assert run("--steps", "3") == "figure 3\n"
    assert run("--draw", measure=None) == "figure 20\n"
    assert drawn == [
        f"{x}/some.png" for x in ("docs/evidence", "runs", "docs/evidence")
    ]
    assert (tmp_path / "runs" / "some.json").exists()


def test_a_module_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr(sys, "argv", [])
    assert main(["digit_moments"]) == 2
    assert "digit_moments needs sklearn" in capsys.readouterr().out


def test_figures_of_seeds_are_spread_and_compared_seed_by_seed(capsys):
    of = lambda name, seed: {"loss": seed + 2 * (name == "b"), "other": 0}
    found = records.of_seeds(["a", "b"], 2, of)
    assert found == {
        "loss": {"a": [0, 1], "b": [2, 3]},
        "other": {"a": [0, 0], "b": [0, 0]},
    }
    assert "seed 1, b: loss 3.0000" in capsys.readouterr().out
    spreads, gaps = records.spreads(found["loss"]), records.gaps(found["loss"], "a")
    assert (spreads["a"]["mean"], gaps["b"]["mean"], gaps["b"]["std"]) == (0.5, 2, 0)
    shown = records.figures({"date": "", "loss": spreads, "gaps": gaps, "size": 3})
    assert shown.splitlines() == [
        "loss: a = 0.50000 ± 0.70711",
        "loss: b = 2.50000 ± 0.70711",
        "gaps: b = 2.00000 ± 0.00000",
        "size = 3",
    ]


def test_claims_name_every_paper_s_benchmark_and_show_its_picture():
    pages = (FOLDER.parent / "docs" / "claims").glob("*.md")
    page = "".join(path.read_text() for path in pages)
    for name, each in BENCHMARKS.items():
        if each.group == "papers":
            assert (FOLDER / "papers" / f"{name}.json").exists(), name
            assert f"(`{name}`" in page
            assert f"](../evidence/{name}.png)" in page
