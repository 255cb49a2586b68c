"""The landing page's picture as SVG: the way that data takes, from a spec to a model's calls, and where requests go."""

from pathlib import Path

STATIONS = (
    ("spec", "what a layer holds"),
    ("plan", "how many bytes"),
    ("pools", "where they lie"),
    ("verbs", "NumPy, torch, JAX"),
    ("step", "tokens of now"),
    ("layer", "what a model calls"),
)
AROUND = (
    ("requests", "slots, blocks, prefixes", 2, 4),
    ("portable form", "files, blobs, transfers", 4, 6),
    ("conformance kit", "every verb beside the reference", 0, 2),
)
WIDTH, HEIGHT, GAP, TOP, BELOW = 112, 58, 14, 12, 116


def draw(file: Path) -> None:
    """Boxes from left to right, and below what belongs to several of them."""
    step = WIDTH + GAP
    parts = [_box(at * step, TOP, WIDTH, name, text, "#4878a8") for at, (name, text) in enumerate(STATIONS)]
    parts += [_arrow(at * step + WIDTH, at * step + step) for at in range(len(STATIONS) - 1)]
    for name, text, first, end in AROUND:
        x, width = first * step, (end - first) * step - GAP
        parts.append(_box(x, BELOW, width, name, text, "#6a9e58"))
        parts.append(_line(x + width / 2, TOP + HEIGHT, BELOW))
    total, height = len(STATIONS) * step - GAP, BELOW + HEIGHT + 4
    label = "Data goes from the spec over plan, pools, verbs and step to the layer that a model calls."
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" role="img" aria-label="{label}" '
        f'font-family="sans-serif">{"".join(parts)}</svg>\n',
        encoding="utf-8",
    )


def _box(x: float, y: float, width: float, name: str, text: str, colour: str) -> str:
    middle = f'x="{x + width / 2}" text-anchor="middle" fill="#fff"'
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6" fill="{colour}"/>'
        f'<text {middle} y="{y + 25}" font-size="15" font-weight="bold">{name}</text>'
        f'<text {middle} y="{y + 44}" font-size="11">{text}</text>'
    )


def _arrow(x: float, end: float) -> str:
    y = TOP + HEIGHT / 2
    return f'<path d="M{x + 1} {y}H{end - 2}m-5 -4l5 4l-5 4" fill="none" stroke="#888" stroke-width="1.5"/>'


def _line(x: float, y: float, end: float) -> str:
    return f'<path d="M{x} {y + 2}V{end - 2}" fill="none" stroke="#888" stroke-dasharray="3 3"/>'
