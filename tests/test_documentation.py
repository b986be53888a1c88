"""The documentation names everything public, and its links lead somewhere."""

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
API = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
DOCUMENTED = set(re.findall(r"^::: (\S+)$", API, re.MULTILINE))
MODULES = {
    name: importlib.import_module(name)
    for name in (
        "lowbit_optax",
        "lowbit_optax.loss_scaling",
        "lowbit_optax.lpmm",
        "lowbit_optax.precision",
        "lowbit_optax.release",
        "pallas_kernels",
    )
}


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_has_every_public_name(name):
    package = {x.split(".")[-1] for x in DOCUMENTED if x.count(".") == 1}
    own = {x.removeprefix(f"{name}.") for x in DOCUMENTED if x.startswith(f"{name}.")}
    # lpmm and loss_scaling share most of their names with the package.
    missing = set(MODULES[name].__all__) - own - (package if "." in name else set())
    assert not missing


def test_the_reference_has_no_other_names():
    for name in DOCUMENTED:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def _pages():
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]


def test_links_lead_to_files_that_are_there():
    for page in _pages():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), f"{page}: {target}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 125


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in navigation


def test_every_command_names_a_file_that_is_there():
    for page in _pages():
        text = page.read_text()
        for name in re.findall(r"\b((?:benchmarks|examples|tests)/\w+\.py)\b", text):
            assert (ROOT / name).exists(), f"{page}: {name}"
