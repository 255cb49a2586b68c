"""Every causal model type of transformers on a ``KVCache``, tiny and random, way by way: its own cache's tokens?

``python -m benchmarks.families [--types NAME ...] [--json FILE] [--page FILE]``. For each type a spec is asked for, and
each way of generating is run twice: with the cache that the model makes by itself, and with ours. A way *works* if both
give the same tokens; it is *refused* if ours raises one of the library's errors; it is *not the model's* if the model
with its own cache fails as well. What is left would be *other tokens* and *untyped errors*.

Quantised rows have no counterpart among the model's caches. There every layer of the own cache is given rows that were
encoded and decoded by the reference, so that both hold the same numbers.
"""

import argparse
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache

from benchmarks import family_models
from benchmarks.written import write
from kvcore import environment
from kvcore.backends.reference.encoding import decode, encode
from kvcore.errors import KvcoreError
from kvcore.interop.transformers import KVCache, cache_spec
from kvcore.spec import CacheSpec, from_hf_config

NEW = 8  # tokens that are generated
ROWS = "int8_row"
STATES = "bf16"
WORKS, REFUSED, NOT_OURS, OTHER, UNTYPED = "works", "refused", "not the model's", "other tokens", "untyped error"
NO_SPEC, NO_MODEL = "no spec", "no tiny model"


def generated(model: Any, ids: torch.Tensor, cache: Any = None, mask: Any = None, **options: Any) -> torch.Tensor:
    """Tokens that follow, greedily unless told otherwise."""
    options = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0} | options
    mask = torch.ones_like(ids) if mask is None else mask
    if cache is not None:
        options["cache"] = cache
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, **options)


Made = Callable[..., Any]
"""Settings of a KVCache -> a cache of ours, or None: the model makes its own."""


def greedy(model: Any, made: Made) -> Any:
    """One row."""
    return generated(model, family_models.token_ids(1, 9), made())


def padded(model: Any, made: Made) -> Any:
    """Two rows, the first of them padded on the left."""
    ids = family_models.token_ids(2, 9)
    mask = torch.ones_like(ids)
    ids[0, :3] = mask[0, :3] = 0
    return generated(model, ids, made(batch=2), mask)


def beams(model: Any, made: Made) -> Any:
    """Three beams of two rows."""
    return generated(model, family_models.token_ids(2, 9), made(batch=2, beams=3), num_beams=3)


def one_token(model: Any, made: Made) -> Any:
    """A prompt of one token."""
    return generated(model, family_models.token_ids(1, 1), made())


def long_prompt(model: Any, made: Made) -> Any:
    """A prompt of more tokens than any window."""
    return generated(model, family_models.token_ids(1, 4 * family_models.WINDOW + 1), made())


def chat(model: Any, made: Made) -> Any:
    """Three turns on the same cache."""
    ids, cache = family_models.token_ids(1, 19), made() or DynamicCache(config=model.config)
    said = ids[:, :0]
    for turn in (ids[:, :9], ids[:, 9:12], ids[:, 12:]):
        said = generated(model, torch.cat([said, turn], dim=1), cache)
    return said


def lookup(model: Any, made: Made) -> Any:
    """Drafts looked up in the prompt, of which some are taken back."""
    ids = family_models.token_ids(1, 5).repeat(1, 3)
    return generated(model, ids, made(max_draft_tokens=4), prompt_lookup_num_tokens=3)


def static(model: Any, made: Made) -> Any:
    """Shapes that do not depend on the number of tokens, not compiled."""
    return generated(model, family_models.token_ids(1, 9), made(static=True))


def quantised(model: Any, made: Made) -> Any:
    """Rows in 8 bits, and states in bf16; the own cache is given what they are decoded to."""
    ids = family_models.token_ids(1, 9)
    spec = cache_spec(model.config, default="fp32")
    formats = {name: ROWS for _, role, _ in spec.components() for name in ROLES.get(role, ())}
    formats |= {"state": STATES} if any(layer.state for layer in spec.layers) else {}
    if ours := made(formats=formats, attention="model"):
        return generated(model, ids, ours)
    cache = DynamicCache(config=model.config)
    with rounding(model, cache, spec):
        return generated(model, ids, cache)


ROLES = {"kv": ("key", "value"), "entries": ("entries",), "window": ("window",), "index_keys": ("index_keys",)}
WAYS: dict[str, Callable[[Any, Made], Any]] = {
    "greedy": greedy,
    "left-padded": padded,
    "beams": beams,
    "one token": one_token,
    "long prompt": long_prompt,
    "chat": chat,
    "look-up": lookup,
    "static": static,
    "quantised": quantised,
}


@contextmanager
def rounding(model: Any, cache: DynamicCache, spec: CacheSpec) -> Iterator[None]:
    """Give the model's own cache rows as ``ROWS`` holds them, and states as ``STATES`` does."""
    update, update_indexer = cache.update, cache.update_indexer

    def rounded_update(keys: torch.Tensor, values: torch.Tensor, layer: int, **options: Any) -> Any:
        if spec.layers[layer].kv is not None:
            keys, values = rounded(keys), rounded(values)
        elif spec.layers[layer].window is not None:
            keys = values = rounded(keys)
        else:
            rows = rounded(torch.cat([keys, values], dim=-1))
            keys, values = rows[..., : keys.shape[-1]], rows[..., keys.shape[-1] :]
        return update(keys, values, layer, **options)

    def round_states(*_: Any) -> None:
        for layer in cache.layers:
            for states in getattr(layer, "recurrent_states", {}).values():
                if states is not None:
                    states.copy_(states.bfloat16())

    cache.update = rounded_update
    cache.update_indexer = lambda keys, *options: update_indexer(rounded(keys), *options)
    for layer in cache.layers:
        if hasattr(layer, "update_compressor_states"):
            _round_entries(layer)
    hook = model.register_forward_hook(round_states)
    try:
        yield
    finally:
        hook.remove()


def _round_entries(layer: Any) -> None:
    update = layer.update_compressor_states
    layer.update_compressor_states = lambda name, entries: update(name, rounded(entries))


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., dim] as they are decoded."""
    values = rows.reshape(-1, rows.shape[-1]).float().numpy()
    if not len(values):
        return rows
    found = decode(ROWS, encode(ROWS, values), values.shape[-1])
    return torch.from_numpy(np.asarray(found, np.float32)).reshape(rows.shape).to(rows.dtype)


def tried(model: Any, way: Callable[[Any, Made], Any]) -> dict[str, str]:
    """How a way of generating goes."""
    caches = []

    def ours(**settings: Any) -> KVCache:
        caches.append(KVCache(model, **{"batch": 1, "max_length": 128} | settings))
        return caches[-1]

    own = _outcome(way, model, lambda **_: None)
    found = _outcome(way, model, ours)
    if isinstance(own, Exception):
        return {"found": NOT_OURS, "why": said(own)} if isinstance(found, Exception) else {
            "found": OTHER, "why": f"ours gives tokens, its own cache {said(own)}"
        }  # fmt: skip
    if isinstance(found, KvcoreError):
        return {"found": REFUSED, "why": f"{found.where}: {found.got}"}
    if isinstance(found, Exception):
        return {"found": UNTYPED, "why": said(found)}
    if not torch.equal(own, found):
        return {"found": OTHER, "why": f"{own.tolist()} and {found.tolist()}"}
    if not caches[-1].length:
        return {"found": OTHER, "why": "the model left the cache empty"}
    return {"found": WORKS}


def _outcome(way: Callable[[Any, Made], Any], model: Any, made: Made) -> Any:
    try:
        return way(model, made)
    except Exception as error:  # noqa: BLE001 - whatever a model raises is what is reported
        return error


def said(error: Exception) -> str:
    """An error in one line, without what differs from run to run."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+', '', lines[0])[:160]}"


def row(kind: str, ways: dict[str, Callable[[Any, Made], Any]] = WAYS) -> dict[str, Any]:
    """What is found of a model type."""
    model, why = None, ""
    try:
        model = family_models.make(kind)
        config = model.config
    except Exception as error:  # noqa: BLE001 - whatever keeps a model from being tiny
        why = said(error)
        config = _default(kind)
    if config is None:
        return {"type": kind, "spec": NO_MODEL, "why": why}
    try:
        from_hf_config(config)
    except KvcoreError as error:
        return {"type": kind, "spec": REFUSED, "why": f"{error.where}: {error.got}"}
    if model is None:
        return {"type": kind, "spec": WORKS, "why": why, "ways": {}}
    return {"type": kind, "spec": WORKS, "ways": {name: tried(model, way) for name, way in ways.items()}}


def _default(kind: str) -> Any:
    try:
        return family_models.CONFIG_MAPPING[kind]()
    except Exception:  # noqa: BLE001 - a class that has no configuration by default
        return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="*", default=family_models.TYPES, metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the record here; rows of other types stay")
    parser.add_argument("--page", type=Path, help="write the table here")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for kind in given.types:
        rows.append(row(kind))
        print(summary(rows[-1]), flush=True)
    old: dict[str, Any] = {"runs": [], "types": []}
    if given.json and given.json.exists():
        old = json.loads(given.json.read_text())
    kept = [found for found in old["types"] if found["type"] not in given.types]
    runs = [*old["runs"], {**environment.of_script(), "types": len(rows)}]
    record = {"runs": runs, "types": sorted([*kept, *rows], key=lambda found: found["type"])}
    write(record, given.json)
    if given.page:
        given.page.write_text(page(record))
    counts = Counter(way["found"] for found in rows for way in found.get("ways", {}).values())
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    return int(bool(counts[OTHER] or counts[UNTYPED]))


PAGE = """# Models of transformers

Every causal model type of transformers {version}, tiny and random, on a `KVCache`. A tick: the tokens that the model
gives with its own cache. A letter: the reason below the table; what is *refused* ends in a typed error, what is *not
the model's* fails with its own cache as well. Of {types} types {specs} have a spec and {models} of these were run,
{whole} of them without a refusal but for fixed shapes. Other tokens: {other}. Untyped errors: {untyped}.

*Greedy*: one row. *Padded*: two rows, one padded on the left. *Beams*: three of two rows. *One token*: a prompt of one.
*Long*: a prompt of 33 tokens, where windows are of 8. *Chat*: three turns on one cache. *Look-up*: drafts from the
prompt. *Static*: `static=True`, not compiled. *Quantised*: rows in `int8_row`, states in `bf16`, beside the model's own
cache given the same rounded numbers.

Made by `python -m benchmarks.families --json records/families.json --page docs/families.md`.

"""
HEADS = ("greedy", "padded", "beams", "one token", "long", "chat", "look-up", "static", "quantised")


def page(record: dict[str, Any]) -> str:
    """The table, as Markdown."""
    letters: dict[str, str] = {}

    def letter(why: str) -> str:
        return letters.setdefault(why, _letter(len(letters)))

    lines = []
    for found in record["types"]:
        ways = found.get("ways")
        if ways:
            cells = ["✓" if way["found"] == WORKS else letter(_reason(way)) for way in ways.values()]
            lines.append(f"| `{found['type']}` | ✓ | {' | '.join(cells)} |")
        else:
            has = "✓" if found["spec"] == WORKS else ""
            why = letter(_reason({"found": found["spec"] if not has else NO_MODEL, "why": found["why"]}))
            cells = [why if has else ""] * len(WAYS)
            lines.append(f"| `{found['type']}` | {has or why} | {' | '.join(cells)} |")
    said = {found["type"]: found.get("ways", {}).values() for found in record["types"] if found["spec"] == WORKS}
    whole = [ways for ways in said.values() if ways and all(_is_whole(name, way) for name, way in _named(ways))]
    counts = Counter(way["found"] for ways in said.values() for way in ways)
    head = PAGE.format(
        other=counts[OTHER],
        untyped=counts[UNTYPED],
        version=record["runs"][-1]["versions"]["transformers"],
        types=len(record["types"]),
        specs=len(said),
        models=sum(bool(ways) for ways in said.values()),
        whole=len(whole),
    )
    table = [f"| type | spec | {' | '.join(HEADS)} |", f"|---|{':-:|' * (len(HEADS) + 1)}", *lines]
    notes = [f"- **{letter}** {why}" for why, letter in letters.items()]
    return head + "\n".join([*table, "", *notes]) + "\n"


def _named(ways: Any) -> list[tuple[str, dict[str, str]]]:
    return list(zip(WAYS, ways, strict=True))


def _is_whole(name: str, way: dict[str, str]) -> bool:
    return way["found"] in (WORKS, NOT_OURS) or (name == "static" and way["found"] == REFUSED)


def _letter(number: int) -> str:
    return (chr(ord("a") + number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


def _reason(way: dict[str, str]) -> str:
    """Why, without what differs from model to model."""
    why = re.sub(r"such as \w+", "such as this one", way["why"]).replace("|", "/")
    why = re.sub(r"^layers\[\d+\]: static=True", "layers of this kind have no fixed shapes", why)
    why = re.sub(r"^KVCache: static=True", "the model's class says that it is not for fixed shapes", why)
    why = re.sub(r"\b\d{4,} parameters", "too many parameters", why)
    return f"{way['found']}: {why}"


def summary(found: dict[str, Any]) -> str:
    """A row in a line."""
    if "why" in found:
        return f"{found['type']}: {found['spec']}; {found['why']}"
    ways = found["ways"]
    if all(way["found"] == WORKS for way in ways.values()):
        return f"{found['type']}: works"
    return f"{found['type']}: " + "; ".join(
        f"{name} {way['found']} ({way['why']})" for name, way in ways.items() if way["found"] != WORKS
    )


if __name__ == "__main__":
    raise SystemExit(main())
