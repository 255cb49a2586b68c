"""Byte diagrams of the formats as SVG, drawn from the format table: a picture can't disagree with the code."""

from pathlib import Path

from kvcore.spec import FORMATS, Format, block_layout

WIDTH = 720
ROW_HEIGHT = 34
COLOURS = {"codes": "#4878a8", "rope": "#6a9e58", "scales": "#c98a3a", "offsets": "#a86a9a", "pad": "#9a9a9a"}
EXAMPLE_DIM = 128
"""Channels shown for formats that take their size from the component."""


def draw_all(folder: Path) -> None:
    """One picture for every built-in format."""
    folder.mkdir(exist_ok=True)
    for name, format in FORMATS.items():
        sized = format if format.dim is not None else format.for_dim(EXAMPLE_DIM)
        (folder / f"{name}.svg").write_text(draw(sized))


def draw(format: Format) -> str:
    """The canonical row above, the planes of a packed page of two rows below."""
    parts = [_caption(f"canonical row: {format.row} bytes", 14)]
    parts += _bar([(field.name, field.nbytes) for field in format.fields], format.row, 22)
    page = block_layout(format, 2, "packed")
    parts.append(_caption(f"packed page of 2 rows: {page.nbytes} bytes", 84))
    spans = []
    for row in range(2):
        spans += [(place.base + row * place.stride, place.nbytes, f"{place.field} {row}") for place in page.places]
    spans.sort()
    used = sum(size for _, size, _ in spans)
    fields = [(label, size) for _, size, label in spans]
    if page.nbytes > used:
        fields.append(("pad", page.nbytes - used))
    parts += _bar(fields, page.nbytes, 92)
    height = 92 + ROW_HEIGHT + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12">{"".join(parts)}</svg>\n'
    )


def _caption(text: str, y: int) -> str:
    return f'<text x="0" y="{y}" fill="#777">{text}</text>'


def _bar(fields: list[tuple[str, int]], total: int, y: int) -> list[str]:
    parts: list[str] = []
    x = 0.0
    for label, size in fields:
        width = size / total * WIDTH
        colour = COLOURS.get(label.split()[0], "#888")
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW_HEIGHT}" fill="{colour}" stroke="#fff">'
            f"<title>{label}: {size} bytes</title></rect>"
        )
        text = f"{label} {size}"
        if width > 7.2 * len(text):
            parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 22}" text-anchor="middle" fill="#fff">{text}</text>')
        x += width
    return parts


if __name__ == "__main__":
    draw_all(Path(__file__).parent / "formats")
