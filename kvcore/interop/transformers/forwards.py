"""A model's forwards as steps of a kvcore cache: what ``KVCache`` is to its layers, to hooks and to compiled code.

One forward of the model is one kvcore step over all rows of the batch. The step opens at the first layer's update and
commits when the last layer has what it needs: when all layers have stored the forward's tokens.

A forward that the cache refuses is undone at once. One that fails elsewhere in the model leaves its step open, just as
one does in which some layer does not store anything, and the cache cannot tell which it was. So it does not guess: what
comes next is refused, and ``abort`` (or ``reset``) says that the forward failed and is to be undone.
"""

# pyright: reportPrivateUsage=false

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from transformers import Cache

import kvcore
from kvcore import Request, to_numpy
from kvcore.cache.inside import opened, writes_of
from kvcore.cache.ring_writes import AT_ONCE
from kvcore.errors import BackendError, OutOfBlocks, RequestError, StepError
from kvcore.interop.transformers import reuse
from kvcore.interop.transformers.attention import OURS, Forward, base_of
from kvcore.interop.transformers.handed import Alike, Captured, Handed, SharedRows, SharedViews, Steady, likes
from kvcore.interop.transformers.kinds import layer_of
from kvcore.interop.transformers.latent import MlaLayer, StaticMlaLayer
from kvcore.interop.transformers.layers import KVLayer, Layer, StaticLayer
from kvcore.interop.transformers.projection import untraceable
from kvcore.interop.transformers.recurrent import RecurrentLayer
from kvcore.interop.transformers.settings import Settings
from kvcore.interop.transformers.static import CACHES, NUMBERS
from kvcore.interop.transformers.tensors import ACCEPTED, by_token, stored_as, to_torch, uses_torch
from kvcore.interop.transformers.ways import OfLatents, ways_of


class Forwards(Cache):
    """The rows of a batch, and the forward that is under way: an ``Owner`` of layers."""

    layers: list[Any]
    requests: list[Request]
    rows: int
    max_length: int
    dtype: torch.dtype
    device: torch.device

    def _set_up(self, settings: Settings) -> None:
        """Allocate, empty."""
        self._settings = settings
        self._awaited: list[Any] = []
        self._kv = settings.new_cache()
        self.requests: list[Request] = []
        self._prompt = 0
        self.rows = settings.rows
        self.max_length = settings.max_length
        self.static = settings.static
        self.zero_copy = settings.zero_copy
        self.dtype = settings.of.dtype
        spans = [component.span for _, _, component in settings.spec.components()]
        overwritten = any(span is not None and span < settings.max_length for span in spans)
        self.can_undo = settings.max_draft_tokens > 0 or not overwritten
        self.number = next(NUMBERS)
        CACHES[self.number] = self
        self.device = settings.device
        self._torch_pools = uses_torch(self.kv)
        # On a GPU steps that are alike are told to the device where the last one was.
        self._keeps = self._torch_pools and self.device.type == "cuda"
        self._step: Any = None
        # The open step's handles, whose verbs look whether it is open.
        self._layer_of: Any = None
        self.captured: Captured | None = None
        # Flags of masks on the way to the host, with what tells that they are there.
        self._looked: list[tuple[torch.Tensor, Any]] = []
        # Where they are put on the host, one after the other, in every step.
        self._flags: list[tuple[torch.Tensor, Any]] = []
        self._left = torch.empty(0, dtype=torch.int32)
        # By kind of layer; some of the open step's layers then have no handle.
        self.alike: dict[int, Alike] = {}
        # The same of the last step of one token a row, for layers that overwrite nothing, with one of them.
        self._before: dict[int, tuple[KVLayer, Alike]] = {}
        # Layer -> what it shares with layers before it, in a forward in which those were all given the same.
        self.steady: dict[int, SharedRows | SharedViews] = {}
        # By kind of layer, what such a forward's calls had in common, without a mask.
        self.lasting: dict[int, Steady] = {}
        self._by_kind = False
        self._shape = (0, 0)
        # The length, while it cannot change.
        self._known: int | None = None
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._handed_out: list[int] = []
        self._waiting: list[Handed] = []
        self._refused: dict[int, str] = {}
        self.attending: Forward | None = None
        self._storing = {number for number, layer in enumerate(settings.spec.layers) if layer.roles}
        layers: list[Any] = [layer_of(self, number, settings.of) for number in range(len(settings.spec.layers))]
        super().__init__(layers=layers)
        self._recurrent = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
        against = untraceable(settings.expanding, settings.of.rank) if settings.static else ""
        self._ways = ways_of(
            self._kv,
            settings.asked,
            settings.against,
            dtype=self.dtype,
            device=settings.device,
            latents=OfLatents(len(settings.expanding), against, settings.of.most_absorbed),
            static=settings.static,
            asking=settings.asking,
        )
        components: dict[Any, int] = {}
        for layer, ways, kind in zip(layers, self._ways, settings.kinds, strict=False):
            if isinstance(layer, Layer):
                layer.kind = components.setdefault(layer.component, len(components))
                layer.cache_attends = ways.one.by == "cache", ways.more.by == "cache"
            if isinstance(layer, MlaLayer):
                layer.most_new = None if settings.asked == "cache" else settings.of.most_absorbed
            if isinstance(layer, KVLayer):
                layer.stored_as = stored_as(layer.component) if self._torch_pools else None
                layer.chunked = kind == "chunked_attention"
                if settings.asked == "auto" and layer.component.ratio > 1:
                    layer.most_new = layer.component.ratio
        # A layer with a recurrent part beside ends its forward in that, by a handle; rows that wait raw need one, too.
        roles = {layer.roles for layer in settings.spec.layers if layer.roles}
        self._only_rows = self._torch_pools and roles == {("kv",)}
        attends = any(way.by != "model" for ways in self._ways for way in ways)
        # In code that is compiled, or wherever else the model runs.
        self.attends_compiled, self._attends = attends and self.static, attends and not self.static
        self.captures = self.attends_compiled and self.device.type == "cuda" and self._can_be_captured()

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store a layer's keys and values [B, heads, S, dim]; what it hands out, for the model's attention."""
        shared = self.steady.get(layer_idx) if self.steady else None
        if shared is not None:
            found = shared.hand_out(layer_idx, key_states, value_states)
            if found is not None:
                return found
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def defers(self, new: int) -> bool:
        """Whether the cache attends itself to some layer, to ``new`` tokens a row."""
        return any(layer.attends(new) for layer in self.layers if isinstance(layer, Layer))

    def begin_attending(self, config: Any, asked: dict[str, Any]) -> Forward | None:
        """What layers and masks share in a decoder's forward that the cache may attend in; None: the model attends."""
        if not self._attends or self.attending is not None:
            return None
        self._refused.clear()
        base = base_of(config)
        refused = f"the model was told to use {base}" if base not in OURS else ""
        if asked.get("output_attentions") or getattr(config, "output_attentions", False):
            refused = "output_attentions=True: ours keeps no weights"
        if refused:
            self._refused = dict.fromkeys(range(len(self._ways)), refused)
            return None
        self._known = self.length
        self.attending = Forward(self, config, base, self._known)
        return self.attending

    def end_attending(self, forward: Forward, *, finished: bool) -> None:
        """A decoder has run, or was left by an error: end what its layers left open to be attended to."""
        forward.memo.clear()  # what layers shared knows the forward, and that the cache
        self._end_steady()
        self.attending = self._known = None
        handed_out, self._handed_out = self._handed_out, []
        waiting, self._waiting = self._waiting, []
        if finished and handed_out:
            for rows in waiting:
                if rows.waits:
                    rows.store()
            self._finished.update(handed_out[:-1])
            self.finish(handed_out[-1])

    def hand_out(self, layer: int, waits: Handed | None = None) -> None:
        """Finish a layer with the model's forward, until when what it handed out can be attended to.

        ``waits`` may be stored until then.
        """
        self._handed_out.append(layer)
        if waits is not None:
            self._waiting.append(waits)

    def refuse(self, layer: int, reason: str) -> None:
        """Note why the model attends to what the cache could have."""
        self._refused[layer] = reason

    @property
    def length(self) -> int:
        """Tokens of every row, those of a forward under way not counted."""
        if self._awaited:
            self._settle()
        if self._known is not None:
            return self._known
        return self.requests[0].length if self.requests else 0

    @property
    def kv(self) -> kvcore.Cache:
        """The kvcore cache: its spec, plan, pools, digest, save and export."""
        self._settle()
        self._known = None
        return self._kv

    def holds(self, layer: int) -> bool:
        """Whether a layer has rows, those of a forward under way counted."""
        return self.length > 0 or layer in self._begun

    @contextmanager
    def forward(self, layer: int, states: torch.Tensor, *, again: bool = False) -> Iterator[Any]:
        """The handle with which ``layer`` begins its part of a forward; an error in its body undoes the forward."""
        handle = self.begin(layer, states, again=again)
        try:
            yield handle
        except BaseException:
            self.abort()
            raise

    def begin(self, layer: int, states: torch.Tensor, *, again: bool = False) -> Any:
        """The handle with which ``layer`` begins its part of a forward that brings states [B, heads, S, dim].

        ``again``: it may have begun already, as a layer of two halves has.
        """
        if self._awaited:
            self._settle()
        batch, _, new, _ = states.shape
        shape = (batch, new)
        if self._step is None:
            self._begin(*shape)
        elif layer in self._begun and not again:
            self._refuse(f"layer {layer} again")
        if shape != self._shape:
            wanted = list(self._shape)
            self.abort()
            raise StepError(
                got=f"[batch, tokens] = {list(shape)}",
                where=f"KVCache, layer {layer}",
                allowed=f"{wanted}, as in the forward's first layer",
            )
        self._begun.add(layer)
        return self._layer_of(layer)

    def open_alike(self, layer: KVLayer, keys: torch.Tensor, values: torch.Tensor) -> Alike | None:
        """Open a step like the last, if ``layer`` begins one; what its layers share if that still holds, else None."""
        _, before = self._before.get(layer.kind, (None, None))
        if before is None or self._step is not None or before.like != likes(keys, values):
            return None
        self._begin(keys.shape[0], 1)
        return self.alike.get(layer.kind)

    def _begin(self, batch: int, new: int) -> None:
        """Open a step for layers.

        What a layer overwrites is looked at in every step; of one that overwrites nothing checks pass again.
        """
        if self.static:
            self._refused.clear()
        self._step = step = self._open(batch, new, kept=self._keeps and new == 1)
        state, start = opened(step), self.length
        self._layer_of, context = state.layer, state.context
        for layer, before in self._before.values() if new == 1 else ():
            if before.like[0][0] == batch and self._lends(layer, 1):
                columns = len(layer.component.visible(start, start + 1))
                self.alike[layer.kind] = before.in_step(layer.number, context, columns)

    def begin_alike(self, layer: int) -> None:
        """A layer begins its part of the open forward without a handle: see ``note_alike``."""
        if layer in self._begun:
            self._refuse(f"layer {layer} again")
        self._begun.add(layer)
        self._by_kind = True

    def note_alike(self, layer: KVLayer, handle: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note that a layer's keys and values [B, heads, S, dim] passed all checks, and were stored at once.

        Where every layer stores at once, layers alike need no handles that know what waits and what an abort puts back.
        """
        writes = writes_of(handle)
        context = writes.context
        if self._step is None or not self._only_rows or layer.kind in self.alike:
            return
        plain = keys.dtype in ACCEPTED and values.dtype in ACCEPTED and not context.check and context.traced is None
        lent = self._lends(layer, keys.shape[2])
        if plain and lent and context.ops.in_place and writes.writing("kv") == AT_ONCE:
            columns = context.kv_columns(layer.component, ended=True)
            ops, pools, index, known = context.ops, context.pools, context.index, context.known
            appending = known.get(layer.number, {}).get("append_kv")
            if appending is not None:
                appending = appending.kind_of(index, (by_token(keys), by_token(values)), {})
            alike = self.alike[layer.kind] = Alike(likes(keys, values), ops, pools, index, columns, known, appending)
            if self._shape[1] == 1 and layer.component.reach is None:
                self._before[layer.kind] = layer, alike

    def _lends(self, layer: KVLayer, new: int) -> bool:
        """Whether a layer may be handed pools as they are."""
        return self.zero_copy or (self.attending is not None and layer.attends(new))

    def handle_of(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Any:
        """The handle of a layer that has stored k and v without one."""
        handle = self._layer_of(layer)
        writes_of(handle).own["kv"] = k, v
        return handle

    @contextmanager
    def forward_part(self, layer: int) -> Iterator[Any]:
        """The handle with which ``layer`` goes on in the open forward."""
        if layer not in self._begun:
            raise StepError(
                got="a compressor call before update", where=f"KVCache, layer {layer}", allowed="update first"
            )
        try:
            yield self._step.layer(layer)
        except BaseException:
            self.abort()
            raise

    def _can_be_captured(self) -> bool:
        """Whether a step of one token is launches alone, of layers that all attend from the cache."""
        alike = all(isinstance(layer, (StaticLayer, StaticMlaLayer)) and layer.attends(1) for layer in self.layers)
        return alike and self._torch_pools and not self._settings.check and self._settings.of.heads is not None

    def begin_captured(self, batch: int) -> torch.Tensor:
        """Open a step of one token a row whose numbers lie where graphs look for them; its rows' new lengths [B]."""
        if self._step is not None:
            self._refuse("another one")
        self._looked.clear()
        self._step = step = self._open(batch, 1, kept=True)
        self._layer_of = opened(step).layer
        # What the step overwrites is noted with it, for an abort.
        if self._left.shape[0] != batch:
            with torch.inference_mode(False):
                self._left = torch.zeros(batch, dtype=torch.int32, device=self.device)
            self._prepare_captured(batch, Captured(opened(step).context.ops, self._kv.pools, step.index, self._left))
        self.captured = Captured(opened(step).context.ops, self._kv.pools, step.index, self._left)
        return torch.full((batch,), self.requests[0].length + 1, dtype=torch.int32, device=self.device)

    def _prepare_captured(self, batch: int, captured: Captured) -> None:
        """Have verbs compile their kernels, and allocate what is kept: in a graph's memory nobody may keep anything.

        What is stored for that, the step's rows take the place of.
        """
        for layer in {layer.kind: layer for layer in self.layers}.values():
            layer.prepare_captured(captured, batch, self._settings.of.heads)

    def look(self, whole: torch.Tensor) -> None:
        """Have the host told whether all of ``whole`` is true, which ``end_captured`` asks."""
        flag, arrived = whole.all(), None
        if flag.is_cuda:
            if len(self._looked) == len(self._flags):
                with torch.inference_mode(False):
                    kept = torch.empty((), dtype=torch.bool, pin_memory=True)
                self._flags.append((kept, torch.cuda.Event()))
            kept, arrived = self._flags[len(self._looked)]
            flag = kept.copy_(flag, non_blocking=True)
            arrived.record()
        self._looked.append((flag, arrived))

    def end_captured(self) -> None:
        """Commit that step: every layer's rows are written, or will be before anything later on the device.

        Raises:
            StepError: a mask was not of padding at the left alone; the step is rolled back.
        """
        looked, self._looked = self._looked, []
        for flag, arrived in looked:
            if arrived is not None:
                arrived.synchronize()
            if not flag:
                self.abort()
                raise StepError(
                    got="a mask that is not padding at the left alone, or that adds to scores",
                    where="KVCache, in compiled code on a GPU",
                    allowed="no mask, or one of padding at the left",
                    hint="attention='model' takes any mask, and so does a forward that is not compiled.",
                )
        if self._step is not None:  # else the model attended in all layers, the last of which has committed it
            step = self._forget_step()
            # What a graph wrote counts as written by whoever assigns the pools.
            self._kv.pools = self._kv.pools
            step.commit()

    def finish(self, layer: int) -> None:
        """Note that a layer has all it needs from this forward; the last one commits the step."""
        self._finished.add(layer)
        if self._awaited:
            self._awaited = [awaited for awaited in self._awaited if awaited.number != layer]
        if len(self._finished) == len(self._storing):
            if self._by_kind:
                # That all layers have their rows is known here, and not by handles.
                self._kv.pools = self._kv.pools
            step = self._forget_step()
            step.commit()
            if self._prompt and self.requests[0].length == self._prompt:
                reuse.keep(self._kv, self.requests)

    def abort(self) -> None:
        """Undo a forward that did not reach its end; nothing happens if there is none.

        So it can be run again after an error in the model. ``reset`` undoes it as well.
        """
        self._settle()
        if self._step is not None:
            self._forget_step().abort()
        if not self.length:
            self._release()

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> NoReturn:
        """Refused: see ``prefetch``."""
        del only_non_sliding
        self._refuse_to_move("offload", layer_idx)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> NoReturn:
        """Refused: pools are allocated once, on one device, and do not move.

        Raises:
            BackendError: always.
        """
        del only_non_sliding
        self._refuse_to_move("prefetch", layer_idx)

    def give(self, tensor: torch.Tensor) -> Any:
        """A float tensor of the model as an array of the backend: fp32 and bf16 as they are, other dtypes as fp32."""
        if tensor.dtype not in ACCEPTED:
            tensor = tensor.float()
        # A torch backend detaches by itself.
        return tensor if self._torch_pools else self.kv.asarray(to_numpy(tensor.detach()))

    def numbers(self, tensor: torch.Tensor) -> Any:
        """A tensor of int32 as an array of the backend."""
        return tensor if self._torch_pools else self.kv.asarray(tensor.numpy(force=True))

    def take(self, array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An array of the backend as a tensor where the model is."""
        if self._torch_pools and array.dtype == dtype and array.device == self.device:
            return array
        return to_torch(array, device=self.device, dtype=dtype)

    @contextmanager
    def reading(self, layer: int) -> Iterator[Any]:
        """A handle to read a layer with: of the forward under way, else of a step without tokens."""
        if self._step is not None:
            yield self._step.layer(layer)
            return
        step = self.kv.step(dict.fromkeys(self.requests, 0))
        try:
            yield step.layer(layer)
        finally:
            step.abort()

    def _open(self, batch: int, new: int, *, kept: bool = False) -> Any:
        """Open a step of ``new`` tokens for every row; the first one admits the rows.

        ``kept``: its numbers lie on the device where those of the last such step lay.
        """
        self._known = None
        length = self.length
        if length + new > self.max_length:
            raise OutOfBlocks(
                got=f"{length + new} tokens in a row",
                where="KVCache",
                allowed=f"{self.max_length} (max_length)",
                hint="Create the cache with a larger max_length.",
            )
        if batch > self.rows:
            raise RequestError(got=f"{batch} rows", where="KVCache", allowed=f"at most {self.rows}: batch × beams")
        if not length and not self._prompt:
            self._release()  # those of a forward without tokens
        if self.requests and batch != len(self.requests):
            raise RequestError(
                got=f"{batch} rows", where="KVCache", allowed=f"{len(self.requests)}, as before", hint="reset() first."
            )
        while len(self.requests) < batch:
            self.requests.append(self.kv.admit())
        self._shape = (batch, new)
        tokens = dict.fromkeys(self.requests, new)
        step = self._kv.step(tokens, batch * new, batch) if kept else self._kv.step(tokens)
        self._known = length
        return step

    def _forget_step(self) -> Any:
        self._known = None
        step, self._step, self._layer_of, self.captured = self._step, None, None, None
        self._by_kind = False
        self.alike.clear()
        self._end_steady()
        self._begun, self._finished, self._handed_out, self._waiting = set(), set(), [], []
        self._forget_handed_out()
        return step

    def _end_steady(self) -> None:
        for shared in set(self.steady.values()):
            shared.end()
        self.steady.clear()

    def await_state(self, layer: Any) -> None:
        """Ask ``layer`` later whether the model wrote into the state that it was handed: see ``RecurrentLayer``."""
        self._awaited.append(layer)

    def _settle(self) -> None:
        """Store states that the model wrote into what it was handed; the last one of a forward ends it."""
        if self._awaited:
            awaited, self._awaited = self._awaited, []
            self._awaited = [layer for layer in awaited if not layer.settle()] if self._step is not None else []

    def _forget_handed_out(self) -> None:
        """What recurrent layers handed out is not what they hold now."""
        self._awaited = []
        for layer in self._recurrent:
            layer.forget()

    def _release(self) -> None:
        self._forget_handed_out()
        self._prompt = 0
        live = set(self.kv.requests)
        while self.requests:
            if self.requests[-1] in live:  # else an interrupted call has released it
                self.kv.release(self.requests[-1])
            self.requests.pop()

    def _check_closed(self, verb: str) -> None:
        """Refuse to change or copy rows that a forward may or may not have added to."""
        self._settle()
        if self._step is not None:
            self._refuse(verb)

    def _refuse(self, what: str) -> NoReturn:
        missing = sorted(self._storing - self._finished)
        raise StepError(
            got=f"{what} while a forward is open: layers {missing} have not stored its {self._shape[1]} tokens",
            where="KVCache",
            allowed="every layer's update once a forward, then the next",
            hint="If it failed, call abort() and run it again. If the model leaves layers out, lower num_hidden_layers "
            "of its configuration, or give a spec of the layers that it has (spec=).",
        )

    def _refuse_to_move(self, verb: str, layer: int) -> NoReturn:
        raise BackendError(
            got=f"{verb} of layer {layer}",
            where="KVCache",
            allowed=f"pools where they were planned: {self._settings.place}",
            hint='device="cpu" keeps all rows on the host; smaller formats make them fit.',
        )
