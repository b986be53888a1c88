"""The documentation lists every public name, and all of its links work."""

import importlib
import re

import pytest

from benchmarks.registry import BENCHMARKS
from tests.helpers.places import ROOT

DOCS = ROOT / "docs"
API = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
DOCUMENTED = set(re.findall(r"^::: (\S+)$", API, re.MULTILINE))
MODULES = (
    "lowbit_optax",
    "lowbit_optax.block_scaling",
    "lowbit_optax.formats",
    "lowbit_optax.loss_scaling",
    "lowbit_optax.lpmm",
    "lowbit_optax.patches",
    "lowbit_optax.precision",
    "lowbit_optax.release",
    "lowbit_optax.reports",
    "lowbit_optax.transformations",
    "pallas_kernels",
)


def _object(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute, None)


def test_the_reference_has_every_public_name():
    documented = {id(_object(name)) for name in DOCUMENTED}
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            full = f"{module}.{name}"
            assert id(_object(full)) in documented, full


def test_the_reference_has_no_other_names():
    for name in DOCUMENTED:
        assert _object(name) is not None, name


def _pages():
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    return [*top, ROOT / "benchmarks" / "README.md", *DOCS.rglob("*.md")]


def test_links_lead_to_existing_files():
    for page in _pages():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.standard_promotion
def test_readme_s_program_runs_before_and_after_its_diff():
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    found = []
    for program in (" -", " +"):
        lines = [x[1:] for x in diff.splitlines() if x[:1] in program]
        names = {}
        exec("\n".join(lines), names)
        assert names["state"].step == 1
        found.append(str(names["state"].params["kernel"].dtype))
    assert found == ["float32", "bfloat16"]


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in navigation


def test_every_command_names_an_existing_file():
    for page in _pages():
        text = page.read_text()
        for name in re.findall(r"\b((?:benchmarks|examples|tests)/[\w/]+\.py)\b", text):
            assert (ROOT / name).exists(), f"{page}: {name}"
        for name in re.findall(r"-m benchmarks (\w+)", text):
            assert name in {*BENCHMARKS, "all"}, f"{page}: {name}"


def test_quoted_errors_are_in_the_code():
    source = "".join(x.read_text() for x in (ROOT / "lowbit_optax").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    _, errors = (DOCS / "troubleshooting.md").read_text().split("\n## Errors\n")
    messages = re.findall(r"^\| `([^`]*)` \|", errors, re.MULTILINE)
    assert messages
    for message in messages:
        varies = r"\.\.\.|params\['w'\]|'mu'|got \w+|with_loss_scale"
        for part in re.split(varies, message):
            assert part.strip(" ,") in joined, message
