"""``KvcoreConnector``: vLLM's blocks in a store of kvcore's, verified whenever they come back.

For ``--kv-transfer-config`` with ``kv_connector: KvcoreConnector``, ``kv_connector_module_path:
kvcore.interop.vllm_connector``, ``kv_role: kv_both`` and ``kv_connector_extra_config: {folder: ..., bytes: ...}``.
Blocks are saved as soon as a prompt fills them, and loaded before the step that needs them. A page that is damaged is
not used: its block and those behind it are reported (``get_block_ids_with_load_errors``), and vLLM computes them.

vLLM is imported when the class is asked for; names are those of vLLM 0.33.
"""

# pyright: reportUntypedBaseClass=false

import importlib
from functools import cache
from typing import Any, NamedTuple

from kvcore.adoption import adopt
from kvcore.errors import SpecError
from kvcore.interop.stores import GIB, store_of
from kvcore.interop.vllm_config import names_from, spec_from, specs_of
from kvcore.requests.prefix import chain, seed_of
from kvcore.store.blocks import Blocks
from kvcore.store.store import About

WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of caches that keep all blocks of a request."""

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class Move(NamedTuple):
    """Blocks of a request on their way: their keys, and of those that are saved what events say."""

    request: str
    blocks: list[int]
    keys: list[bytes]
    about: list[About]


class Known(NamedTuple):
    """What the scheduler's side knows of a request: prompt, keys of its full blocks, and its blocks so far."""

    tokens: list[int]
    keys: list[bytes]
    blocks: list[int]


def __getattr__(name: str) -> Any:
    if name == "KvcoreConnector":
        return connector()
    raise AttributeError(name)


@cache
def connector() -> Any:
    """The class, over vLLM's ``KVConnectorBase_V1``."""
    base: Any = importlib.import_module(BASE)

    class Metadata(base.KVConnectorMetadata):
        """A step's loads and saves."""

        def __init__(self, loads: list[Move], saves: list[Move]) -> None:
            self.loads = loads
            self.saves = saves

    class KvcoreConnector(base.KVConnectorBase_V1):
        """See the module. One KV-cache group, all of whose components lie in blocks."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
            _check_one_table(kv_cache_config)
            told: dict[str, Any] = {"index": extra.get("index"), "formats": extra.get("formats")}
            self.spec = spec_from(kv_cache_config, **told)
            self._names = names_from(kv_cache_config, **told)
            self.store = store_of(extra, host_bytes=4 * GIB)
            self._known: dict[str, Known] = {}
            self._saved: dict[str, int] = {}
            self._loads: list[Move] = []
            self._blocks: Blocks | None = None
            self._layout: str | None = extra.get("layout")
            self._bad: set[int] = set()

        # The scheduler's side.

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            """Tokens in the store beyond those that are computed; never all of a prompt."""
            known, size = self._request(request), self.spec.block_tokens
            if num_computed_tokens % size or not known.keys:
                return 0, False
            there = self.store.longest(known.keys[: (len(known.tokens) - 1) // size]) * size
            return max(0, there - num_computed_tokens), False

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            """Note which blocks are to be loaded."""
            known, size = self._request(request), self.spec.block_tokens
            known.blocks[:] = list(blocks.get_block_ids()[0])
            if num_external_tokens:
                first = request.num_computed_tokens // size
                part = slice(first, first + num_external_tokens // size)
                self._loads.append(Move(request.request_id, known.blocks[part], known.keys[part], []))

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            """What the worker is to load before, and to save behind the step."""
            for new in scheduler_output.scheduled_new_reqs:
                if new.req_id in self._known:
                    self._known[new.req_id].blocks[:] = list(new.block_ids[0])
            cached = scheduler_output.scheduled_cached_reqs
            for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if name in self._known and more is not None:
                    held = self._known[name].blocks
                    held[:] = list(more[0]) if name in cached.resumed_req_ids else [*held, *more[0]]
            computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
            computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            saves = [
                self._save(name, computed.get(name, 0), count)
                for name, count in scheduler_output.num_scheduled_tokens.items()
                if name in self._known
            ]
            loads, self._loads = self._loads, []
            return Metadata(loads, [move for move in saves if move.keys])

        def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
            """Forget it; its blocks are free at once."""
            del block_ids
            self._known.pop(request.request_id, None)
            self._saved.pop(request.request_id, None)
            return False, None

        def _request(self, request: Any) -> Known:
            name = request.request_id
            if name not in self._known:
                tokens: list[int] = list(request.prompt_token_ids or ())
                lora = getattr(request, "lora_request", None)
                salt = getattr(request, "cache_salt", None)
                if lora is not None:
                    salt = f"{salt or ''}/{lora.lora_name}"
                # What else a key would have to say is not in the tokens.
                plain = not getattr(request, "mm_features", None) and getattr(request, "prompt_embeds", None) is None
                keys = chain(seed_of(self.spec), tokens if plain else [], self.spec.block_tokens, salt)
                self._known[name] = Known(tokens, list(keys), [])
            return self._known[name]

        def _save(self, name: str, computed: int, count: int) -> Move:
            """The blocks that a step of so many tokens fills: once more those that are computed again."""
            known, size = self._known[name], self.spec.block_tokens
            first = min(self._saved.get(name, 0), computed // size)
            last = min((computed + count) // size, len(known.keys), len(known.blocks))
            self._saved[name] = max(first, last)
            about = [
                About(known.keys[at - 1] if at else None, known.tokens[at * size : (at + 1) * size], size)
                for at in range(first, last)
            ]
            return Move(name, known.blocks[first:last], known.keys[first:last], about)

        # The worker's side.

        def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
            """Adopt the engine's tensors."""
            missing = [name for name in self._names if name not in kv_caches]
            if missing:
                raise SpecError(
                    got=f"no tensor of {missing[0]!r}", where="register_kv_caches", allowed="one of every layer"
                )
            tensors = [kv_caches[name] for name in self._names]
            self._blocks = Blocks(adopt(self.spec, tensors, layout=self._layout), self.store)

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            """Load all of a step's blocks; those that do not verify are reported."""
            del forward_context, kwargs
            for move in self._get_connector_metadata().loads:
                self._bad.update(self._worker().load(move.blocks, move.keys))

        def wait_for_layer_load(self, layer_name: str) -> None:
            """They are there already."""

        def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
            """Blocks are saved with all their layers."""

        def wait_for_save(self) -> None:
            """Save what the step filled, but for what was to be loaded and was not."""
            bad = self._bad
            for move in self._get_connector_metadata().saves:
                good = next((at for at, block in enumerate(move.blocks) if block in bad), len(move.blocks))
                self._worker().save(move.blocks[:good], move.keys[:good], move.about[:good])

        def get_block_ids_with_load_errors(self) -> set[int]:
            """Blocks that were not filled, once."""
            bad, self._bad = self._bad, set()
            return bad

        def _worker(self) -> Blocks:
            if self._blocks is None:
                raise RuntimeError("register_kv_caches was not called")
            return self._blocks

    return KvcoreConnector


def _check_one_table(config: Any) -> None:
    """Refuse what blocks by number do not hold whole: groups with block tables of their own, and windows.

    Raises:
        SpecError: naming them.
    """
    groups = config.kv_cache_groups
    if len(groups) != 1:
        raise SpecError(
            got=f"{len(groups)} KV-cache groups, of {', '.join(group.layer_names[0] for group in groups)} and others",
            where="KvcoreConnector",
            allowed="one group, whose layers share a block table",
            hint="Windows, tails and states have tables of their own: kvcore.adopt takes them in pages.",
        )
    for name, kind in specs_of(config):
        # Blocks behind a window are taken away, and their numbers become that of an empty one.
        if type(kind).__name__ not in WHOLE:
            raise SpecError(
                got=f"{name}, a {type(kind).__name__}",
                where="KvcoreConnector",
                allowed=f"{' or '.join(WHOLE)}, all of whose blocks are kept",
                hint="--disable-hybrid-kv-cache-manager makes vLLM keep those of windows.",
            )
