"""Tunix' own tests of its trainer, with our optimizers in place of optax's.

They are in no archive of the registry. ``TUNIX`` in the environment names a checkout of
the installed version's tag.
"""

import functools
import importlib.util
import os
import pathlib
import types
import unittest

import optax
import pytest
from side_by_side import OURS, note

pytest.importorskip("tunix.sft.peft_trainer", exc_type=ImportError)
FILE = pathlib.Path(os.environ.get("TUNIX", "-")) / "tests/sft/peft_trainer_test.py"
pytestmark = pytest.mark.skipif(
    not FILE.exists(), reason="TUNIX names no checkout of Tunix"
)

# Asserts that moments have the dtype of the parameters, which is not ours to promise.
ABOUT_MOMENTS = "preserves_bf16_optimizer_state_dtypes"


@functools.cache
def _module():
    spec = importlib.util.spec_from_file_location("peft_trainer_test", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _optax_with(make):
    """Optax whose ``sgd`` and ``adamw`` are ours."""

    def optimizer(learning_rate, **options):
        return make(learning_rate, min_size=0, **options)

    ours = {"sgd": optimizer, "adam": optimizer, "adamw": optimizer}
    return types.SimpleNamespace(**{**vars(optax), **ours})


@pytest.mark.parametrize("name", OURS)
def test_tunix_tests_pass(name, monkeypatch):
    module = _module()
    monkeypatch.setattr(module, "optax", _optax_with(OURS[name]))
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    cases = [x for x in _flat(suite) if ABOUT_MOMENTS not in x.id()]
    result = unittest.TestResult()
    unittest.TestSuite(cases).run(result)
    failed = {x.id().split(".")[-1]: text for x, text in result.failures + result.errors}
    last = {test: text.strip().splitlines()[-1] for test, text in failed.items()}
    passed = f"{result.testsRun - len(failed)} of {result.testsRun}"
    note("Tunix PeftTrainer", **{f"own tests, {name}": passed})
    assert not failed, f"{passed} pass: {last}\n" + "\n".join(failed.values())


def _flat(suite):
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _flat(each)
        else:
            yield each
