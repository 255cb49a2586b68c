"""A model of transformers on a kvcore cache of many requests, for serving: one forward is one step of any of them.

``KVCache`` runs one batch, whose rows are as long as one another. Here a forward's tokens lie one after the other, as
they lie in a step: prompts, chunks of prompts, single tokens and drafts together, without padding. The model is called
as it is; while it runs, its attention layers are this module's: they store the step's keys and values and attend from
the cache, whatever its formats.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import torch
from transformers.modeling_utils import AttentionInterface

import kvcore
from kvcore import Cache, Request
from kvcore.cache import Step
from kvcore.counts import as_count
from kvcore.errors import BackendError, ShapeError, SpecError, StepError
from kvcore.interop.transformers.prepared import PreparedProducts
from kvcore.interop.transformers.spec import Formats, cache_spec, decoder_of
from kvcore.interop.transformers.tensors import ACCEPTED, DTYPES, to_torch
from kvcore.requests.tokens import token_ids
from kvcore.spec import CacheSpec, from_hf_config

NAME = "kvcore_packed"
"""What transformers calls the attention of a step."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float | None], torch.Tensor]
"""Layer, q, k, v [T, heads, dim], sinks, scale -> out [T, heads, dim]: store, then attend."""

RUNNING: ContextVar[Attend | None] = ContextVar("kvcore_packed", default=None)
"""How the forward that runs in this thread attends."""

CLASSIC = (("kv",), ("kv_tail", "kv"))
"""Components of a layer that is served."""

UNKNOWN = ("softcap", "position_bias")
"""What some models ask of attention, and a cache's attention does not do."""


class PackedModel:
    """A causal language model whose forwards are steps of a cache. Full, sliding and chunked attention, and sinks.

    Attributes:
        model: the model, which stays what it is: outside of ``logits`` and ``forward`` it can be used as before.
        captured: numbers of tokens for which a CUDA graph is made; see ``__init__``.

    Example:
        ```python
        packed = PackedModel(model)
        cache = packed.create_cache(max_requests=64, max_tokens=65536, prefix="full")
        request = cache.admit(prompt)
        logits = packed.logits(cache, {request: prompt[request.length :]})  # [1, vocabulary]
        ```
    """

    def __init__(self, model: Any, *, captured: Sequence[int] = (), prepared: bool = False) -> None:
        """Look at the model; nothing is allocated.

        Args:
            model: a causal language model of transformers.
            captured: on CUDA, numbers of token rows for which a graph of the whole forward is captured at first use. A
                step of fewer tokens than one of them is padded to the smallest such and replayed; larger ones run as
                they are. A decode step of 64 requests wants a number above 64.
            prepared: on a CPU, for a model in fp32: hold the weights of its linear layers once more, as oneDNN
                multiplies them fastest. Weights that change are prepared anew, but not where they are written to
                through ``.data``. Products round otherwise than the model's own.

        Raises:
            SpecError: the model is none of transformers, or of a dtype that no cache takes. ShapeError: ``captured``
            are no counts above 1. BackendError: ``prepared``, where it cannot be.
        """
        missing = [name for name in ("config", "dtype", "device") if not hasattr(model, name)]
        if missing or model.dtype not in DTYPES:
            got = f"{type(model).__name__} without {', '.join(missing)}" if missing else str(model.dtype)
            allowed = "a model of transformers in fp32, bf16 or fp16"
            raise SpecError(got=got, where="PackedModel: model", allowed=allowed)
        sizes = [as_count(size, 2) for size in captured]
        if None in sizes:
            raise ShapeError(got=list(captured), where="PackedModel: captured", allowed="numbers of tokens, 2 or more")
        self.model = model
        self.captured = tuple(sorted(size for size in sizes if size is not None))
        self._graphs: WeakKeyDictionary[Cache, dict[int, _Graph]] = WeakKeyDictionary()
        self._products = PreparedProducts(model).used if prepared else nullcontext
        self._keeps_some = bool(getattr(model, "_supports_logits_to_keep", bool)())

    @property
    def captures(self) -> bool:
        """Whether steps can be captured where the model is."""
        return self.model.device.type == "cuda"

    def spec(self, formats: Formats | None = None, *, block_tokens: int | None = None) -> CacheSpec:
        """What a cache for the model holds.

        Args:
            formats: as for ``cache_spec``; the model's own dtype unless given.
            block_tokens: tokens of one block.

        Raises:
            SpecError: a layer is not classic attention with keys and values of its own, or ``formats`` is wrong.
        """
        config = decoder_of(self.model.config)
        spec = cache_spec(config, formats, default=DTYPES[self.model.dtype], block_tokens=block_tokens)
        for number, layer in enumerate(spec.layers):
            if layer.roles not in CLASSIC:
                raise SpecError(
                    got=", ".join(layer.roles) or "nothing",
                    where=spec.path(number),
                    allowed="kv: classic attention in every layer",
                    hint="KVCache runs the model, one batch at a time.",
                )
        # Chunks begin where a request's first token lies, since nothing is padded.
        chunks = [layer.kv and layer.kv.chunk for layer in from_hf_config(config).layers]
        layers = [
            msgspec.structs.replace(layer, kv=msgspec.structs.replace(layer.kv, window=None, chunk=chunk))
            if chunk and layer.kv
            else layer
            for layer, chunk in zip(spec.layers, chunks, strict=False)
        ]
        return msgspec.structs.replace(spec, layers=tuple(layers))

    def create_cache(
        self,
        formats: Formats | None = None,
        *,
        block_tokens: int | None = None,
        backend: str = "torch_triton",
        **options: Any,
    ) -> Cache:
        """A cache for the model, on its device.

        Args:
            formats: as for ``spec``.
            block_tokens: as for ``spec``.
            backend: any; where its arrays are no torch tensors, rows travel through the host.
            options: of ``kvcore.create_cache``: ``max_requests``, ``max_tokens``, ``prefix`` and so on.

        Raises:
            SpecError, BackendError, OutOfBlocks: as ``spec`` and ``kvcore.create_cache``.
        """
        options.setdefault("device", str(self.model.device) if backend == "torch_triton" else None)
        spec = self.spec(formats, block_tokens=block_tokens)
        return kvcore.create_cache(spec, backend=backend, **options)

    def logits(
        self, cache: Cache, batch: Mapping[Request, Sequence[int]], last: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run one step, from opening to commit.

        Args:
            cache: of a spec that ``spec`` gave.
            batch: new token ids of every request.
            last: of how many of each request's last tokens logits are wanted, in the order of ``batch``: 0 in the
                middle of a prompt, one more than the drafts where there are some. One each unless given.

        Returns:
            [sum(last), vocabulary], in order. Captured steps write the next one's over them.

        Raises:
            OutOfBlocks, RequestError, StepError: as ``cache.step``. ShapeError: ids or ``last`` are wrong.
            BackendError: the model's attention asks for what a cache's does not do.
            After any of them, and after an error in the model, nothing has changed.
        """
        ids = [token_ids(tokens, "PackedModel.logits: batch") for tokens in batch.values()]
        rows = _last_rows([len(tokens) for tokens in ids], last)
        size = self._size(cache, [len(tokens) for tokens in ids])
        requests = None if size is None else min(size, cache.plan.slots + 1)
        with cache.step(dict(zip(batch, ids, strict=True)), size, requests) as step:
            flat = [token for tokens in ids for token in tokens]
            if size is None:
                return self.forward(step, flat, rows)
            return self._replay(step, flat, rows, size)

    def forward(self, step: Step[Any], ids: Sequence[int], rows: Sequence[int] | None = None) -> torch.Tensor:
        """Run the model in an open step, which stays open; for callers that do more in it.

        Args:
            step: of a cache of a spec that ``spec`` gave.
            ids: of all its tokens, in step order.
            rows: tokens whose logits are wanted, by their place in ``ids``; all unless given.

        Returns:
            [len(rows), vocabulary].

        Raises:
            ShapeError: another number of ids than the step has tokens. BackendError: as ``logits``.
        """
        device, dtype = self.model.device, self.model.dtype
        positions = to_torch(step.positions, device=device, dtype=torch.long).clamp(min=0)
        if len(ids) != len(positions):
            raise ShapeError(got=f"{len(ids)} ids", where="PackedModel.forward", allowed=f"{len(positions)}")
        give, take = _exchange(step.cache, device, dtype)

        def attend(number: int, q: Any, k: Any, v: Any, sink: Any, scale: float | None) -> torch.Tensor:
            layer = step.layer(number)
            layer.append_kv(give(k), give(v))
            return take(layer.attend(give(q), sink=None if sink is None else give(sink), scale=scale).out)

        wanted = None if rows is None else torch.tensor(rows, dtype=torch.long, device=device)
        return self._run(torch.tensor(ids, dtype=torch.long, device=device), positions, wanted, attend)

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, attend: Attend
    ) -> torch.Tensor:
        """Logits of ``rows``, all if None, of a forward that attends by ``attend``."""
        some = {} if rows is None or not self._keeps_some else {"logits_to_keep": rows}
        config, token = self.model.config, RUNNING.set(attend)
        before = config._attn_implementation  # pyright: ignore[reportPrivateUsage]
        try:
            config._attn_implementation = NAME
            with torch.no_grad(), self._products():
                found = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **some).logits[0]
        finally:
            config._attn_implementation = before
            RUNNING.reset(token)
        return found if rows is None or some else found[rows]

    def _size(self, cache: Cache, counts: Sequence[int]) -> int | None:
        """The captured number of tokens that a step is padded to, or None where it runs as it is."""
        if not self.captures or not sum(counts):
            return None
        if any(layer.kv_tail is not None for layer in cache.spec.layers):
            # Rows of the open group lie elsewhere than those of closed ones, and how many there are changes.
            return None
        rings = any(component.span is not None for _, _, component in cache.spec.components())
        if rings and max(counts) > 1 + cache.plan.max_draft_tokens:
            return None
        # A row of padding at least: a step that is exactly full keeps what an abort would need.
        return next((size for size in self.captured if size > sum(counts)), None)

    def _replay(self, step: Step[Any], ids: Sequence[int], rows: Sequence[int], size: int) -> torch.Tensor:
        """The forward of a padded step by its graph, which is made at first use."""
        cache, graphs = step.cache, self._graphs.setdefault(step.cache, {})
        index = step.index
        if size not in graphs:
            graphs[size] = _Graph(torch.zeros((2, size), dtype=torch.long, device=self.model.device))
        graph = graphs[size]
        graph.given.copy_(torch.tensor([[*numbers, *[0] * (size - len(numbers))] for numbers in (ids, rows)]))

        def attend(number: int, q: Any, k: Any, v: Any, sink: Any, scale: float | None) -> torch.Tensor:
            cache.ops.append_kv(cache.pools, number, index, _taken(k), _taken(v))
            return cache.ops.attend_kv(cache.pools, number, index, _taken(q), sink=sink, scale=scale).out.to(q.dtype)

        def run() -> torch.Tensor:
            return self._run(graph.given[0], index.positions.long().clamp(min=0), graph.given[1], attend)

        if graph.graph is None:
            made, out = captured(run)
            graphs[size] = graph = graph._replace(graph=made, out=out)
        graph.graph.replay()
        # What a graph wrote counts as written by whoever assigns the pools.
        cache.pools = cache.pools
        return graph.out[: len(rows)]


class _Graph(NamedTuple):
    """A captured forward: token ids and wanted rows [2, size] that it reads, logits [size, vocabulary] that it writes.

    ``graph`` and ``out`` are None until it is captured.
    """

    given: torch.Tensor
    graph: Any = None
    out: Any = None


def captured(run: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """A graph of what ``run`` does on the GPU, which was not done yet, and the tensor that it writes."""
    # What kernels and libraries set up at their first call is set up before the capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()
    return graph, out


def _last_rows(counts: Sequence[int], last: Sequence[int] | None) -> list[int]:
    """The places, among all tokens of a step, of each request's last ones."""
    wanted = [min(1, count) for count in counts] if last is None else [as_count(number) for number in last]
    if len(wanted) != len(counts) or any(
        number is None or number > count for number, count in zip(wanted, counts, strict=True)
    ):
        allowed = "for every request a number of its new tokens"
        raise ShapeError(got=list(last or ()), where="PackedModel.logits: last", allowed=allowed)
    rows, end = list[int](), 0
    for count, number in zip(counts, wanted, strict=True):
        end += count
        rows += range(end - (number or 0), end)
    return rows


def _exchange(cache: Cache, device: torch.device, dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How tensors become arrays of the cache's backend, and come back in the model's dtype."""
    if all(isinstance(pool, torch.Tensor) for pool in cache.pools.values()):
        return _taken, lambda array: array if array.dtype == dtype else array.to(dtype)
    return (
        lambda tensor: cache.asarray(_taken(tensor).float().cpu().numpy()),
        lambda array: to_torch(array, device=device, dtype=dtype),
    )


def _taken(states: torch.Tensor) -> torch.Tensor:
    """States in a dtype that verbs take."""
    return states if states.dtype in ACCEPTED else states.float()


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every attention layer: q, k, v [1, heads, T, dim] -> out [1, T, heads, dim]."""
    attend = RUNNING.get()
    if attend is None:
        raise StepError(
            got=f"attn_implementation={NAME!r} outside of a step",
            where="PackedModel",
            allowed="PackedModel.logits and forward, which set and reset it",
        )
    asked = [name for name in UNKNOWN if options.get(name) is not None]
    if attention_mask is not None or asked or not getattr(module, "is_causal", True):
        raise BackendError(
            got=", ".join(asked) or "a mask, or attention that is not causal",
            where=f"PackedModel, layer {module.layer_idx}",
            allowed="causal attention with a scale and sinks",
            hint="KVCache runs the model, one batch at a time.",
        )
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(module.layer_idx, q, k, v, s_aux, scaling)[None], None


AttentionInterface.register(NAME, attention)
