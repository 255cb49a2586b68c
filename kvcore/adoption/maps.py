"""Places that an engine looks up in tensors of integers of its own, as they are when they are asked for.

What a map says is not believed: a place beyond the pool, at another row of its page than the token has in its block,
or that two numbers have at once, is refused by name. The last is found without looking at the whole map: of every
place the number is kept that it was last seen to belong to, and asked again when another comes with it.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvcore.adoption.descriptor import IndexMap
from kvcore.adoption.memory import framework
from kvcore.arrays import host_view, to_numpy
from kvcore.errors import ShapeError, SpecError

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Index:
    """A map of the owner's.

    Attributes:
        said: what the descriptor says of it.
        block_tokens: of the descriptor.
        limit: behind the last place that every component has that looks places up here.
    """

    def __init__(self, said: IndexMap, array: Any, block_tokens: int, limit: int) -> None:
        self.said, self.block_tokens, self.limit = said, block_tokens, limit
        self._array = array
        self._host = host_view(array)
        self._owners: Numbers = np.full(limit, -1, np.int64)

    @property
    def what(self) -> str:
        """What has places: for messages."""
        return "token" if self.said.of_tokens else self.said.of

    def places(self, numbers: Numbers) -> Numbers:
        """Of tokens or slots, as the owner has them now; -1 where there is none."""
        said = self.said
        at = numbers // said.page if said.of == "page" else numbers
        if self._host is not None:
            found = self._host[at]
        else:
            torch: Any = sys.modules["torch"]
            found = to_numpy(self._array[torch.from_numpy(at).to(self._array.device)])
        found = found.astype(np.int64)
        if said.of == "page":
            # The least place is that of the first page's first token.
            found = np.where(found < 0, -1, found * said.page + numbers % said.page)
        return np.where(found < said.first, -1, found)

    def check(self, numbers: Numbers, places: Numbers) -> None:
        """Refuse places that cannot be those of the numbers; -1 among them is for others to judge.

        Raises:
            ShapeError: naming the map, a number and its place.
        """
        said = self.said
        there = places >= 0
        numbers, places = numbers[there], places[there]
        wrong = places >= self.limit
        if wrong.any():
            raise self._refused(numbers, places, wrong, f"places {said.first} to {self.limit - 1}")
        if said.aligned:
            row = numbers % self.block_tokens % said.page
            wrong = places % said.page != row
            if wrong.any():
                raise self._refused(numbers, places, wrong, "the row of its page that the token has in its block")
        before = self._owners[places]
        others = (before >= 0) & (before != numbers)
        if others.any():
            # Places are given out anew: only who still has one keeps it.
            others[others] = self.places(before[others]) == places[others]
            if others.any():
                allowed = f"a place of its own, not that of {self.what} {before[others][0]}"
                raise self._refused(numbers, places, others, allowed)
        self._owners[places] = numbers
        wrong = self._owners[places] != numbers
        if wrong.any():
            other = self._owners[places][wrong][0]
            raise self._refused(numbers, places, wrong, f"a place of its own, not that of {self.what} {other}")

    def known(self, numbers: Numbers, places: Numbers) -> Any:
        """Which places were found to be those of the numbers, and still are."""
        inside = (places >= 0) & (places < self.limit)
        return inside & (self._owners[np.where(inside, places, 0)] == numbers)

    def _refused(self, numbers: Numbers, places: Numbers, wrong: Any, allowed: str) -> ShapeError:
        got = f"place {places[wrong][0]} of {self.what} {numbers[wrong][0]}"
        hint = "The map is another's, or not as it is while the owner waits."
        return ShapeError(got=got, where=f"map {self.said.name!r}", allowed=allowed, hint=hint)


def read_maps(said: Iterable[IndexMap], given: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a descriptor's maps, by name.

    Raises:
        SpecError: one that is missing, or one that the descriptor has not. ShapeError: no integers, or too few.
    """
    wanted = {one.name: one for one in said}
    for name in (*wanted, *given):
        if name not in given or name not in wanted:
            raise SpecError(
                got=f"no map {name!r}" if name in wanted else f"map {name!r}",
                where="adopt: maps",
                allowed=f"the tensors of the descriptor's maps: {', '.join(sorted(wanted)) or 'none'}",
            )
    for name, one in wanted.items():
        array, where = given[name], f"adopt: map {name!r}"
        if framework(array) not in ("numpy", "torch"):
            raise ShapeError(got=type(array).__name__, where=where, allowed="an array of NumPy, or a tensor of torch's")
        shape, dtype = tuple(array.shape), str(array.dtype).rpartition(".")[2]
        if dtype not in ("int32", "int64") or shape != (one.count,):
            got = f"{dtype} of shape {shape}"
            raise ShapeError(got=got, where=where, allowed=f"int32 or int64 of shape ({one.count},)")
    return {name: given[name] for name in wanted}
