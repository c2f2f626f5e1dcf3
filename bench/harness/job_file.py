"""What a launcher passes to its ranks: a dataclass, as a file in the folder that they share.

Imports hardly anything: some scripts measure their own imports.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


class JobFile:
    """Base of such dataclasses; their fields are plain values, and tuples of them.

    Attributes:
        folder: That launcher and ranks share.
    """

    folder: str

    def write(self) -> Path:
        """Writes it to its folder, for `read`."""
        path = Path(self.folder, "order.json")
        fields: Any = self
        path.write_text(json.dumps(dataclasses.asdict(fields)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str) -> Any:
        """What was written to a file."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()})
