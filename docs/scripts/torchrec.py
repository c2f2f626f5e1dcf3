"""`python docs/scripts/torchrec.py`: writes the table of members into docs/torchrec.md.

The decisions are those of `tests/support/torchrec/members.py`; `tests/contracts/test_torchrec_members.py`
compares them with the installed versions of TorchRec and FBGEMM. These are not imported.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "torchrec.md"
DECISIONS = ROOT / "tests" / "support" / "torchrec" / "members.py"
BEGIN = "<!-- Written by `python docs/scripts/torchrec.py`: change nothing from here to the end mark. -->\n"
END = "<!-- end -->\n"


def main() -> None:
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def render(page: str) -> str:
    """Returns the page with the present table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    """A row for the protected members of a family, then one for each reason of a refusal."""
    lines = ["| kind | members | protected |", "|---|---|---|"]
    decisions = runpy.run_path(str(DECISIONS))
    since = decisions["SINCE"]
    for title, family in decisions["FAMILIES"].items():
        rows: dict[str, list[str]] = {}
        for name, decision in family.items():
            first = f" (from {'.'.join(map(str, since[name]))})" if name in since else ""
            rows.setdefault(verdict(decision), []).append(f"`{name}`{first}")
        lines += [f"| {title} | {', '.join(names)} | {said} |" for said, names in rows.items()]
    return "\n".join(lines) + "\n"


def verdict(decision: Any) -> str:
    """Whether a member is protected, in words."""
    if hasattr(decision, "reason") and not hasattr(decision, "by_fbgemm"):
        return f"not tried: {decision.reason}"
    if hasattr(decision, "reason"):
        return f"no: {decision.reason}"
    if decision.stand_in:
        return f"yes; **not run on a device**: tested on CPUs with a stand-in for {decision.stand_in}"
    return "yes"


def families() -> dict[str, dict[str, Any]]:
    """The decisions, by kind and by name."""
    return runpy.run_path(str(DECISIONS))["FAMILIES"]


if __name__ == "__main__":
    main()
