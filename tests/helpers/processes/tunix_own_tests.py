"""Runs Tunix's tests of its trainer with an alias of this package; prints failures.

    python tunix_own_tests.py FILE ALIAS

It is a separate process, because the tests need four devices.
"""

import importlib.util
import json
import re
import sys
import types
import unittest

import optax

import lowbit_optax


def _optax_with(make):
    """Optax with its optimizers replaced.

    It uses the alias itself, because ``inject_hyperparams`` reads its signature.
    """

    def sgd(learning_rate, momentum=None):
        del momentum  # AdamW always has momentum
        return make(learning_rate)

    ours = {"sgd": sgd, "adam": make, "adamw": make}
    return types.SimpleNamespace(**{**vars(optax), **ours})


def _message(trace):
    """The error of a traceback, and the two lines after it."""
    lines = [x.strip() for x in trace.splitlines() if x.strip()]
    starts = [
        i for i, x in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", x)
    ]
    return " ".join(lines[starts[-1] : starts[-1] + 3] if starts else lines[-1:])[:200]


def main(file: str, alias: str) -> None:
    spec = importlib.util.spec_from_file_location("peft_trainer_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if alias != "optax":
        module.optax = _optax_with(getattr(lowbit_optax, alias))
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TestResult()
    suite.run(result)
    for _, trace in result.failures + result.errors:
        print(trace, file=sys.stderr)
    failed = {
        case.id().split(".")[-1]: _message(trace)
        for case, trace in result.failures + result.errors
    }
    print(json.dumps({"count": result.testsRun, "failed": failed}))


if __name__ == "__main__":
    from absl import flags  # the tests read flags

    flags.FLAGS(sys.argv[:1])
    main(*sys.argv[1:])
