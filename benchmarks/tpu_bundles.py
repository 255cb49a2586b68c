"""What libtpu's dump says of a compiled kernel: the bundles of its hot loop, its DMAs, its spills.

A TensorCore issues one bundle (a very long instruction word) a cycle, so bundles are a lower bound of cycles: nothing
is said of stalls, nor of waiting for memory. Loops count once in a dump; here they count as often as they turn.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DELAY_SLOTS = 4
"""Bundles after a branch that are issued whether or not it is taken."""

GRANULE = 32
"""Bytes of what a DMA's size is counted in."""

FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
"""``LIBTPU_INIT_ARGS`` for a dump of final bundles into a folder."""

_BUNDLE = re.compile(r"\s*(?:0x)?([0-9a-f]+)\s+(?:[A-Z]{2})?\s*:\s*>*\s*\{(.*)", re.DOTALL)
_COMPARED = re.compile(r"%(p\d+)\w* = scmp\.(\w+)\.s32\.totalorder (?:\([^)]*\), )?%\w+, (\d+)\b")
_LOGIC = re.compile(r"%(p\d+)\w* = (pnand|por|pneg) (?:\([^)]*\), )?%(p\d+)\w*(?:, %(p\d+)\w*)?")
_BRANCH = re.compile(r"sbr\.rel \((!?)%(p\d+)\w*\) target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_DMA = re.compile(r"(?<!for )%\d+ = dma\.(hbm_to_vmem|vmem_to_hbm)\b[^;]*?/\*size_in_granules=\*/(%?\w+)")


class Loop(NamedTuple):
    """A loop of a kernel, or the whole of it.

    Attributes:
        first, last: its bundles, both inclusive.
        turns: how often it turns where that is a constant, else 0.
    """

    first: int
    last: int
    turns: int


class Hot(NamedTuple):
    """What one turn of a kernel's hot loop does.

    Attributes:
        bundles: issued, inner loops as often as they turn.
        dmas: to and from HBM, started.
        moved: bytes of them.
        spills, fills: stores and loads of vector registers that did not fit.
        slots: name of a unit -> share of its slots that is used.
        loops: loops within it.
    """

    bundles: int
    dmas: int
    moved: int
    spills: int
    fills: int
    slots: dict[str, float]
    loops: int


class Bundles:
    """A kernel's final bundles.

    Args:
        text: of the file ``*-final_bundles.txt``.
        used: of ``*-final_hlo-static-per-bundle-utilization.txt`` beside it.
    """

    def __init__(self, text: str, used: str) -> None:
        self._bundles = list(_split(text))
        names, capacity, *rows = [line for line in used.splitlines() if line.strip() and "==" not in line]
        self._units = [name.strip() for name in names.split(",")]
        self._capacity = [int(number) for number in capacity.split()]
        self._used = [[int(number) for number in row.split()] for row in rows]
        starts: dict[str, int] = {}
        for number, bundle in enumerate(self._bundles):
            for region in _REGION.findall(bundle):
                starts.setdefault(region, number)
        compared = {
            name: (how, int(against)) for bundle in self._bundles for name, how, against in _COMPARED.findall(bundle)
        }
        self._loops: list[Loop] = []
        self._skipped: set[int] = set()
        logic = {name: found for bundle in self._bundles for name, *found in _LOGIC.findall(bundle)}
        for number, bundle in enumerate(self._bundles):
            for negated, predicate, region in _BRANCH.findall(bundle):
                target, (how, against) = starts.get(region, number), compared.get(predicate, ("", 0))
                if target <= number:
                    constant = against if how == "ge" and "loop exit test" in self._text_of(predicate) else 0
                    last = min(number + DELAY_SLOTS, len(self._bundles) - 1)
                    self._loops.append(Loop(target, last, constant))
                    continue
                taken = _usual(predicate, compared, logic)
                if taken is not None and taken != bool(negated):
                    # ``pl.when(step == first)``: what begins or ends a stream is no part of a turn.
                    self._skipped |= set(range(number + 1 + DELAY_SLOTS, target))
        self._loops.sort()

    def hot(self, *, inner: bool) -> Hot:
        """One turn of the grid's loop, or, where ``inner``, of the innermost that fetches and does most products.

        A loop within it whose turns the data decides counts once.
        """
        whole = Loop(0, len(self._bundles) - 1, 1)
        if inner:
            loops = [
                loop for loop in self._loops if not loop.turns and 2 * self._products(loop) > self._products(whole)
            ]
            loops = [loop for loop in loops if any(map(_DMA.search, self._bundles[loop.first : loop.last + 1]))]
            loop = min(loops, key=lambda loop: loop.last - loop.first, default=whole)
        else:
            loop = max(self._loops, key=lambda loop: loop.last - loop.first, default=whole)
            # A grid of one step is no loop, and what is left are loops within it.
            loop = loop if loop.last - loop.first > len(self._bundles) // 2 else whole
        inside = [other for other in self._loops if other != loop and _within(other, loop)]
        bundles = dmas = moved = 0
        used = [0] * len(self._units)
        for number in range(loop.first, loop.last + 1):
            if number in self._skipped:
                continue
            weight = 1
            for other in inside:
                if other.first <= number <= other.last:
                    weight *= max(other.turns, 1)
            bundles += weight
            for _, size in _DMA.findall(self._bundles[number]):
                dmas += weight
                moved += weight * int(size) * GRANULE if size.isdecimal() else 0
            if number < len(self._used):
                used = [sum_ + weight * count for sum_, count in zip(used, self._used[number], strict=True)]
        counts = dict(zip(self._units, used, strict=True))
        slots = {
            unit: round(counts[unit] / (bundles * capacity), 3)
            for unit, capacity in zip(self._units, self._capacity, strict=True)
            if ":" not in unit
        }
        return Hot(bundles, dmas, moved, counts["VSTORE:SPILL"], counts["VLOAD:FILL"], slots, len(inside))

    def _products(self, loop: Loop) -> int:
        unit = self._units.index("MXU")
        return sum(used[unit] for used in self._used[loop.first : loop.last + 1])

    def _text_of(self, predicate: str) -> str:
        return next((bundle for bundle in self._bundles if f"%{predicate}_" in bundle.split(" = scmp", 1)[0]), "")


def read(folder: Path, call: str) -> Bundles:
    """The largest kernel of a dump whose name contains ``call``.

    Raises:
        LookupError: there is none.
    """
    found = [path for path in folder.glob("*-final_bundles.txt") if "schedule" not in path.name and call in path.name]
    if not found:
        names = sorted({path.name.split("-", 1)[1].rsplit("-", 2)[0] for path in folder.glob("*-final_bundles.txt")})
        raise LookupError(f"no kernel of the name {call} among {', '.join(names)}")
    path = max(found, key=lambda path: path.stat().st_size)
    kernel = path.name.rsplit("-", 2)[0]
    (used,) = folder.glob(f"{glob_safe(kernel)}-*-final_hlo-static-per-bundle-utilization.txt")
    return Bundles(path.read_text(), used.read_text())


def glob_safe(name: str) -> str:
    """A file's name as a pattern that finds it alone."""
    return re.sub(r"([\[\]*?])", r"[\1]", name)


def _split(text: str) -> Iterator[str]:
    """Bundles, each as one string; a message of a check within one may take lines of its own."""
    held: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            if held:
                yield "\n".join(held)
            held = [line]
        elif held:
            held.append(line)
    if held:
        yield "\n".join(held)


def _usual(predicate: str, compared: dict[str, tuple[str, int]], logic: dict[str, list[str]]) -> bool | None:
    """A predicate in a turn that is neither the first nor the last of anything: nothing equals a constant; or None."""
    if predicate in compared:
        return {"eq": False, "ne": True}.get(compared[predicate][0])
    if predicate not in logic:
        return None
    how, *names = logic[predicate]
    given = [_usual(name, compared, logic) for name in names if name]
    if how == "pneg":
        return None if given[0] is None else not given[0]
    if (how == "por") in given:
        return True
    return None if None in given else False


def _within(inner: Loop, outer: Loop) -> bool:
    return inner != outer and outer.first <= inner.first and inner.last <= outer.last
