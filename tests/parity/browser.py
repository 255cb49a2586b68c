"""Opening a report in a headless Chromium: ``python tests/parity/browser.py PAGE [PICTURE]``. Needs nothing but Python.

Without a Chromium the page is still read, and must load nothing from elsewhere.
"""

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from html.parser import HTMLParser
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")
SECONDS = 120
WIDTHS = (390, 820, 1280)
"""Of a phone, a tablet and a desk, in CSS pixels."""
LOADING = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "object": ("data",),
    "source": ("src", "srcset"),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
"""Attributes by which an element fetches something."""


class Loads(HTMLParser):
    """Collects what a page would fetch, and the names that its links lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.scripts = 0

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.scripts += tag == "script"
        self.fetched += [given[name] for name in LOADING.get(tag, ()) if given.get(name)]
        if tag == "a" and given.get("href"):
            self.links.add(given["href"])
        if given.get("id"):
            self.ids.add(given["id"])


def faults(text: str) -> list[str]:
    """Why a page is not complete in itself; empty if it is."""
    page = Loads()
    page.feed(text)
    found = [f"fetches {what}" for what in page.fetched if not what.startswith("data:")]
    found += [f"style fetches {what}" for what in re.findall(r"@import[^;]*|url\((?!['\"]?data:)[^)]*\)", text)]
    found += [
        f"link to {link} leads nowhere" for link in page.links if link.startswith("#") and link[1:] not in page.ids
    ]
    return found + ["has a script"] * bool(page.scripts)


def chromium() -> str | None:
    """A Chromium on PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def picture(page: Path, out: Path, *, dark: bool = False) -> bytes:
    """Open a page, take a picture of it; the picture's pixels as PNG keeps them."""
    program = chromium()
    assert program is not None
    line = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1600"]
    with tempfile.TemporaryDirectory() as profile:
        line += [f"--user-data-dir={profile}", f"--screenshot={out}", *["--force-dark-mode"] * dark]
        subprocess.run([*line, page.absolute().as_uri()], check=True, capture_output=True, timeout=SECONDS)
    return pixels(out.read_bytes())


def layout(text: str, widths: tuple[int, ...] = WIDTHS) -> list[str]:
    """What is wrong with a page at some widths: it is wider than the window, or a table's head scrolls away.

    The page has no script of its own, so it is measured from outside, as the content of frames.
    """
    program = chromium()
    assert program is not None
    frames = [
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(text)}"></iframe>'
        for width in widths
    ]
    measure = """<script>addEventListener("load", () => {
      const found = [...document.querySelectorAll("iframe")].map(frame => {
        const page = frame.contentDocument, table = page.querySelector(".tall");
        const wide = page.documentElement.scrollWidth;
        if (!table) return [wide, 0, 0];
        table.scrollTop = table.scrollHeight;
        table.scrollLeft = table.scrollWidth;
        const box = table.getBoundingClientRect();
        const head = table.querySelector("thead th").getBoundingClientRect();
        return [wide, head.top - box.top, head.left - box.left];
      });
      document.body.innerHTML = `<pre>${JSON.stringify(found)}</pre>`;
    });</script>"""
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder) / "outer.html"
        outer.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{''.join(frames)}{measure}", encoding="utf-8")
        line = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder}/profile",
            "--dump-dom",
        ]
        done = subprocess.run([*line, outer.as_uri()], check=True, capture_output=True, text=True, timeout=SECONDS)
    shown = re.search(r"<pre>(.*?)</pre>", done.stdout)
    assert shown, "the frames did not load"
    found = []
    for width, (wide, top, left) in zip(widths, json.loads(shown[1]), strict=True):
        found += [f"{wide} pixels wide in a window of {width}"] * (wide > width)
        found += [f"the table's head scrolls away at {width} pixels"] * (abs(top) > 2 or abs(left) > 2)
    return found


def pixels(png: bytes) -> bytes:
    """The filtered rows of a PNG file, unpacked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    data, place = b"", 8
    while place < len(png):
        size = int.from_bytes(png[place : place + 4], "big")
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + size]
        place += size + 12
    return zlib.decompress(data)


def is_blank(rows: bytes) -> bool:
    """True of a page without text: next to no byte differs from the one before it."""
    return len(rows) - max(rows.count(byte) for byte in set(rows)) < len(rows) // 200


def main() -> int:
    page = Path(sys.argv[1])
    found = faults(page.read_text(encoding="utf-8"))
    if chromium() is None:
        print("no Chromium on PATH: the page was read, not opened")
    else:
        out = Path(sys.argv[2]) if len(sys.argv) > 2 else page.with_suffix(".png")
        for dark, path in ((False, out), (True, out.with_stem(f"{out.stem}-dark"))):
            if is_blank(picture(page, path, dark=dark)):
                found.append(f"{path.name} is blank")
            print(f"picture: {path}")
        found += layout(page.read_text(encoding="utf-8"))
    for fault in found:
        print(f"{page.name}: {fault}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
