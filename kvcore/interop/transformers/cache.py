"""``KVCache``: a kvcore cache that a ``transformers`` model takes as ``cache=``.

What its layers ask of it while a model runs, ``forwards`` has. Until a layer has stored a forward's tokens
``get_seq_length`` answers for it with the length before the forward, which is what masks and positions are made from;
afterwards it counts them, as transformers' own caches do.
"""

from collections.abc import Iterable, Iterator
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch

import kvcore
from kvcore import Request, load
from kvcore.counts import as_integer
from kvcore.errors import RequestError, ShapeError, SnapshotError
from kvcore.interop.transformers import reuse
from kvcore.interop.transformers import rows as wanted
from kvcore.interop.transformers.compiled import stored_before
from kvcore.interop.transformers.forwards import Forwards
from kvcore.interop.transformers.recurrent import RecurrentLayer
from kvcore.interop.transformers.settings import settings_of
from kvcore.interop.transformers.spec import Formats
from kvcore.interop.transformers.ways import Asked, explained
from kvcore.ops.results import Choice
from kvcore.portable.blob import copy_request
from kvcore.requests.prefix import Policy
from kvcore.spec import CacheSpec


class KVCache(Forwards):
    """A preallocated, quantised, portable cache for one model and one batch at a time.

    ``copy.deepcopy`` makes an independent cache with the same rows, for several questions about one prompt.

    Attributes:
        requests: one kvcore request for every row of the batch; empty before the first forward.
        rows: most rows of a batch.
        max_length: tokens that every row can hold; a forward that brings more is refused before it stores any.
        dtype: the model's, of what is handed out.
        device: where the model is.
        layers: what the model calls, one for every layer of the spec.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch: int,
        max_length: int,
        beams: int = 1,
        formats: Formats | None = None,
        backend: str = "torch_triton",
        device: str | None = None,
        block_tokens: int | None = None,
        max_draft_tokens: int = 0,
        static: bool = False,
        storage: Literal["paged", "slot"] | None = None,
        zero_copy: bool = True,
        check: bool = False,
        spec: CacheSpec | None = None,
        attention: Asked = "auto",
        prefix: Policy = "off",
        prefix_tokens: int = 0,
    ) -> None:
        """Plan and allocate.

        Args:
            model: a causal language model; its configuration, dtype and (for DeepSeek-V4) positional biases are read.
            batch: most sequences of a batch.
            max_length: most tokens of a sequence, padding, generated ones and drafts under way included.
            beams: rows of a sequence: ``num_beams`` of ``generate``. Above 1, every row gets a spare block, since beams
                that share a half-filled block copy it before they write.
            formats: by role, by layer or by both, see ``cache_spec``; the model's own dtype unless given.
            backend: any kvcore backend; where its arrays are not torch tensors, rows travel through the host.
            device: where the pools live; the model's device unless given.
            block_tokens: tokens of one block; rows are planned in whole blocks.
            max_draft_tokens: tokens that ``crop`` can undo in layers that overwrite old rows.
            static: shapes that do not depend on the number of tokens, so that ``torch.compile`` compiles a decode step
                once; classic layers and latent attention without an indexer. ``generate`` then makes masks outside of
                compiled code.
            storage: ``paged``: rows of full attention lie in blocks, which beams and forks share; ``slot``: every row
                of every layer lies in its slot, room for ``max_length``, and the model attends to them where they are.
                Unless given, classic models without beams have slots for full attention, and rings for sliding layers,
                which then take no more than their window, nor than ``max_length``: twice on the CPU in a format that
                needs no decoding, else once.
            zero_copy: hand out the pools' own memory instead of copies where that is possible: on the CPU, of slots and
                rings, in the model's own format. It holds what it held until the next forward, which may overwrite a
                ring's oldest rows. Whoever writes to it changes the cache, as with the model's own.
            check: refuse non-finite rows; slower.
            spec: of a model that ``cache_spec`` does not know, or to say more than ``formats`` and ``storage`` can. It
                is held against the model's configuration; heads and dims against the first keys and values.
            attention: who attends in the model's forwards. ``cache``: ours, from the rows as they lie, wherever it
                gives what the model's would; ``model``: the model's own, over rows that the cache hands out, to the
                bit what it gives with its own cache in the same format; ``auto``: whichever is faster. ``explain``
                says which, and why.
            prefix: ``full`` or ``kvcore.Periodic(n)``: prompts that ``admit`` is told may be found by later ones; full
                attention then has blocks. ``off``: nothing is.
            prefix_tokens: of earlier prompts that there is room for beside the rows' own.

        Raises:
            SpecError: the model, a format, a size or the spec is not supported. BackendError: the backend cannot run
            here.
        """
        self._set_up(
            settings_of(
                model,
                batch=batch,
                max_length=max_length,
                beams=beams,
                formats=formats,
                backend=backend,
                device=device,
                block_tokens=block_tokens,
                max_draft_tokens=max_draft_tokens,
                static=static,
                storage=storage,
                zero_copy=zero_copy,
                check=check,
                spec=spec,
                attention=attention,
                prefix=prefix,
                prefix_tokens=prefix_tokens,
            )
        )

    def explain(self) -> list[Choice]:
        """Who attends to each layer, for one new token and for several, and why; where the last forward fell back.

        ``kv.ops.explain()`` says the same of the verbs.
        """
        return explained(self._ways, self._refused)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """The same, whichever layer is asked, recurrent ones too; 0 of a layer that the model does not have.

        A layer that has stored its tokens of a forward under way counts them. While it is compiled, with ``static``, a
        tensor: compiled code is for every length.
        """
        if layer_idx >= len(self.layers):
            return 0
        if self.static and torch.compiler.is_compiling():
            return stored_before(self)
        return self.length + (self._shape[1] if layer_idx in self._begun else 0)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Position of the first query: ``get_seq_length``."""
        return self.get_seq_length(layer_idx)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return self.kv.nbytes

    @property
    def batch_size(self) -> int:
        """Rows of the batch, or -1 before the first forward."""
        return len(self.requests) or -1

    @property
    def max_batch_size(self) -> int:
        """Most rows of a batch: batch × beams."""
        return self.rows

    @property
    def is_initialized(self) -> bool:
        """Whether rows are stored: from the first forward until ``reset``."""
        return all(layer.is_initialized for layer in self.layers)

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """For every layer copies of its keys and values, and its window, each None where there is none."""
        for number, layer in enumerate(self.layers):
            keys, values = (layer.stored() if number in self._storing else None) or (None, None)
            window = getattr(layer, "window", None)
            yield keys, values, None if window is None else torch.tensor(window)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row; 0 removes none, more than there are all of them.

        Raises:
            RollbackError: a layer has overwritten rows that would be needed; nothing is removed.
            ShapeError: not a negative integer or 0. StepError: a forward is open.
        """
        removed = as_integer(tokens_to_remove)
        if removed is None or removed > 0:
            raise ShapeError(
                got=tokens_to_remove, where="crop", allowed="the tokens to remove as a negative integer, or 0"
            )
        self._check_closed("crop")
        target = max(self.length + removed, 0)
        for request in self.requests if removed else ():
            self.kv.truncate(request, target)
        self._forget_handed_out()
        if not target:
            self._release()

    def reset(self) -> None:
        """Forget every row; the next forward starts a new batch."""
        self.abort()
        self._release()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row ``beam_idx[i]`` was; a row that is wanted twice is forked.

        Raises:
            RequestError: a number of no row, or more rows than were planned. StepError: a forward is open.
        """
        self._check_closed("reorder_cache")
        if self.requests:
            self._select(wanted.in_order(beam_idx, len(self.requests)))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows that ``tensor[indices, ...]`` gives: of a tensor, list or tuple of numbers, or a mask.

        Raises:
            RequestError: no rows, or more than were planned. StepError: a forward is open.
        """
        self._check_closed("batch_select_indices")
        if self.requests:
            self._select(wanted.indexed(indices, len(self.requests)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times.

        Raises:
            RequestError: more rows than were planned. StepError: a forward is open.
        """
        self._check_closed("batch_repeat_interleave")
        if self.requests:
            self._select(wanted.repeated(repeats, len(self.requests)))

    def admit(self, tokens: Any, attention_mask: Any = None, *, salt: str | None = None) -> int:
        """Begin a batch with its prompts; what earlier ones left is taken over, and how many tokens that is returned.

        The model's forwards, or ``generate``, then begin behind them; of models with recurrent layers alone it must be
        handed the rest of the ids, as with any cache that is not empty. The prompts' blocks can be found by later ones,
        and, once all of a prompt is stored, the whole of it with all that windows and recurrent layers hold there.
        Other lengths of those are kept where a forward ends and ``prefix`` says so: ``generate`` cuts prompts by
        ``prefill_chunk_size``.

        Args:
            tokens: [rows, tokens]: ids of one length, padding at the left included: what the model is going to be run
                on; with beams, as many rows as it is run on.
            attention_mask: the same one as the model's; rows are found by prompts that are padded alike.
            salt: prefixes are shared under the same salt only: say what else the rows depend on, such as images.

        Raises:
            SpecError: the cache was made with ``prefix="off"``. ShapeError: no table of ids, or a mask that is not
            padding at the left. RequestError: this cache holds rows, or is too small. StepError: a forward is open.
        """
        self._check_closed("admit")
        if self.length:
            raise RequestError(
                got=f"{self.length} tokens", where="KVCache.admit", allowed="an empty cache", hint="reset() first."
            )
        prompts = reuse.prompts_of(tokens, attention_mask, self.rows, salt, self._settings.prefix)
        self._release()
        self.requests = reuse.admitted(self._kv, prompts)
        self._prompt = len(prompts[0].ids)
        return self.requests[0].length

    def save(self, path: str | PathLike[str]) -> None:
        """Write all rows to a verified snapshot, which ``load`` reads; see ``kvcore.Cache.save``.

        Raises:
            StepError: a forward is open. OSError, BackendError: as for ``kvcore.Cache.save``.
        """
        self._check_closed("save")
        self.kv.save(path, self.requests)

    def load(self, path: str | PathLike[str]) -> None:
        """Take in the rows that a cache of the same spec saved, on any backend; this cache must be empty.

        Masks, padding and token ids are the caller's to keep.

        Raises:
            SnapshotError: damaged, of another spec, or rows of several lengths. RequestError: this cache holds rows, or
            is too small. StepError: a forward is open. Nothing is changed by any of them.
        """
        self._check_closed("load")
        if self.length:
            raise RequestError(
                got=f"{self.length} tokens", where="KVCache.load", allowed="an empty cache", hint="reset() first."
            )
        saved = load(path, backend="reference")
        lengths = sorted({request.length for request in saved.requests})
        if len(lengths) > 1:
            raise SnapshotError(got=f"rows of {lengths} tokens", where=f"snapshot {path}", allowed="rows of one length")
        if len(saved.requests) > self.rows or lengths > [self.max_length]:
            raise RequestError(
                got=f"{len(saved.requests)} rows of {lengths[0]} tokens",
                where=f"snapshot {path}",
                allowed=f"at most {self.rows} rows (batch × beams) of {self.max_length} tokens (max_length)",
            )
        self._take_in(saved, saved.requests)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """A cache of its own with the same rows, settings and room.

        Raises:
            StepError: a forward is open.
        """
        self._check_closed("copy.deepcopy")
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied._set_up(self._settings)
        copied._take_in(self.kv, self.requests)
        for layer, mine in zip(copied.layers, self.layers, strict=True):
            if isinstance(layer, RecurrentLayer):
                layer.state_dtype = mine.state_dtype
        return copied

    def __copy__(self) -> NoReturn:
        """Refused: two caches cannot share their rows' lengths."""
        raise SnapshotError(got="copy.copy of a KVCache", where="KVCache", allowed="copy.deepcopy(cache)")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: a cache is as large as its pools, and belongs to a device."""
        raise SnapshotError(
            got="pickle of a KVCache",
            where="KVCache",
            allowed="cache.save(path), and load(path) of a KVCache made for the same model",
            hint="copy.deepcopy(cache) copies it in this process.",
        )

    def __enter__(self) -> "KVCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.reset()

    def __repr__(self) -> str:
        return f"KVCache({len(self.requests)} of {self.rows} rows, {self.length} tokens each, {self.kv!r})"

    def _take_in(self, other: kvcore.Cache, requests: Iterable[Request]) -> None:
        """Take the rows of another kvcore cache; all or none."""
        try:
            for request in requests:
                self.requests.append(copy_request(other, request, self.kv))
        except BaseException:
            self._release()
            raise

    def _select(self, rows: list[int]) -> None:
        if len(rows) > self.rows:
            raise RequestError(got=f"{len(rows)} rows", where="KVCache", allowed=f"at most {self.rows}: batch × beams")
        kept, chosen, placed = set(rows), list[Request](), set[int]()
        try:
            # Rows that nobody wants are released first, so that forks never need more slots than the batch has.
            for number, request in enumerate(self.requests):
                if number not in kept:
                    self.kv.release(request)
            for number in rows:
                request = self.requests[number]
                chosen.append(self.kv.fork(request) if number in placed else request)
                placed.add(number)
        except BaseException:
            # Interrupted half-way, when some rows are gone: an empty cache rather than one that is neither.
            self.requests = list(dict.fromkeys([*self.requests, *chosen]))
            self._release()
            raise
        self.requests = chosen
        self._forget_handed_out()
