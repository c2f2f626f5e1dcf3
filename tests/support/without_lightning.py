"""`ecemb.lightning` without Lightning, whose import takes seconds: over an empty base class of callbacks."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

NAME = "ecemb.lightning"


def lightning() -> ModuleType:
    """The module, which no other code gets to see."""
    library = ModuleType("pytorch_lightning")
    library.__spec__ = ModuleSpec(library.__name__, None)
    library.Callback = type("Callback", (), {})
    with mock.patch.dict(sys.modules, {library.__name__: library}):
        sys.modules.pop(NAME, None)
        return importlib.import_module(NAME)
