"""``python -m benchmarks`` names what is there, and nothing else."""

import importlib
import json
import pathlib
import sys

import pytest

from benchmarks import records
from benchmarks.__main__ import main, missing
from benchmarks.registry import BENCHMARKS

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_benchmark_says_what_it_does(capsys, monkeypatch):
    """Under ``--help``, without a run."""
    monkeypatch.setattr(sys, "argv", [])
    tried = [name for name, each in BENCHMARKS.items() if not missing(each)]
    assert {"step_time", "release_time"} < set(tried)
    for name in tried:
        with pytest.raises(SystemExit) as status:
            main([name, "--help"])
        assert status.value.code == 0
        shown = capsys.readouterr().out
        assert f"python -m benchmarks {name}" in shown
        assert ("--full" in shown) == BENCHMARKS[name].has_full


def test_what_a_benchmark_needs_and_is_not_installed_is_named(capsys, monkeypatch):
    needs = ("json", "not_there.inside")
    monkeypatch.setitem(
        BENCHMARKS, "step_time", BENCHMARKS["step_time"]._replace(needs=needs)
    )
    assert main(["step_time"]) == 2
    assert "step_time needs not_there.inside;" in capsys.readouterr().out


def test_every_script_is_named():
    """A module of a group that has a ``main`` is a benchmark."""
    for group in {each.group for each in BENCHMARKS.values()}:
        for path in (FOLDER / group).glob("*.py"):
            has_main = "\ndef main(argv" in path.read_text()
            assert has_main == (path.stem in BENCHMARKS), path


def test_what_shows_the_figures_is_there():
    for name, each in BENCHMARKS.items():
        assert importlib.util.find_spec(each.module(name)), name
        for page in each.feeds:
            assert (FOLDER.parent / page).exists(), f"{name}: {page}"


def test_every_record_says_where_it_comes_from():
    for path in FOLDER.glob("*/*.json"):
        record = json.loads(path.read_text())
        program, name = record["command"].split()[:3], record["command"].split()[3]
        assert program == ["python", "-m", "benchmarks"], path
        assert (
            BENCHMARKS[name].module(name)
            == f"benchmarks.{path.parent.name}.{path.stem.removesuffix('_large')}"
        )
        assert record["ran"].startswith(("CPU", "compiled for", "NVIDIA")), path
        assert record["versions"]["jax"], path
        assert path.stat().st_size < 200_000


def test_a_try_with_other_options_leaves_the_record_that_is_kept():
    parser = records.parser("A benchmark.", seeds=3)
    parser.add_argument("--afresh", action="store_true")
    for options, is_apart in (
        ([], False),
        (["--draw"], False),
        (["--afresh"], False),
        (["--seeds", "1"], True),
    ):
        args = parser.parse_args(options)
        path = records.path_of("benchmarks.papers.kahan_parts", args.is_apart)
        assert (FOLDER in path.parents) != is_apart
    assert parser.parse_args(["--full"]).is_apart


@pytest.mark.parametrize("name", ["low_moments", "rounding_errors"])
def test_a_try_of_training_is_saved_apart(name, monkeypatch, tmp_path):
    module = pytest.importorskip(f"benchmarks.training.{name}", exc_type=ImportError)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(module, "train", lambda *args: {})
    monkeypatch.setattr(module, "linear", lambda *args: {}, raising=False)
    monkeypatch.setattr(records, "load", lambda path: sys.exit(str(path)))
    for options, folder in (["--steps", "20"], "runs"), ([], "benchmarks/training"):
        (tmp_path / folder).mkdir(parents=True)
        with pytest.raises(SystemExit, match=f"{folder}/{name}.json"):
            module.main(options)


def test_every_paper_has_a_record_and_a_picture_in_the_evidence():
    page = (FOLDER.parent / "docs" / "evidence.md").read_text()
    for name, each in BENCHMARKS.items():
        if each.group == "papers":
            assert (FOLDER / "papers" / f"{name}.json").exists(), name
            assert f"`python -m benchmarks {name}`" in page
            assert f"](evidence/{name}.png)" in page


def test_the_list_names_all(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in BENCHMARKS)


def test_an_unknown_name_is_refused(capsys):
    assert main(["nothing"]) == 2
    assert "there are gpu_program" in capsys.readouterr().out
