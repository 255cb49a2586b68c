"""Read what a cache exported or saved, without kvcore: NumPy and the standard library are enough.

python examples/read_portable.py FILE     checks every byte of a blob or a snapshot, and prints what it holds

The form is specified in docs/portable_format.md; the names of the functions are those of its sections.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

try:
    import xxhash
except ModuleNotFoundError:
    xxhash = None  # pages that are verified by it are then read unverified, and it is said

MAGIC = b"kvcore\x00\x02"
HEAD_BYTES = 48
ALIGNMENT = 64
HASHES: dict[str, Callable[[bytes], str] | None] = {
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "xxh3_128": xxhash and xxhash.xxh3_128_hexdigest,
}


class Damaged(ValueError):
    """Bytes that are not what was written."""


class Request(NamedTuple):
    """One request: its manifest, and its pages as uint8 [pages, page_bytes]."""

    manifest: dict[str, Any]
    pages: np.ndarray


class Rows(NamedTuple):
    """One component's rows in one section: canonical bytes [n, row_bytes] and the position of each."""

    section: str
    layer: int
    role: str
    positions: np.ndarray
    rows: np.ndarray
    component: dict[str, Any]


def need(right: bool, what: str) -> None:
    if not right:
        raise Damaged(what)


def head(data: bytes) -> tuple[dict[str, Any], str, int]:
    """(the JSON, its root, where the rest begins) of a blob or a snapshot."""
    need(data[:8] == MAGIC, "not the portable form of version 2")
    end = HEAD_BYTES + int.from_bytes(data[8:16], "little")
    start = -(-end // ALIGNMENT) * ALIGNMENT
    need(len(data) >= start and not any(data[end:start]), "cut, or something between the JSON and the pages")
    text, root = data[HEAD_BYTES:end], data[16:HEAD_BYTES]
    need(hashlib.sha256(text).digest() == root, "the JSON does not match its root")
    return json.loads(text), root.hex(), start


def read_blob(data: bytes) -> Request:
    """A blob, every byte of it checked."""
    manifest, _, start = head(data)
    need((manifest["form"], manifest["version"]) == ("kvcore.request", 2), "another form")
    need(manifest["digest"] in HASHES, "digests that only kvcore works out")
    count, size = manifest["pages"], manifest["page_bytes"]
    need(len(data) == start + count * size, "other pages than the manifest says")
    request = Request(manifest, np.frombuffer(data, np.uint8, offset=start).reshape(count, size))
    hashed = HASHES[manifest["digest"]]
    for name, piece, digest in zip(*pieces(request), manifest["digests"], strict=True):
        need(hashed is None or hashed(piece) == digest, f"{name} does not match its digest")
    return request


def read_snapshot(data: bytes) -> tuple[dict[str, Any], list[Request]]:
    """(directory, requests) of a snapshot, every byte of it checked."""
    directory, _, start = head(data)
    need((directory["form"], directory["version"]) == ("kvcore.snapshot", 2), "another form")
    requests, end = [], start
    for entry in directory["requests"]:
        need(start + entry["offset"] == end, "a gap between two requests")
        blob = data[end : end + entry["bytes"]]
        need(head(blob)[1] == entry["root"], "a request of another root than the directory says")
        requests.append(read_blob(blob))
        last, end = end + entry["bytes"], end + -(-entry["bytes"] // ALIGNMENT) * ALIGNMENT
        need(not any(data[last:end]), "something between two requests")
    need(end == len(data), "something after the last request")
    return directory, requests


def pieces(request: Request) -> tuple[list[str], list[bytes]]:
    """Names and bytes of what has a digest: every page of history, then each other section as a whole."""
    names, found = [], []
    for section in request.manifest["layout"]["sections"]:
        pages = request.pages[section["first"] : section["first"] + section["pages"]]
        if section["name"] == "history":
            names += [f"page {number}" for number in range(len(pages))]
            found += [page.tobytes() for page in pages]
        else:
            names.append(section["name"])
            found.append(pages.tobytes())
    return names, found


def rows(request: Request) -> Iterator[Rows]:
    """The rows of every component in every section."""
    layout = request.manifest["layout"]
    components = {(one["layer"], one["role"]): one for one in layout["components"]}
    for section in layout["sections"]:
        pages = request.pages[section["first"] : section["first"] + section["pages"]]
        if section["name"] != "history":
            pages = pages.reshape(1, -1)  # one record, cut into pages
        for strip in section["strips"]:
            component = components[strip["layer"], strip["role"]]
            width = component["row_bytes"]
            held = pages[:, strip["start"] : strip["start"] + strip["rows"] * width].reshape(-1, width)
            numbers = [number for first, end in strip["numbers"] for number in range(first, end)]
            positions = np.array(numbers, np.int64) * component["tokens_per_row"]
            yield Rows(section["name"], strip["layer"], strip["role"], positions, held[: len(numbers)], component)


def small_floats(bits: int, exponent: int, bias: int, nan: tuple[int, ...] = ()) -> np.ndarray:
    """The values of all codes of a float of few bits without infinities."""
    codes = np.arange(1 << bits)
    mantissa = bits - 1 - exponent
    sign = np.where(codes >> (bits - 1), -1.0, 1.0)
    power = (codes >> mantissa) & ((1 << exponent) - 1)
    fraction = (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    values = np.where(power == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (power - bias))
    values = sign * values
    values[list(nan)] = np.nan
    return values.astype(np.float32)


E4M3 = small_floats(8, 4, 7, nan=(0x7F, 0xFF))
E2M1 = small_floats(4, 2, 1)
# fmt: off
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)
# fmt: on
LEVELS = {"e2m1": E2M1, "nf4": NF4, "uint4": np.arange(16, dtype=np.float32)}


def elements(code: str, data: np.ndarray) -> np.ndarray:
    """Bytes [..., n] of a field as fp32 [..., dims]."""
    data = np.ascontiguousarray(data)
    if code in LEVELS:
        nibbles = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
        return LEVELS[code][nibbles]
    if code == "bf16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if code == "e8m0":
        # 2^(code - 127) by its bits: as an exponent of fp32, which has none for code 0.
        return np.where(data == 0, np.float32(2.0**-127), (data.astype(np.uint32) << 23).view(np.float32))
    if code == "e4m3":
        return E4M3[data]
    return data.view({"fp32": "<f4", "fp16": "<f2", "int8": "i1"}[code]).astype(np.float32)


BITS = {"fp32": 32, "bf16": 16, "fp16": 16, **dict.fromkeys(LEVELS, 4)}
"""Of an element; all other codes have 8."""


def values(found: Rows) -> dict[str, np.ndarray]:
    """Rows decoded: part -> fp32 [n, heads, channels], of keys and values coded over tokens [n x tokens, ...].

    What a format rotated before it was stored stays rotated.
    """
    decoded, start = {}, 0
    for part in found.component["parts"]:
        sizes = [-(-field["dims"] * BITS.get(field["code"], 8) // 8) for field in part["fields"]]
        width = part["heads"] * sum(sizes)
        held = found.rows[:, start : start + width].reshape(len(found.rows), part["heads"], sum(sizes))
        start += width
        fields, at = {}, 0
        for field, size in zip(part["fields"], sizes, strict=True):
            fields[field["name"]] = held[..., at : at + size]
            at += size
        channels = []
        for field in part["fields"]:
            if field["name"] in ("scales", "offsets", "pad"):
                continue
            plain = elements(field["code"], fields[field["name"]])[..., : field["dims"]]
            if field["group"] is not None:
                scales = elements(field["scale"], fields["scales"])
                plain = plain * np.repeat(scales, field["group"], axis=-1)[..., : field["dims"]]
                if "offsets" in fields:
                    offsets = elements(field["scale"], fields["offsets"])
                    plain = plain + np.repeat(offsets, field["group"], axis=-1)[..., : field["dims"]]
                for scale in (found.component["global_scale"], part.get("global_scale")):
                    plain = plain if scale is None else plain * np.float32(scale)
            channels.append(plain)
        tokens = found.component["tokens_per_row"] if found.role == "kv" else 1
        decoded[part["name"]] = by_token(np.concatenate(channels, axis=-1), part["format"], tokens)
    return decoded


def by_token(held: np.ndarray, format: str, tokens: int) -> np.ndarray:
    """Rows [n, heads, tokens x channels] as [n x tokens, heads, channels]."""
    count, heads, both = held.shape
    if format.startswith("int4_ch"):  # all tokens of a channel, then of the next
        held = held.reshape(count, heads, both // tokens, tokens).swapaxes(2, 3)
    held = held.reshape(count, heads, tokens, both // tokens)
    return held.swapaxes(1, 2).reshape(count * tokens, heads, both // tokens)


def describe(request: Request) -> Iterator[str]:
    """Lines for people."""
    said = request.manifest["request"]
    ids = "unknown" if said["tokens"] is None else " ".join(map(str, said["tokens"][:8]))
    yield f"{said['length']} tokens (ids: {ids} …), can be rolled back to {said['floor']}"
    verified = "all as written" if HASHES[request.manifest["digest"]] else "not verified: that needs the package xxhash"
    yield f"{request.manifest['pages']} pages of {request.manifest['page_bytes']} bytes, {verified}"
    for found in rows(request):
        if len(found.rows):
            shapes = ", ".join(f"{name or 'rows'} {part.shape}" for name, part in values(found).items())
            span = f"{found.positions[0]} to {found.positions[-1]}"
            yield f"  {found.section}: layer {found.layer} {found.role}, positions {span}: {shapes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    data = parser.parse_args().file.read_bytes()
    requests = [read_blob(data)] if head(data)[0]["form"] == "kvcore.request" else read_snapshot(data)[1]
    for number, request in enumerate(requests):
        print(f"request {number}:", *describe(request), sep="\n  ")


if __name__ == "__main__":
    main()
