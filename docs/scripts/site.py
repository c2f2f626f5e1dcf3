"""What mkdocs calls while it builds the site: pages that live elsewhere come in, and links to the source.

The address of the repository is not written down: `ECEMB_REPOSITORY`, such as https://host/owner/ecemb, has
it. Without it, pages have no links to their sources. `ECEMB_COMMIT` is named beside the version.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Page -> the file in the repository's root that it is."""
GENERATED = "<!-- Written by"
"""How a page begins, below its title, that a script writes: it has no link for edits."""
_TITLE = re.compile(r"\s*# .*\n\s*")
_SHORT_HASH = 12


def on_config(config: Any) -> Any:
    """Adds the version to the foot of each page, and the repository's address if it is known."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / "ecemb" / "__init__.py").read_text(encoding="utf-8"))
    commit = os.environ.get("ECEMB_COMMIT", "")[:_SHORT_HASH]
    config.copyright = f"ecemb {version[1] if version else ''}{f', commit {commit}' if commit else ''}"
    if repository := os.environ.get("ECEMB_REPOSITORY"):
        config.repo_url, config.repo_name, config.edit_uri = repository, "source", "edit/main/docs/"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds `PAGES` to the site."""
    for page, name in PAGES.items():
        file = File.generated(config, page, abs_src_path=str(ROOT / name))
        file.edit_uri = f"../{name}"
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Leaves the link for edits out of pages that scripts write."""
    if _TITLE.sub("", markdown, count=1).startswith(GENERATED):
        page.edit_url = None
    return markdown
