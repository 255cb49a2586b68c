"""An engine that owns memory: it allots blocks, pages, slots and rings, moves what it may, and takes all of it back.

What nobody has holds ``NOTHING``: an adopted cache that writes where no request lies is seen.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kvcore.adoption import IndexMap
from kvcore.spec import KV, CacheSpec, Conv, Entries, LayerSpec, State, Tail, Window

PAGE, PLACES, NUMBERS, SLOTS, RINGS, TABLED, WINDOW = 8, 14, 30, 6, 9, 48, 11
NOTHING = 0x55

HEADS: dict[str, Any] = {"key_heads": 2, "key_dim": 4, "key_format": "fp32"}
FULL, SLIDING = LayerSpec(kv=KV(**HEADS)), LayerSpec(kv=KV(**HEADS, window=WINDOW, storage="ring"))
COMPRESSED = LayerSpec(tail=Tail(dim=4, ratio=4, overlap=True), entries=Entries(dim=4, ratio=4, format="fp32"))
RECURRENT = LayerSpec(state=State(heads=2, key_dim=3, value_dim=4), conv=Conv(dim=5, width=4))
BOTH, LATENT = "NL_X_NB_TWO_BS_NH_HS", "NL_X_NB_BS_HS"

SLOT = IndexMap(name="slots", of="slot", count=SLOTS, first=1)


class Kind(NamedTuple):
    """An engine's way: ``where`` says for every component what its rows lie in, as ``Owner`` allots it."""

    spec: CacheSpec
    layout: dict[str, str]
    where: tuple[str, ...]
    maps: tuple[IndexMap, ...] = ()


LAYERS = [LayerSpec(window=Window(dim=4, window=6, format="fp32")), COMPRESSED]
ROLES = "window", "tail"


def _latent(word: str, where: str) -> Kind:
    layout = {"entries": LATENT} | dict.fromkeys(ROLES, f"{word} {LATENT}")
    return Kind(CacheSpec(layers=LAYERS, block_tokens=PAGE), layout, (where, where, "block"))


KINDS = {
    "windows by tokens": Kind(
        CacheSpec(layers=[FULL, SLIDING], block_tokens=PAGE),
        {"0.kv": BOTH, "1.kv": f"pages windows {BOTH}"},
        ("block", "window"),
        (IndexMap(name="windows", of="token", count=NUMBERS * PAGE, page=PAGE, first=PAGE, aligned=True),),
    ),
    "all that moves": Kind(
        CacheSpec(layers=[FULL, SLIDING, RECURRENT, COMPRESSED], block_tokens=PAGE),
        {
            "0.kv": f"blocks blocks {BOTH}",
            "1.kv": f"pages windows {BOTH}",
            "state": "rings slots NL_X_NB_BS_NH_HS",
            "conv": "rings slots NL_X_NB_HS_BS",
            "tail": f"rings slots {LATENT}",
            "entries": f"blocks blocks {LATENT}",
        },
        ("block", "window", "place", "place", "place", "block"),
        (
            IndexMap(name="blocks", of="block", count=NUMBERS, first=1),
            IndexMap(name="windows", of="page", count=NUMBERS, page=PAGE, first=PAGE, aligned=True),
            SLOT,
        ),
    ),
    "rings": _latent("rings", "ring"),
    "tables": _latent("pages", "table"),
}


class Owner:
    """Memory of a kind.

    Attributes:
        tensors: in the order of components.
        tables: of its maps, by name.
        holders: how many requests have a block, by its number.
        free: what can be allotted: ``number``, ``block``, ``window``, ``slot``, ``place``, ``table``.
    """

    def __init__(self, kind: Kind, drafts: int, rng: np.random.Generator) -> None:
        self.kind, self._rng = kind, rng
        self.tensors = [
            self._memory(component, where, drafts)
            for where, (_, _, component) in zip(kind.where, kind.spec.components(), strict=True)
        ]
        self.tables = {one.name: np.full(one.count, -1, np.int64) for one in kind.maps}
        self.holders: dict[int, int] = {}
        self.free = {
            "number": list(range(1, NUMBERS if "blocks" in self.tables else PLACES)),
            "block": list(range(1, PLACES)),
            "window": list(range(1, PLACES)),
            "slot": list(range(1, SLOTS)),
            "place": list(range(1, RINGS)),
            "table": list(range(TABLED)),
        }

    def _memory(self, component: Any, where: str, drafts: int) -> np.ndarray:
        units = {"ring": SLOTS, "place": RINGS, "table": TABLED}.get(where, PLACES)
        rows = {"window": PAGE, "table": 4, "block": self.kind.spec.block_tokens // component.tokens_per_row}
        dtype: Any = np.float32
        if isinstance(component, KV):
            shape = units, 2, rows[where], component.key_heads, component.key_dim
        elif isinstance(component, State):
            shape = units, 1 + drafts, component.heads, component.key_dim * component.value_dim
        elif isinstance(component, Conv):
            shape, dtype = (units, component.dim, component.width - 1), ml_dtypes.bfloat16
        else:
            width = sum(part.heads * part.format.row for part in component.parts)
            shape = units, rows.get(where) or component.ring_rows(drafts), width // 4
        found = np.empty(shape, dtype)
        found.view(np.uint8)[...] = NOTHING
        return found

    def allot(self, what: str) -> int:
        """One of what is free; a block with its place and its page of windows, a slot with its ring."""
        found = self.free[what].pop(int(self._rng.integers(len(self.free[what]))))
        if what == "number":
            self.holders[found] = 1
            if "blocks" in self.tables:
                self.tables["blocks"][found] = self.allot("block")
            if "windows" in self.tables:
                self._let(found, self.allot("window"))
        elif what == "slot" and "slots" in self.tables:
            self.tables["slots"][found] = self.allot("place")
        return found

    def room(self) -> int:
        """Blocks that can be allotted."""
        return min(len(self.free["number"]), len(self.free["block"]), len(self.free["window"]))

    def give_up(self, number: int) -> None:
        """One request less has a block."""
        self.holders[number] -= 1
        if not self.holders[number]:
            del self.holders[number]
            if "windows" in self.tables:
                self.forget_window(number)
            self._take_back("block", self.place("block", number))
            if "blocks" in self.tables:
                self.tables["blocks"][number] = -1
            self.free["number"].append(number)

    def forget_window(self, number: int) -> None:
        """What is behind a window goes before the rest."""
        page = self.place("window", number)
        if page >= 0:
            self._take_back("window", page)
            self._let(number, -1)

    def give_up_slot(self, slot: int) -> None:
        """A request has ended."""
        if "slots" in self.tables:
            self._take_back("place", self.place("place", slot))
            self.tables["slots"][slot] = -1
        self._fill("ring", slot)
        self.free["slot"].append(slot)

    def give_up_page(self, page: int) -> None:
        """The same of a page of a table."""
        self._take_back("table", page)

    def place(self, what: str, number: int) -> int:
        """Where a block lies, its page of windows, or a slot's ring; -1: nowhere."""
        if what == "window":
            page = self.kind.maps[-2 if "slots" in self.tables else -1]
            found = int(self.tables["windows"][number if page.of == "page" else number * PAGE])
            return found if page.of == "page" or found < 0 else found // PAGE
        name = {"block": "blocks", "place": "slots"}[what]
        return int(self.tables[name][number]) if name in self.tables else number

    def move(self, what: str, number: int) -> None:
        """To a free place, with its bytes."""
        before = self.place(what, number)
        if before < 0 or not self.free[what] or (what == "block" and "blocks" not in self.tables):
            return
        after = self.allot(what)
        self.copy(what, before, after)
        self._take_back(what, before)
        if what == "window":
            self._let(number, after)
        else:
            self.tables[{"block": "blocks", "place": "slots"}[what]][number] = after

    def copy(self, what: str, source: int, target: int) -> None:
        """The bytes of a unit to another."""
        for tensor, where in zip(self.tensors, self.kind.where, strict=True):
            if where == what:
                tensor[target] = tensor[source]

    def copied(self, number: int) -> int:
        """A block of its own for somebody who writes to one that others have."""
        found = self.allot("number")
        for what in ("block", "window") if "windows" in self.tables else ("block",):
            if self.place(what, number) >= 0:
                self.copy(what, self.place(what, number), self.place(what, found))
        self.holders[number] -= 1
        return found

    def check_the_rest(self, pages: set[int], slots: set[int]) -> None:
        """Nobody wrote to what no request has."""
        held = {
            "block": {self.place("block", number) for number in self.holders},
            "window": {self.place("window", number) for number in self.holders if "windows" in self.tables},
            "place": {self.place("place", slot) for slot in slots},
            "ring": slots,
            "table": pages,
        }
        for tensor, where in zip(self.tensors, self.kind.where, strict=True):
            rest = sorted(set(range(len(tensor))) - held[where])
            assert (tensor[rest].view(np.uint8) == NOTHING).all(), where

    def _let(self, number: int, page: int) -> None:
        table = self.tables["windows"]
        if len(table) == NUMBERS:
            table[number] = page
        else:
            table[number * PAGE : (number + 1) * PAGE] = page if page < 0 else page * PAGE + np.arange(PAGE)

    def _take_back(self, what: str, unit: int) -> None:
        self._fill(what, unit)
        self.free[what].append(unit)

    def _fill(self, what: str, unit: int) -> None:
        for tensor, where in zip(self.tensors, self.kind.where, strict=True):
            if where == what:
                tensor[unit : unit + 1].view(np.uint8)[...] = NOTHING
