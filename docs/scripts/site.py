"""What mkdocs calls while it builds the site: pages that live elsewhere in the repository come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Page -> the file in the repository's root that it is."""


def on_files(files: Files, config: Any) -> Files:
    """Adds `PAGES` to the site."""
    for page, name in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files
