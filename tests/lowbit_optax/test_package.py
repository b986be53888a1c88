"""``import lowbit_optax`` provides all modules, and only one of them needs flax."""

import runpy
import sys
import textwrap

import jax
import pytest

import lowbit_optax
from lowbit_optax import __main__
from tests.helpers.places import printed_by

MODULES = (
    *("block_scaling", "emulation", "formats", "loss_scaling", "lpmm", "precision"),
    *("release", "reports", "training"),
)


WITHOUT_FLAX = """
    import importlib.abc, sys

    class NoFlax(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "flax":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NoFlax())

    import inspect
    import lowbit_optax

    attempts = [
        "import lowbit_optax.training",
        "from lowbit_optax import training",
        "from lowbit_optax.training import TrainState",
        "lowbit_optax.training",
    ]
    for attempt in attempts:
        try:
            exec(attempt)
        except (ImportError, AttributeError) as error:
            print(error)
    print(hasattr(lowbit_optax, "training"))
    print("release" in dict(inspect.getmembers(lowbit_optax)))
"""


def test_modules_are_attributes_that_dir_lists():
    assert set(MODULES) <= set(dir(lowbit_optax))
    for name in MODULES:
        assert getattr(lowbit_optax, name).__name__ == f"lowbit_optax.{name}"
    assert callable(lowbit_optax.release.value_and_update)
    assert callable(lowbit_optax.precision.trace)


def test_every_public_name_exists():
    for name in lowbit_optax.__all__:
        assert hasattr(lowbit_optax, name), name
        assert name in dir(lowbit_optax), name


def test_modules_that_are_not_used_are_not_imported():
    program = """
        import sys
        import lowbit_optax
        unused = ("flax", "lowbit_optax.precision", "lowbit_optax.release")
        unused += ("jax.experimental.pallas.triton", "jax.experimental.pallas.tpu")
        print([name for name in unused if name in sys.modules])
        lowbit_optax.release
        print([name for name in unused if name in sys.modules])
    """
    output = printed_by("-c", textwrap.dedent(program))
    assert output.splitlines() == ["[]", "['lowbit_optax.release']"]


def test_without_flax_training_names_the_extra_and_the_rest_works():
    output = printed_by("-c", textwrap.dedent(WITHOUT_FLAX))
    *messages, has_training, has_release = output.splitlines()
    assert len(messages) == 4
    for message in messages:
        assert "pip install 'lowbit-optax[flax]'" in message
    assert (has_training, has_release) == ("False", "True")


@pytest.mark.standard_promotion
def test_the_check_of_an_installation_takes_one_step_in_each_format(
    capsys, monkeypatch
):
    assert __main__.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"jax {jax.__version__}" in " ".join(" ".join(lines).split())
    assert sum(line.endswith(" ok") for line in lines) == len(__main__._ALIASES)
    make = lowbit_optax.kahan_adamw
    monkeypatch.setattr(lowbit_optax, "kahan_adamw", lambda rate: make(rate / 2))
    assert __main__.main() == 1
    assert "WRONG: 0.50 of the step" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_help_explains_the_check_without_running_it(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lowbit_optax", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("lowbit_optax", run_name="__main__")
    found = capsys.readouterr().out
    assert "Check an installation" in found
    assert jax.__version__ not in found
