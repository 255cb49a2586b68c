"""What ``dir()`` shows of the objects that users hold: the names that the design fixes, and extensions with a reason.

The lists are written out, so that a name cannot become public, or vanish, without somebody deciding it here.
"""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvcore
from kvcore.cache import LayerHandle, Step
from kvcore.spec import presets

CACHE = {
    "admit", "asarray", "backend", "checkpoint", "digest", "export_request", "fork", "free_blocks", "free_slots",
    "import_request", "nbytes", "ops", "plan", "pools", "release", "requests", "restorable", "save", "spec", "step",
    "truncate",
}  # fmt: skip
STEP = {"index", "layer", "positions", "request_index"}
HANDLE = {
    "append_index_tail", "append_kv", "append_tail", "append_window", "attend", "closed", "compress", "digest",
    "entries_view", "flush", "gather_all_entries", "gather_all_index_keys", "gather_entries", "gather_kv",
    "gather_rows", "gather_window", "index_scores", "indexer_view", "mask", "select", "store_entries", "window_view",
}  # fmt: skip
REQUEST = {"cached_tokens", "id", "length", "slot"}
MODULE = {
    "BackendInfo", "Cache", "CacheSpec", "LayerSpec", "Periodic", "Request", "__version__", "create_cache", "errors",
    "hookimpl", "load", "plan", "plugins", "spec", "to_numpy", "use_backend",
}  # fmt: skip
ERRORS = {
    "BackendError", "FaultError", "KvcoreError", "NonFiniteError", "OutOfBlocks", "OutOfSlots", "RequestError",
    "RollbackError", "ShapeError", "SnapshotError", "SpecError", "StepError", "TransferError",
}  # fmt: skip

ADOPTED = {
    "compare": "holds rows against what the owner reads: a wrong layout of the right shape shows in nothing else",
    "descriptor": "says to others where the rows lie",
    "give": "the owner allots blocks as a request grows",
}
"""What a cache over somebody else's memory has beside those of a cache, and why."""

# Names beyond the design -> why a user needs them.
EXTENSIONS = {
    "kvcore": {"adopt": "an engine's memory, where it lies, with the verbs of a cache"},
    "Cache": {
        "block_statistics": "evictions and hits of prefix reuse, for monitoring",
        "blocks_needed": "a scheduler keeps blocks back for those that run",
        "faults": "what canary found, and what is not as it was written now",
        "fits": "a scheduler asks before it admits",
        "reset_prefix_cache": "after an update of the weights nothing old may be found",
        "exclusive": "what moves requests in ways of its own does it in a turn of its own",
        "damaged": "the pages that load(strict=False) left out",
        "turn_timeout": "a server's thread waits for another's step no longer than it may",
    },
    "Step": {
        "abort": "a step that spans several calls of a model cannot be a with block",
        "cache": "functions that are given the step alone find its spec, pools and ops",
        "commit": "as abort",
        "from_batch": "a padded batch of a model becomes rows in step order",
        "to_batch": "and back",
    },
    "LayerHandle": {
        "append": "all rows of a layer's step, or none of them, in one call",
        "fetch": "entries that are in the host's memory come as queries pick them",
        "decode": "a layer's step in one call, whose checks and launches are looked up once",
        "index_select": "score and select without all scores in memory",
        "append_rows": "components that outside code defines have no verb of their own",
        "read_state": "recurrent layers go on from it",
        "state_view": "without a copy where it lies in one piece",
        "write_state": "of a prompt they give the state after its last token",
        "append_state": "of drafts the state after each",
        "append_conv": "short convolutions beside them",
        "gather_conv": "and the inputs that those need",
        "append_kv_view": "a decode step whose attention is the caller's, without copies",
        "kv_view": "rows to read in place",
        "visible_rows": "the mask with the positions that it was made from",
    },
    "Request": {
        "approximate": "rows of an approximate replay are told from those of an uninterrupted run",
        "converted": "rows that were coded anew on their way are told from those that were computed",
        "blocks": "block tables of outside kernels",
        "generation": "tells a reused slot from the one that was given back",
        "salt": "whose prefixes it may share",
        "tokens": "ids that prefix reuse and exports go by",
    },
}


def shown(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


@pytest.fixture
def cache() -> kvcore.Cache:
    return kvcore.create_cache(presets.deepseek_v4_flash_tiny(), backend="reference", max_requests=1, max_tokens=128)


def test_a_cache_and_its_requests(cache):
    assert shown(cache) == CACHE | set(EXTENSIONS["Cache"])
    assert shown(cache.admit()) == REQUEST | set(EXTENSIONS["Request"])
    # Attributes of an object are not shown by its class, of which a reader of the API's page sees the members.
    assert shown(kvcore.Cache) <= shown(cache)


def test_an_adopted_cache_has_three_names_more():
    spec = presets.classic(layers=1, key_heads=1, key_dim=4, block_tokens=4, key_format="fp32")
    adopted = kvcore.adopt(spec, [np.zeros((3, 2, 4, 1, 4), np.float32)])
    assert shown(adopted) == CACHE | set(EXTENSIONS["Cache"]) | set(ADOPTED)


def test_a_step_and_its_handles(cache):
    with cache.step({}) as step:
        assert shown(step) == STEP | set(EXTENSIONS["Step"])
        assert shown(step.layer(0)) == HANDLE | set(EXTENSIONS["LayerHandle"])
    assert shown(Step) <= shown(step)
    assert shown(LayerHandle) == HANDLE | set(EXTENSIONS["LayerHandle"])


def test_every_name_is_explained(cache):
    request = cache.admit()
    with cache.step({}) as step:
        for value in (cache, request, step, step.layer(0)):
            kind = type(value)
            attributes = set(re.findall(r"^    +(\w+): ", inspect.getdoc(kind) or "", re.M))
            for name in shown(value) - attributes:
                assert inspect.getdoc(getattr(kind, name)), f"{kind.__name__}.{name}"


def test_the_page_of_the_api_has_every_class_with_what_it_inherits():
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
    for name in ("kvcore.Cache", "kvcore.Request", "kvcore.cache.Step", "kvcore.cache.LayerHandle"):
        assert f".. autoclass:: {name}\n   :members:\n   :inherited-members:\n" in page
    assert ":private-members:" not in page
    named = set(re.findall(r"[\w.]+", page))
    elsewhere = {"CacheSpec", "LayerSpec", "__version__", "errors", "hookimpl", "plan", "plugins", "spec"}
    assert {f"kvcore.{name}" for name in MODULE - elsewhere} <= named


def test_extensions_are_told_apart_from_the_design_and_have_a_reason():
    for fixed, extensions in zip((MODULE, CACHE, STEP, HANDLE, REQUEST), EXTENSIONS.values(), strict=True):
        assert not fixed & set(extensions)
        assert all(extensions.values())


def test_the_module_has_the_fixed_names_and_every_error():
    assert set(kvcore.__all__) == MODULE | ERRORS | set(EXTENSIONS["kvcore"])
    assert set(dir(kvcore)) == set(kvcore.__all__)
    for name in ERRORS:
        assert getattr(kvcore, name) is getattr(kvcore.errors, name)
        assert issubclass(getattr(kvcore, name), kvcore.KvcoreError)
    classes = {name for name, value in vars(kvcore.errors).items() if isinstance(value, type)}
    assert classes & ERRORS == {name for name in classes if issubclass(getattr(kvcore.errors, name), Exception)}


def test_errors_are_loaded_at_first_use():
    code = "import sys, kvcore; before = 'kvcore.errors' in sys.modules; kvcore.OutOfBlocks; print(before)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
