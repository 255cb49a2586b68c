"""``KvcoreConnector``: vLLM's blocks in a store of kvcore's, verified whenever they come back.

For ``--kv-transfer-config`` with ``kv_connector: KvcoreConnector``, ``kv_connector_module_path:
kvcore.interop.vllm_connector``, ``kv_role: kv_both`` and ``kv_connector_extra_config: {folder: ..., bytes: ...}``.
Blocks are saved as soon as a prompt fills them, and loaded before the step that needs them. A page that is damaged is
not used: its block and those behind it are reported (``get_block_ids_with_load_errors``), and vLLM computes them.

Of several groups, as hybrid models (their recurrent states among them) and windows have them, vLLM takes no reports of
blocks: there a request waits for its blocks (an asynchronous load, as vLLM calls it), and one whose blocks do not
verify is reported as a whole (``failed_recving``), computed from its beginning, and not loaded again.

vLLM is imported when the class is asked for; names are those of vLLM 0.33.
"""

# pyright: reportUntypedBaseClass=false

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from kvcore.adoption import adopt
from kvcore.errors import SpecError
from kvcore.interop.stores import GIB, store_of
from kvcore.interop.vllm_groups import Groups
from kvcore.store.blocks import Blocks
from kvcore.store.store import About, abouts

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"

LATENT_ROWS = "NL_X_NB_BS_HS"
"""The layout of rows [blocks, rows of a block, elements]."""

NOTHING = 0
"""The block that vLLM puts in the place of those before a window."""


class Move(NamedTuple):
    """Blocks of a request on their way: of which part, their keys, and what events say of them."""

    request: str
    part: int
    blocks: list[int]
    keys: list[bytes]
    about: list[About]


class Known(NamedTuple):
    """What the scheduler's side knows of a request: prompt, keys of its full blocks by part, its blocks by group."""

    tokens: list[int]
    keys: list[list[bytes]]
    blocks: list[list[int]]
    saved: list[int]
    """Blocks of every part up to which all were saved."""
    asked: set[int]
    """Hits that were waited for."""


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

    class KvcoreConnector(base.KVConnectorBase_V1, base.SupportsHMA):
        """See the module."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
            self.groups = Groups(kv_cache_config, {"index": extra.get("index"), "formats": extra.get("formats")})
            self.store = store_of(extra, host_bytes=4 * GIB)
            self._tables = len(kv_cache_config.kv_cache_groups)
            self._known: dict[str, Known] = {}
            self._loads: list[Move] = []
            self._workers: list[Blocks] = []
            self._layout: Any = extra.get("layout")
            self._bad: set[int] = set()
            self._done: set[str] = set()
            self._failed: set[str] = set()

        # The scheduler's side.

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            """Tokens in the store beyond those that are computed; never all of a prompt."""
            known, groups = self._request(request), self.groups
            if num_computed_tokens % groups.step:
                return 0, False
            has = self.store.look_up([key for keys in known.keys for key in keys])
            there = groups.hit(known.keys, max(0, len(known.tokens) - 1), has)
            if there <= num_computed_tokens or (not groups.alone and there in known.asked):
                return 0, False
            return there - num_computed_tokens, not groups.alone

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            """Note which blocks are to be loaded."""
            known = self._request(request)
            for held, given in zip(known.blocks, blocks.get_block_ids(), strict=True):
                held[:] = list(given)
            if not num_external_tokens:
                return
            start = request.num_computed_tokens
            end = start + num_external_tokens
            known.asked.add(end)
            for number, part in enumerate(self.groups.parts):
                table, keys = known.blocks[part.group], known.keys[number]
                columns = [at for at in self.groups.columns(number, start, end) if table[at] != NOTHING]
                wanted = [table[at] for at in columns], [keys[at] for at in columns]
                about = abouts(keys, known.tokens, part.block, columns)
                self._loads.append(Move(request.request_id, number, *wanted, about))

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            """What the worker is to load before, and to save behind the step."""
            for new in scheduler_output.scheduled_new_reqs:
                if new.req_id in self._known:
                    for held, given in zip(self._known[new.req_id].blocks, new.block_ids, strict=True):
                        held[:] = list(given)
            cached = scheduler_output.scheduled_cached_reqs
            for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if name in self._known and more is not None:
                    again = name in cached.resumed_req_ids
                    for held, given in zip(self._known[name].blocks, more, strict=True):
                        held[:] = list(given) if again else [*held, *given]
            computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
            computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            saves = [
                self._save(name, number, computed.get(name, 0), count)
                for name, count in scheduler_output.num_scheduled_tokens.items()
                if name in self._known
                for number in range(len(self.groups.parts))
            ]
            loads, self._loads = self._loads, []
            return Metadata(loads, [move for move in saves if move.keys])

        def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
            """Forget it; its blocks are free at once."""
            del block_ids
            self._known.pop(request.request_id, None)
            return False, None

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
            """The same of several groups."""
            return self.request_finished(request, block_ids)

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
                keys = self.groups.keys(tokens if plain else [], salt)
                tables: list[list[int]] = [[] for _ in range(self._tables)]
                self._known[name] = Known(tokens, keys, tables, [0] * len(keys), set())
            return self._known[name]

        def _save(self, name: str, number: int, computed: int, count: int) -> Move:
            """The blocks of a part that a step of so many tokens fills: once more those that are computed again."""
            known, part = self._known[name], self.groups.parts[number]
            table, keys, size = known.blocks[part.group], known.keys[number], part.block
            first = min(known.saved[number], computed // size)
            last = min((computed + count) // size, len(keys), len(table))
            known.saved[number] = max(first, last)
            # Blocks before a window are somebody else's by now; those of this step's tokens are not.
            first = first if part.window is None else max(first, computed // size)
            columns = [
                at
                for at in range(first, last)
                if table[at] != NOTHING and self.groups.kept(number, at) and part.full(at, computed + count)
            ]
            about = abouts(keys, known.tokens, size, columns)
            return Move(name, number, [table[at] for at in columns], [keys[at] for at in columns], about)

        # The worker's side.

        def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
            """Adopt the engine's tensors."""
            names = [name for part in self.groups.parts for name in part.names]
            missing = [name for name in names if name not in kv_caches]
            if missing:
                raise SpecError(
                    got=f"no tensor of {missing[0]!r}", where="register_kv_caches", allowed="one of every layer"
                )
            self._workers = [
                Blocks(adopt(part.spec, part.tensors(kv_caches), layout=self._laid(part)), self.store)
                for part in self.groups.parts
            ]

        def _laid(self, part: Any) -> Any:
            """How a part's tensors are laid out, of what is told by role or for all; of states there is one way."""
            told = self._layout
            if part.pieces:
                return LATENT_ROWS
            return told if part.alone or not isinstance(told, Mapping) else told.get(part.role)

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            """Load all of a step's blocks; those that do not verify, or their requests, are reported."""
            del forward_context, kwargs
            for move in self._get_connector_metadata().loads:
                bad = self._worker(move.part).load(move.blocks, move.keys, move.about)
                if self.groups.alone:
                    self._bad.update(bad)
                else:
                    self._done.add(move.request)
                    self._failed.update([move.request] if bad else [])

        def wait_for_layer_load(self, layer_name: str) -> None:
            """They are there already."""

        def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
            """Blocks are saved with all their layers."""

        def wait_for_save(self) -> None:
            """Save what the step filled, but for what was to be loaded and was not."""
            bad = self._bad
            for move in self._get_connector_metadata().saves:
                good = next((at for at, block in enumerate(move.blocks) if block in bad), len(move.blocks))
                self._worker(move.part).save(move.blocks[:good], move.keys[:good], move.about[:good])

        def get_block_ids_with_load_errors(self) -> set[int]:
            """Blocks that were not filled, once; of one group."""
            bad, self._bad = self._bad, set()
            return bad

        def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
            """Nobody waits for what is saved; who waited for blocks has them, or is told that it has not."""
            del finished_req_ids
            done, self._done = self._done, set()
            return None, done or None

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            """The same, and whose blocks did not verify."""
            _, done = self.get_finished(finished_req_ids)
            failed, self._failed = self._failed, set()
            return base.KVConnectorTransferResults(finished_recving=done or set(), failed_recving=failed)

        def _worker(self, part: int) -> Blocks:
            if not self._workers:
                raise RuntimeError("register_kv_caches was not called")
            return self._workers[part]

    return KvcoreConnector
