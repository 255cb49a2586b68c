"""What a layer of transformers needs of the ``KVCache`` that it belongs to."""

# ruff: noqa: ARG002 - the signatures are those that models call

import weakref
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch

import kvcore
from kvcore.errors import StepError
from kvcore.interop.transformers.attention import Forward


class Owner(Protocol):
    """One cache of a model: its rows, its settings, and the forward that is under way.

    Attributes:
        max_length: tokens that every row can hold.
        static: whether shapes stay the same over steps.
        zero_copy: whether layers may hand out the pools' own memory.
        dtype: of the model's keys and values.
        device: where the model is.
        can_undo: whether ``crop`` can undo tokens.
        number: of the cache, among those of the process.
        attending: the model's forward that is under way, if the cache attends itself in it.
        alike: what layers of a kind share in the open step, by that kind.
        captured: the open step, if compiled code has opened it for all layers.
    """

    max_length: int
    static: bool
    zero_copy: bool
    dtype: torch.dtype
    device: torch.device
    can_undo: bool
    number: int
    attending: Forward | None
    alike: dict[int, Any]
    captured: Any

    @property
    def kv(self) -> kvcore.Cache:
        """The cache that holds the rows."""
        ...

    @property
    def length(self) -> int:
        """Tokens of every row, those of a forward under way not counted."""
        ...

    def await_state(self, layer: Any) -> None:
        """Ask ``layer`` later whether the model wrote into the state that it was handed: see ``RecurrentLayer``."""
        ...

    def holds(self, layer: int) -> bool:
        """Whether a layer has rows, those of a forward under way counted."""
        ...

    def forward(self, layer: int, states: torch.Tensor, *, again: bool = False) -> AbstractContextManager[Any]:
        """The handle with which ``layer`` begins its part of a forward; an error in its body undoes the forward."""
        ...

    def forward_part(self, layer: int) -> AbstractContextManager[Any]:
        """The handle with which ``layer`` goes on in the open forward."""
        ...

    def reading(self, layer: int) -> AbstractContextManager[Any]:
        """A handle to read a layer with: of the forward under way, else of a step without tokens."""
        ...

    def begin(self, layer: int, states: torch.Tensor, *, again: bool = False) -> Any:
        """The handle with which ``layer`` begins its part of a forward that brings states [B, heads, S, dim].

        ``again``: it may have begun already.
        """
        ...

    def open_alike(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Open a step like the last, if ``layer`` begins one; what its layers share if that still holds, else None."""
        ...

    def begin_alike(self, layer: int) -> None:
        """A layer begins its part of the open forward without a handle: see ``note_alike``."""
        ...

    def note_alike(self, layer: Any, handle: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note that a layer's keys and values [B, heads, S, dim] passed all checks, and were stored at once."""
        ...

    def handle_of(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Any:
        """The handle of a layer that has stored k and v without one."""
        ...

    def finish(self, layer: int) -> None:
        """Note that a layer has all it needs from this forward; the last one commits the step."""
        ...

    def abort(self) -> None:
        """Undo a forward that did not reach its end; nothing happens if there is none."""
        ...

    def hand_out(self, layer: int, waits: Any = None) -> None:
        """Finish a layer with the model's forward, until when what it handed out can be attended to.

        ``waits`` may be stored until then.
        """
        ...

    def refuse(self, layer: int, reason: str) -> None:
        """Note why the model attends to what the cache could have."""
        ...

    def give(self, tensor: torch.Tensor) -> Any:
        """A float tensor of the model as an array of the backend."""
        ...

    def numbers(self, tensor: torch.Tensor) -> Any:
        """A tensor of int32 as an array of the backend."""
        ...

    def take(self, array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An array of the backend as a tensor where the model is."""
        ...

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> NoReturn:
        """Refused: see ``prefetch``."""
        ...

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> NoReturn:
        """Refused: pools are allocated once, on one device, and do not move."""
        ...


class Owned:
    """A part of a cache. It does not keep the cache: its memory is free as soon as nobody holds it."""

    _owner: "weakref.ref[Any]"

    @property
    def owner(self) -> Owner:
        """The cache.

        Raises:
            StepError: nobody has kept it.
        """
        found = self._owner()
        if found is None:
            raise StepError(got="a layer of a cache that nobody has kept", where="KVCache", allowed="the cache, kept")
        return found

    @owner.setter
    def owner(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)


class OwnedLayer(Owned):
    """One layer of a cache, and what it refuses whatever it holds.

    Attributes:
        number: of the layer.
    """

    number: int

    def get_max_length(self) -> int:
        """Most tokens that a row can hold."""
        return self.owner.max_length

    def reset(self) -> None:
        """Refused: rows are as long in one layer as in all."""
        raise self._of_all("reset")

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: rows are as long in one layer as in all."""
        raise self._of_all("crop")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused: a row is the same in one layer as in all."""
        raise self._of_all("reorder_cache")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused: a row is the same in one layer as in all."""
        raise self._of_all("batch_select_indices")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: a row is the same in one layer as in all."""
        raise self._of_all("batch_repeat_interleave")

    def offload(self) -> None:
        """Refused: pools stay where they were planned."""
        self.owner.offload(self.number)

    def prefetch(self) -> None:
        """Refused: pools stay where they were planned."""
        self.owner.prefetch(self.number)

    def _of_all(self, verb: str) -> StepError:
        return StepError(got=f"layers[{self.number}].{verb}", where="KVCache", allowed=f"{verb} of the whole cache")
