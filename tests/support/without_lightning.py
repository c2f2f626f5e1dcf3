"""`ecemb.integrations.lightning` over an empty base class: Lightning takes seconds to import."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "ecemb.integrations.lightning"


def lightning() -> ModuleType:
    """The module, which no other code gets to see."""
    library = ModuleType("pytorch_lightning")
    library.__spec__ = ModuleSpec(library.__name__, None)
    library.Callback = type("Callback", (), {})
    before = {name: sys.modules.pop(name, None) for name in (library.__name__, NAME)}
    sys.modules[library.__name__] = library
    try:
        return importlib.import_module(NAME)
    finally:  # these two alone: what the module imports is not to be imported a second time
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
