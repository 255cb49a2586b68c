"""A record as a table, as JSON, and as a picture: time against the floor."""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from kvcore.portable.disk import Disk, write_whole

COLUMNS = ("graph_us", "single_us", "floor_us", "copy_us", "goal_here_us", "goal_us", "best_peer_us")
HEADS = ("graph µs", "single µs", "floor µs", "copy µs", "goal here", "goal µs", "best peer µs")


def as_table(record: dict[str, Any]) -> str:
    """The rows, with the ceilings above them."""
    width = max(len(row["name"]) for row in record["rows"]) if record["rows"] else 4
    ceilings = ", ".join(f"{name} {value:,.0f}" for name, value in record["ceilings"].items() if name.endswith("gb_s"))
    lines = [
        f"{record['device']}; {ceilings}; goals and peers at {record['goals_measured_at']['copy_gb_s']:,.0f} GB/s",
        f"{'':{width}} " + " ".join(f"{head:>12}" for head in HEADS),
    ]
    lines += [
        f"{row['name']:{width}} " + " ".join(f"{_cell(row[column]):>12}" for column in COLUMNS)
        for row in record["rows"]
    ]
    lines += [f"{row['name']}: {row['why']}" for row in record["rows"] if row.get("why")]
    return "\n".join(lines)


def write_json(record: dict[str, Any], path: str) -> None:
    """The record as it is."""
    write_whole(Disk(), Path(path), (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def as_svg(record: dict[str, Any]) -> str:
    """Bars of graph time as multiples of the floor, one a row; a line at the floor itself."""
    left, bar, step, top = 330, 420, 22, 48
    largest = max((row["graph_us"] / max(row["floor_us"], 0.01) for row in record["rows"]), default=1.0)
    scale = bar / min(largest, 6.0)
    height = top + step * len(record["rows"]) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + bar + 160}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="8" y="18" font-size="14">{escape(record["device"])}: time against the floor '
        f"({record['ceilings']['copy_gb_s']:,.0f} GB/s copy)</text>",
    ]
    for number, row in enumerate(record["rows"]):
        y = top + step * number
        ratio = row["graph_us"] / max(row["floor_us"], 0.01)
        shown = min(ratio, 6.0) * scale
        parts += [
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(row["name"])}</text>',
            f'<rect x="{left}" y="{y}" width="{shown:.1f}" height="16" fill="#4878a8"/>',
            f'<text x="{left + shown + 6:.1f}" y="{y + 13}">{row["graph_us"]:.1f} µs, {ratio:.2f}×</text>',
        ]
    parts += [
        f'<line x1="{left + scale:.1f}" y1="{top - 8}" x2="{left + scale:.1f}" y2="{height - 8}" '
        'stroke="#c04040" stroke-dasharray="4 3"/>',
        f'<text x="{left + scale:.1f}" y="{top - 12}" text-anchor="middle" fill="#c04040">floor</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f}" if value < 1 else f"{value:,.1f}"
