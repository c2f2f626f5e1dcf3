"""`python docs/scripts/pictures.py`: draws the pictures of docs/how-it-works.md, as SVG, in docs/pictures.

On a light card of their own, with text as text, so that they can be read on light and dark pages. The same
script always draws the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[1] / "pictures"

INK, FAINT, CARD, LINE = "#1f2430", "#5b6472", "#fbfbf8", "#c9ccd1"
LOST, BACK, FORWARD, PLAIN = "#b3261e", "#2f5d9b", "#1e7145", "#e4e6ea"
STRIPES = ("#a9c9ee", "#f6cf98", "#b7dfb4", "#dcbfe8")
"""A light colour for each stripe, which also has a letter."""
_ARROW = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>'
)


class Picture:
    """An SVG in the making: shapes in the order in which they are drawn; lengths in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        font = 'font-family="system-ui, sans-serif" font-size="14"'
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>',
            f"<title>{escape(title)}</title>",
            f"<defs>{_ARROW}</defs>",
        ]
        self.box(0.5, 0.5, width - 1, height - 1, CARD, radius=10)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        edge: str = LINE,
        radius: float = 4,
        dashed: bool = False,
    ) -> None:
        """A rectangle."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'stroke="{edge}"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        colour: str = INK,
        size: int = 14,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        """A line of text; y is its baseline."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def line(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        *,
        colour: str = INK,
        arrow: bool = False,
        dashed: bool = False,
        width: float = 1.5,
    ) -> None:
        """A straight line, or an arrow."""
        head = ' marker-end="url(#head)"' if arrow else ""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" '
            f'stroke-width="{width:g}"{dashes}{head}/>'
        )

    def bracket(self, x: float, to_x: float, y: float, words: str, colour: str) -> None:
        """A span under the axis, with what it means."""
        self.line(x, y, to_x, y, colour=colour, width=2)
        self.line(x, y - 6, x, y, colour=colour, width=2)
        self.line(to_x, y - 6, to_x, y, colour=colour, width=2)
        self.text((x + to_x) / 2, y + 19, words, colour=colour, bold=True)

    def svg(self) -> str:
        """All of it."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def placement() -> Picture:
    """Four ranks, code (4, 3): the blocks of each rank, and how a lost block is rebuilt."""
    ranks, k = 4, 3
    picture = Picture(820, 330, "Placement of rows and parity on four ranks with the code (4, 3)")
    picture.text(
        30, 34, "A letter is a stripe: any three of its blocks give the fourth", anchor="start", bold=True
    )
    for rank in range(ranks):
        x = 30 + 112 * rank
        lost = rank == 2
        picture.box(x, 52, 100, 224, "none", edge=LOST if lost else LINE, dashed=lost, radius=6)
        picture.text(x + 50, 74, f"rank {rank}", bold=True, colour=LOST if lost else INK)
        for block in range(k):
            stripe = (rank - 1 - block) % ranks
            picture.box(x + 10, 84 + 46 * block, 80, 38, STRIPES[stripe])
            picture.text(x + 50, 108 + 46 * block, f"{'ABCD'[stripe]}  rows")
        picture.box(x + 10, 84 + 46 * k, 80, 38, STRIPES[rank], edge=INK)
        picture.text(x + 50, 108 + 46 * k, f"{'ABCD'[rank]}  parity", bold=True)
    words = "Each stripe has one block on every rank; its parity is not where its rows are."
    picture.text(30, 304, words, anchor="start", colour=FAINT)
    picture.text(510, 34, "Rank 2 is lost", anchor="start", bold=True, colour=LOST)
    for row, stripe in enumerate((1, 0, 3, 2)):
        y = 84 + 46 * row
        holders = [rank for rank in range(ranks) if rank != 2]
        for place, rank in enumerate(holders):
            kind = "P" if rank == stripe else "rows"
            picture.box(510 + 62 * place, y, 44, 38, STRIPES[stripe], edge=INK if kind == "P" else LINE)
            picture.text(532 + 62 * place, y + 24, f"{'ABCD'[stripe]}{' P' if kind == 'P' else ''}")
            if place:
                picture.text(501 + 62 * place, y + 25, "+", size=16)
        picture.line(690, y + 19, 716, y + 19, arrow=True)
        kind = "parity" if stripe == 2 else "rows"
        picture.box(722, y, 76, 38, STRIPES[stripe], edge=LOST, dashed=True)
        picture.text(760, y + 24, f"{'ABCD'[stripe]}  {kind}")
    picture.text(510, 74, "from the others; + is XOR", anchor="start", colour=FAINT)
    return picture


def step() -> Picture:
    """A step as a transaction: what changes when, and the result of a failure."""
    picture = Picture(820, 360, "A step as a transaction")
    picture.text(
        30, 34, "A step is undone on every rank, or finished on every rank", anchor="start", bold=True
    )
    phases = (
        ("capture, forward,", "backward, optimizer", 250, PLAIN),
        ("exchange", "of deltas", 130, "#cfe0f5"),
        ("agree", "", 110, "#f3e2c4"),
        ("apply", "to parity", 130, "#cde8d3"),
    )
    x, edges = 150.0, [150.0]
    for name, more, width, colour in phases:
        picture.box(x, 50, width, 46, colour)
        picture.text(x + width / 2, 70 if more else 78, name)
        if more:
            picture.text(x + width / 2, 87, more)
        x += width
        edges.append(x)
    _, trained, exchanged, agreed, applied = edges
    middle = (exchanged + agreed) / 2
    lanes = (
        ("row journal", "old rows", 150, applied, PLAIN, 290),
        ("rows", "change in place", 180, trained, "#dbe7f6", 290),
        ("inbox", "incoming deltas", trained + 10, applied, "#dbe7f6", 465),
        ("parity", "changes", agreed, applied, "#cde8d3", 705),
    )
    for number, (name, words, begin, end, colour, at) in enumerate(lanes):
        y = 124 + 34 * number
        picture.text(30, y + 17, name, anchor="start", colour=FAINT)
        picture.box(begin, y, end - begin, 24, colour)
        picture.text(at, y + 17, words, size=13)
    picture.line(exchanged, 104, exchanged, 262, colour=FAINT, dashed=True)
    picture.text(exchanged, 116, "prepared", size=13, colour=FAINT)
    picture.line(applied, 104, applied, 262, colour=FAINT, dashed=True)
    picture.text(applied, 116, "committed", size=13, colour=FAINT)
    picture.line(middle, 96, middle, 330, colour=INK, dashed=True)
    picture.text(middle, 346, "all ranks have prepared", size=13)
    picture.bracket(150, middle - 8, 290, "a failure here: undone on every rank", BACK)
    picture.bracket(middle + 8, 796, 290, "a failure here:", FORWARD)
    picture.text((middle + 804) / 2, 327, "finished on every rank", colour=FORWARD, bold=True)
    return picture


def recovery() -> Picture:
    """Rank 2 dies in step 10 with its memory; four ranks continue from step 10."""
    picture = Picture(820, 300, "A recovery, from the loss of a rank to the next step")
    words = "Rank 2 and its memory are lost in step 10: step 10 alone runs again"
    picture.text(30, 34, words, anchor="start", bold=True)
    top, height = 56, 46
    for rank in range(4):
        y = top + height * rank
        colour = LOST if rank == 2 else INK
        picture.text(30, y + 21, f"rank {rank}", anchor="start", bold=rank == 2, colour=colour)
        for number in (8, 9):
            picture.box(100 + 66 * (number - 8), y, 62, 32, "#cde8d3")
            picture.text(131 + 66 * (number - 8), y + 21, str(number))
        if rank == 2:
            picture.box(232, y, 34, 32, "#f4cfcb", edge=LOST)
            picture.text(249, y + 21, "10", colour=LOST)
            picture.text(282, y + 23, "✕", size=20, colour=LOST, bold=True)
            picture.box(508, y, 96, 32, "#cfe0f5", edge=BACK)
            picture.text(556, y + 21, "rebuilt", colour=BACK, bold=True)
        else:
            picture.box(232, y, 62, 32, PLAIN)
            picture.text(263, y + 21, "10", colour=FAINT)
            picture.box(416, y, 88, 32, "#f3e2c4")
            picture.text(460, y + 21, "10 undone", size=13)
            picture.line(508, y + 16, 602, y + 16, colour=BACK, dashed=True)
        picture.box(300, y, 112, 32, "none", dashed=True)
        picture.text(356, y + 21, "restart", size=13, colour=FAINT)
        for number in (10, 11, 12):
            picture.box(610 + 66 * (number - 10), y, 62, 32, "#cde8d3")
            picture.text(641 + 66 * (number - 10), y + 21, str(number))
    picture.text(356, 262, "torchrun starts", size=13, colour=FAINT)
    picture.text(356, 279, "all ranks again", size=13, colour=FAINT)
    picture.text(452, 262, "from the", size=13, colour=FAINT)
    picture.text(452, 279, "journals", size=13, colour=FAINT)
    picture.text(558, 262, "from the", size=13, colour=FAINT)
    picture.text(558, 279, "other blocks", size=13, colour=FAINT)
    picture.text(706, 262, "nothing else runs again", size=13, colour=FAINT)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "placement.svg": placement,
    "step.svg": step,
    "recovery.svg": recovery,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
