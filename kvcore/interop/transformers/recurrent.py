"""Layers with a recurrent state, a short convolution, or both, as ``transformers`` models call them.

A model asks for what it goes on from (``get_conv_state``, ``get_recurrent_state``), hands the new inputs of its
convolution over (``update_conv_state``), and then its new state (``update_recurrent_state``). For a single token some
models write into what they were handed instead, and call nothing: such a state is stored as soon as the cache is
asked for anything else, if it was written to; if it was not, the forward counts as one that did not reach its end.

A forward stores the state after its last token. So ``crop`` goes back to the end of an earlier forward, not into one.
"""
# ruff: noqa: ARG002 - the signatures are those that models call

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvcore.errors import StepError
from kvcore.interop.transformers.layers import KVLayer
from kvcore.interop.transformers.owner import OwnedLayer, Owner
from kvcore.interop.transformers.tensors import check_inference, version_of
from kvcore.spec import Conv, LayerSpec


class HandedOut:
    """A tensor that a model may write into, and whether it did.

    torch counts what is written in place (``version_of``). Without that every state would be copied and compared in
    every step, as is done where a tensor counts nothing.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = version_of(tensor)
        # What does not count its versions is compared with what it was.
        self._before = tensor.clone() if self._version is None or tensor.is_cuda else None

    @property
    def written(self) -> bool:
        """Whether it is another than was handed out."""
        if self._version is not None and version_of(self.tensor) != self._version:
            return True
        return self._before is not None and not torch.equal(self._before, self.tensor)


class RecurrentLayer(OwnedLayer, LinearAttentionCacheLayerMixin):
    """What a recurrent layer carries on. B rows of the batch, S new tokens each."""

    supports_early_init = False
    window: int | None = None
    number_of_states = 1
    record_past = True
    """Models then hand over the inputs of every forward."""

    def __init__(self, owner: Owner, number: int, spec: LayerSpec) -> None:
        # Not the base class's, which keeps states by itself.
        self._carry(owner, number, spec)

    def _carry(self, owner: Owner, number: int, spec: LayerSpec) -> None:
        assert spec.conv is not None
        self.owner = owner
        self.number = number
        self.conv: Conv = spec.conv
        self.state = spec.state
        self.state_dtype: torch.dtype | None = None
        self._conv: HandedOut | None = None
        self._state: HandedOut | None = None
        self._inputs = False

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can undo any tokens, up to ``max_draft_tokens``: not with a state, of which few are kept."""
        return self.state is None and self.owner.can_undo

    @property
    def is_compileable(self) -> bool:
        """Not: states come and go as copies."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether the layer holds anything: from its first update until ``reset``."""
        return self.owner.holds(self.number)

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """{0: whether there are tokens to go on from}."""
        return {0: self.owner.length > 0}

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        """{0: the last inputs of the convolution, [B, channels, width], the first of them 0}; None without tokens."""
        if self.owner.length and self._conv is None:
            with self.owner.reading(self.number) as handle:
                inputs = self.owner.take(handle.gather_conv(), self.owner.dtype)
            self._conv = HandedOut(torch.nn.functional.pad(inputs.transpose(1, 2), (1, 0)).contiguous())
        return {0: None if self._conv is None else self._conv.tensor}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """{0: the state after the last token, [B, heads, ...]}; None without tokens, or where there is none."""
        if self.owner.length and self._state is None and self.state is not None:
            with self.owner.reading(self.number) as handle:
                self._state = HandedOut(self.owner.take(handle.read_state(), self.state_dtype))
        return {0: None if self._state is None else self._state.tensor}

    def stored(self) -> None:
        """No keys and values."""

    def forget(self) -> None:
        """Whatever was handed out belongs to a forward that has ended, or to other rows."""
        self._conv = self._state = None
        self._inputs = False

    def settle(self) -> bool:
        """Store a state that the model wrote into what it was handed; False if it did not."""
        if self._state is None or not self._state.written:
            return False
        self._store(self._state.tensor)
        return True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: pools are allocated with the cache."""

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Store the inputs [B, channels, S]; return them after those that they need before them."""
        check_inference(conv_states)
        owner = self.owner
        with owner.forward(self.number, conv_states.transpose(1, 2).unsqueeze(1)) as handle:
            before = owner.take(handle.gather_conv(), conv_states.dtype).transpose(1, 2)
            handle.append_conv(owner.give(conv_states.transpose(1, 2).flatten(0, 1)))
            self._inputs = True
            if self.state is None:
                owner.finish(self.number)
            elif self._state is not None:
                owner.await_state(self)
        return conv_states if not owner.length else torch.cat([before, conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Store the state after the forward's last token, [B, heads, ...]."""
        check_inference(recurrent_states)
        if not self._inputs:
            if self._conv is None or not self._conv.written:
                raise StepError(
                    got="a state without inputs of the convolution",
                    where=f"KVCache, layer {self.number}",
                    allowed="update_conv_state, then update_recurrent_state",
                )
            # The model wrote its one token's into what it was handed.
            self.update_conv_state(self._conv.tensor[..., -1:])
        self._store(recurrent_states)
        return recurrent_states

    def _store(self, states: torch.Tensor) -> None:
        assert self.state is not None
        owner, self.state_dtype = self.owner, states.dtype
        with owner.forward_part(self.number) as handle:
            handle.write_state(owner.give(states.reshape(len(states), *self.state.shape)))
            owner.finish(self.number)


class _Halves:
    """The owner of a layer that attends and is recurrent: its part of a forward ends when both halves have ended."""

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.proxy(owner)
        self.forget()

    def forget(self) -> None:
        """A forward begins anew."""
        self._begun: set[str] = set()
        self._ended = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def begin(self, layer: int, states: torch.Tensor) -> Any:
        """As of the owner, for the half that attends; either goes on where the other began."""
        return self._owner.begin(layer, states, again=self._is_first("attends"))

    def forward(self, layer: int, states: torch.Tensor) -> AbstractContextManager[Any]:
        """The same for the half that is recurrent."""
        return self._owner.forward(layer, states, again=self._is_first("recurrent"))

    def _is_first(self, half: str) -> bool:
        """Whether a half begins for the first time in this forward."""
        first = half not in self._begun
        self._begun.add(half)
        return first

    def finish(self, layer: int) -> None:
        """Note that a half has all that it needs."""
        self._ended += 1
        if self._ended == 2:
            self._owner.finish(layer)


class HybridLayer(RecurrentLayer, KVLayer):
    """Keys and values beside what a recurrent layer carries on, in one layer: Falcon-H1, Zamba 2."""

    def __init__(self, owner: Owner, number: int, spec: LayerSpec) -> None:
        assert spec.kv is not None
        self._halves = _Halves(owner)
        KVLayer.__init__(self, self._halves, number, spec.kv)  # type: ignore[arg-type]
        self._carry(self._halves, number, spec)  # type: ignore[arg-type]

    is_initialized = RecurrentLayer.is_initialized

    def stored(self) -> Any:
        """Copies of the layer's keys and values; None if there are none."""
        return KVLayer.stored(self)

    def forget(self) -> None:
        """Both halves begin anew."""
        super().forget()
        self._halves.forget()

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: pools are allocated with the cache."""
