"""Draw the rooms of the package from its imports: `python docs/site/rooms.py` writes docs/explanation/rooms.svg again."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "explanation" / "rooms.svg"
BASE = [
    "archive",
    "arrays",
    "cells",
    "codec",
    "computed",
    "conditions",
    "documents",
    "domains",
    "errors",
    "html",
    "schema",
    "startup",
    "steps",
    "version",
]
WIDTH, BOX, ROW = 860, 104, 76
STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1b1f24;text-anchor:middle}"
    "rect{fill:#f1f4f8;stroke:#4c555f}"
    "path{fill:none;stroke:#4c555f;stroke-width:1.2;marker-end:url(#a)}"
)
HEAD = (
    '<marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0 8 4 0 8z" style="fill:#4c555f;stroke:none;marker-end:none"/></marker>'
)


def find_imports() -> dict[str, set[str]]:
    """Return which rooms each room imports, without the base, which every room may import."""
    rooms: dict[str, set[str]] = {}
    for file in sorted((ROOT / "dpdask").rglob("*.py")):
        room = file.relative_to(ROOT / "dpdask").parts[0].removesuffix(".py")
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        named = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        found = {match[1] for each in named if (match := re.match(r"dpdask\.(\w+)", each))}
        rooms.setdefault(room, set()).update(found - {room, *BASE})
    return {
        room: found for room, found in rooms.items() if room not in {*BASE, "__init__", "__main__"}
    }


def reduce_arrows(rooms: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out each arrow that a longer path replaces."""

    def reach(room: str) -> set[str]:
        return rooms[room].union(*(reach(other) for other in rooms[room]))

    return {
        room: {each for each in others if not any(each in reach(other) for other in others)}
        for room, others in rooms.items()
    }


def draw() -> str:
    """Return the picture: each room just above the rooms that it imports."""
    arrows = reduce_arrows(find_imports())
    above = {room: [each for each in arrows if room in arrows[each]] for room in arrows}

    def level(room: str) -> int:
        return 1 + max(map(level, arrows[room]), default=-1)

    top = max(map(level, arrows))
    rows: dict[int, list[str]] = {}
    for room in sorted(arrows, key=lambda each: (-level(each), each)):
        rows.setdefault(top - level(room), []).append(room)
    place: dict[str, tuple[float, float]] = {}
    for number, row in rows.items():
        row.sort(
            key=lambda each: sum(place[up][0] for up in above[each]) / max(1, len(above[each]))
        )
        for position, room in enumerate(row):
            place[room] = WIDTH * (position + 0.5) / len(row), 24 + ROW * number
    height = 24 + ROW * len(rows) - 30
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'aria-label="The rooms of the package; arrows point to what is imported">'
        ),
        f"<style>{STYLE}</style>",
        f"<defs>{HEAD}</defs>",
        f'<rect width="{WIDTH}" height="{height}" style="fill:#fff;stroke:none"/>',
    ]
    for room, others in arrows.items():
        for other in sorted(others):
            (x, y), (to_x, to_y) = place[room], place[other]
            middle = (y + 15 + to_y - 15) / 2
            curve = f"M{x:.0f} {y + 15:.0f}C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y - 15:.0f}"
            parts.append(f'<path d="{curve}"/>')
    for room, (x, y) in place.items():
        parts.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y - 15:.0f}" width="{BOX}" height="30" rx="4"/>'
        )
        parts.append(f'<text x="{x:.0f}" y="{y + 5:.0f}">{room}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
