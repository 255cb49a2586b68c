"""``KVCache``: a kvcore cache that a ``transformers`` model takes as ``cache=``.

One forward of the model is one kvcore step over all rows of the batch. The step opens at the first layer's update and
commits when the last layer has what it needs. A forward that fails in between leaves the cache as it was: at once if
the cache itself refused, else when the next forward (or crop, reset, reorder) begins. Until the commit
``get_seq_length`` answers with the length before the forward, which is what masks and positions are made from.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from transformers import Cache

from kvcore import Request, create_cache, to_numpy
from kvcore.errors import RequestError, SpecError, StepError
from kvcore.interop.transformers.layers import ClassicLayer, CompressedLayer, LatentLayer, Layer, MlaLayer, StaticLayer
from kvcore.interop.transformers.spec import cache_spec
from kvcore.interop.transformers.static import CACHES, NUMBERS
from kvcore.interop.transformers.tensors import ACCEPTED, to_torch, uses_torch

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class KVCache(Cache):
    """A preallocated, quantised, portable cache for one model and one batch at a time.

    Attributes:
        kv: the kvcore cache: its spec, plan, pools, digest, save and export.
        requests: one kvcore request for every row of the batch; empty before the first forward.
        rows: most rows of a batch.
        max_length: tokens that every row can hold.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch: int,
        max_length: int,
        beams: int = 1,
        formats: str | Mapping[str, str] | None = None,
        backend: str = "torch_triton",
        device: str | None = None,
        block_tokens: int | None = None,
        max_draft_tokens: int = 0,
        static: bool = False,
        storage: Literal["paged", "slot"] | None = None,
        lend: bool = True,
        check: bool = False,
    ) -> None:
        """Plan and allocate.

        Args:
            model: a causal language model; its configuration, dtype and (for DeepSeek-V4) positional biases are read.
            batch: most sequences of a batch.
            max_length: most tokens of a sequence, padding and generated ones included.
            beams: rows of a sequence: ``num_beams`` of ``generate``. Above 1, every row gets a spare block, since beams
                that share a half-filled block copy it before they write.
            formats: see ``cache_spec``; the model's own dtype unless given.
            backend: any kvcore backend; where its arrays are not torch tensors, rows travel through the host.
            device: where the pools live; the model's device unless given.
            block_tokens: tokens of one block; rows are planned in whole blocks.
            max_draft_tokens: tokens that ``crop`` can undo in layers that overwrite old rows.
            static: shapes that do not depend on the number of tokens, so that ``torch.compile`` compiles a decode step
                once; classic layers only. ``generate`` then makes masks outside of compiled code.
            storage: ``paged``: rows of full attention lie in blocks, which beams and forks share; ``slot``: every row
                of every layer lies in its slot, room for ``max_length``, and the model attends to them where they are.
                Unless given, classic models without beams have slots for full attention, and rings for sliding layers,
                which then take no more than their window: twice on the CPU in a format that is lent, else once.
            lend: hand out the pools' own memory instead of copies where that is possible: on the CPU, of slots and
                rings, in the model's own format. It holds what it held until the next forward, which may overwrite a
                ring's oldest rows. Whoever writes to it changes the cache, as with the model's own.
            check: refuse non-finite rows; slower.

        Raises:
            SpecError: the model or a format is not supported. BackendError: the backend cannot run here.
        """
        if model.dtype not in DTYPES:
            raise SpecError(got=str(model.dtype), where="model.dtype", allowed=", ".join(map(str, DTYPES)))
        options: dict[str, Any] = {"default": DTYPES[model.dtype], "block_tokens": block_tokens}
        spec = cache_spec(model.config, formats, **options)
        classic = all(layer.kv is not None for layer in spec.layers)
        if storage == "slot" or (storage is None and classic and beams == 1):
            spec = cache_spec(model.config, formats, **options, storage="slot", rings=storage is None or static)
        rows = batch * beams
        blocks = -(-max_length // spec.block_tokens) + (beams > 1)
        paged = any(component.growth == "block" for _, _, component in spec.components())
        place = device or str(model.device)
        self.kv = create_cache(
            spec,
            backend=backend,
            device=place,
            max_requests=rows,
            # Blocks are planned for all rows together, contiguous rows for each slot.
            max_tokens=blocks * spec.block_tokens * (rows if paged else 1),
            max_draft_tokens=max_draft_tokens,
            # A head's rows side by side are what attention on a CPU reads.
            layout="by_head" if backend == "torch_triton" and place == "cpu" and classic else "auto",
            check=check,
        )
        self.requests: list[Request] = []
        self.rows = rows
        self.max_length = max_length
        rings = any(component.span is not None for _, _, component in spec.components())
        self.static = static
        self.lend = lend
        self.number = next(NUMBERS)
        CACHES[self.number] = self
        self.can_undo = max_draft_tokens > 0 or not rings
        self._device = model.device
        self._torch_pools = uses_torch(self.kv)
        self._step: Any = None
        self._shape = (0, 0)
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        super().__init__(layers=[self._layer(model, number) for number in range(len(spec.layers))])

    @property
    def length(self) -> int:
        """Tokens of every row, those of a forward under way not counted."""
        return self.requests[0].length if self.requests else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return self.kv.nbytes

    @contextmanager
    def forward(self, layer: int, states: torch.Tensor) -> Iterator[Any]:
        """The handle with which ``layer`` begins its part of a forward; an error in its body undoes the forward."""
        handle = self.begin(layer, states)
        try:
            yield handle
        except BaseException:
            self.abort()
            raise

    def begin(self, layer: int, states: torch.Tensor) -> Any:
        """The handle with which ``layer`` begins its part of a forward that brings states [B, heads, S, dim]."""
        batch, _, new, _ = states.shape
        shape = (batch, new)
        if layer in self._begun:
            self.abort()  # the forward that this layer began before never reached its end
        if self._step is None:
            self._step = self._open(*shape)
        if shape != self._shape:
            wanted = list(self._shape)
            self.abort()
            raise StepError(
                got=f"[batch, tokens] = {list(shape)}",
                where=f"KVCache, layer {layer}",
                allowed=f"{wanted}, as in the forward's first layer",
            )
        self._begun.add(layer)
        return self._step.layer(layer)

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

    def finish(self, layer: int) -> None:
        """Note that a layer has all it needs from this forward; the last one commits the step."""
        self._finished.add(layer)
        if len(self._finished) == len(self.layers):
            step = self._forget_step()
            step.commit()

    def abort(self) -> None:
        """Undo a forward that did not reach its end; nothing happens if there is none."""
        if self._step is not None:
            self._forget_step().abort()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row; 0 removes none.

        Raises:
            RollbackError: a layer has overwritten rows that would be needed; nothing is removed.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the negative number of tokens to remove, got {tokens_to_remove}")
        self.abort()
        target = self.length + tokens_to_remove
        for request in self.requests if tokens_to_remove else ():
            self.kv.truncate(request, target)

    def reset(self) -> None:
        """Forget every row; the next forward starts a new batch."""
        self.abort()
        for request in self.requests:
            self.kv.release(request)
        self.requests = []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row ``beam_idx[i]`` was; a row that is wanted twice is forked."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows named by number or by a mask."""
        numbers = torch.arange(len(self.requests), device=indices.device)[indices]
        self._select(numbers.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._select([row for row in range(len(self.requests)) for _ in range(repeats)])

    def give(self, tensor: torch.Tensor) -> Any:
        """A float tensor of the model as an array of the backend: fp32 and bf16 as they are, other dtypes as fp32."""
        if tensor.dtype not in ACCEPTED:
            tensor = tensor.float()
        # A torch backend detaches by itself.
        return tensor if self._torch_pools else self.kv.asarray(to_numpy(tensor.detach()))

    def take(self, array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An array of the backend as a tensor where the model is."""
        if self._torch_pools and array.dtype == dtype and array.device == self._device:
            return array
        return to_torch(array, device=self._device, dtype=dtype)

    def __enter__(self) -> "KVCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.reset()

    def __repr__(self) -> str:
        return f"KVCache({len(self.requests)} of {self.rows} rows, {self.length} tokens each, {self.kv!r})"

    def _layer(self, model: Any, number: int) -> Layer:
        spec = self.kv.spec.layers[number]
        if spec.kv is not None:
            return (StaticLayer if self.static else ClassicLayer)(self, number, spec.kv)
        if self.static:
            raise SpecError(got="static=True", where=self.kv.spec.path(number), allowed="classic layers with it")
        if spec.entries is not None and spec.window is None:
            return MlaLayer(self, number, spec)
        if spec.window is None:
            roles = ", ".join(role for role, _ in spec.components())
            raise SpecError(
                got=roles, where=self.kv.spec.path(number), allowed="kv, or a window with or without a tail"
            )
        if spec.tail is None:
            return LatentLayer(self, number, spec.window)
        return CompressedLayer(self, number, spec, model.get_decoder().layers[number].self_attn.compressor)

    def _open(self, batch: int, new: int) -> Any:
        """Open a step of ``new`` tokens for every row; the first one admits the rows."""
        if self.length == 0:
            self.reset()  # rows of a first forward that failed
        if self.requests and batch != len(self.requests):
            raise RequestError(
                got=f"{batch} rows", where="KVCache", allowed=f"{len(self.requests)}, as before", hint="reset() first."
            )
        if batch > self.rows:
            raise RequestError(got=f"{batch} rows", where="KVCache", allowed=f"at most {self.rows}: batch × beams")
        if not self.requests:
            self.requests = [self.kv.admit() for _ in range(batch)]
        self._shape = (batch, new)
        return self.kv.step(dict.fromkeys(self.requests, new))

    def _forget_step(self) -> Any:
        step, self._step = self._step, None
        self._begun, self._finished = set(), set()
        return step

    def _select(self, rows: Iterable[int]) -> None:
        rows = list(rows)
        if not self.requests:
            return
        if len(rows) > self.rows:
            raise RequestError(got=f"{len(rows)} rows", where="KVCache", allowed=f"at most {self.rows}: batch × beams")
        self.abort()
        # Rows that nobody wants are released first, so that forks never need more slots than the batch has.
        for number, request in enumerate(self.requests):
            if number not in rows:
                self.kv.release(request)
        placed: set[int] = set()
        chosen = []
        for number in rows:
            request = self.requests[number]
            chosen.append(self.kv.fork(request) if number in placed else request)
            placed.add(number)
        self.requests = chosen
