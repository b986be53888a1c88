"""Runs Tunix' tests of its trainer with one of our optimizers; prints what failed.

    python tunix_own_tests.py FILE ALIAS

It is a process of its own: those tests want four devices.
"""

import importlib.util
import json
import sys
import types
import unittest

import optax

import lowbit_optax


def _optax_with(make):
    """Optax whose optimizers are this one.

    It is the alias itself: ``inject_hyperparams`` reads its signature.
    """
    ours = dict.fromkeys(("sgd", "adam", "adamw"), make)
    return types.SimpleNamespace(**{**vars(optax), **ours})


def main(file: str, alias: str) -> None:
    spec = importlib.util.spec_from_file_location("peft_trainer_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if alias != "optax":
        module.optax = _optax_with(getattr(lowbit_optax, alias))
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TestResult()
    suite.run(result)
    texts = {x.id().split(".")[-1]: t for x, t in result.failures + result.errors}
    print(json.dumps({"count": result.testsRun, "failed": texts}))


if __name__ == "__main__":
    from absl import flags  # which the tests read

    flags.FLAGS(sys.argv[:1])
    main(*sys.argv[1:])
