"""Read the address of the repository from pyproject.toml, its only place.

This is a hook of MkDocs; see ``mkdocs.yml``. Without an address, pages have no links to
their sources.
"""

import tomllib
from typing import Any


def on_config(config: Any) -> Any:
    """Set the address of the repository and of the sources of pages."""
    with open("pyproject.toml", "rb") as file:
        urls = tomllib.load(file)["project"].get("urls", {})
    if "Repository" in urls:
        config.repo_url = urls["Repository"]
        config.edit_uri = "blob/main/docs/"
    return config
