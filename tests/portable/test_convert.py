"""A request in other formats: what a cache of these would hold of what is read; it says so, or is refused."""

import itertools
import json

import ml_dtypes
import numpy as np
import pytest

import kvcore
from kvcore import store
from kvcore.backends.reference import encoding
from kvcore.cli import main
from kvcore.errors import OutOfSlots, RequestError, RollbackError, SnapshotError, SpecError
from kvcore.portable import recode
from kvcore.portable.blob import copy_request
from kvcore.portable.convert import with_formats
from kvcore.spec import KV, CacheSpec, Entries, LayerSpec, Window, presets
from tests.support import portable_form, stories
from tests.support.backends_under_test import BACKENDS

TOKENS = 77
DRAW = np.random.default_rng(30)
K, V = (DRAW.standard_normal((TOKENS, 2, dim)).astype(np.float32) for dim in (32, 64))
SIDES = {
    "bf16": ("bf16", "bf16"),
    "fp32": ("fp32", "fp32"),
    "int8_row": ("int8_row", "bf16"),
    "fp8_row": ("fp8_row", "fp8_row"),
    "mxfp4": ("fp8_row", "mxfp4"),
    "g32": ("int4_g32", "int4_g32"),
    "ch32": ("int4_ch32", "int4_g32"),
    "ch64": ("int4_ch64", "int4_g32"),
}
PAIRS = [
    pair
    for pair in itertools.permutations(SIDES, 2)
    if pair not in (("g32", "ch32"), ("g32", "ch64")) and ("mxfp4" not in pair or "ch32" in pair or "bf16" in pair)
]


def spec_of(key: str, value: str, heads: int = 2) -> CacheSpec:
    layer = LayerSpec(kv=KV(key_heads=heads, key_dim=32, value_dim=64, key_format=key, value_format=value))
    return CacheSpec(layers=[layer], block_tokens=64)


def create(spec: CacheSpec, backend: str = "reference", **sizes) -> kvcore.Cache:
    return kvcore.create_cache(spec, backend=backend, **{"max_requests": 4, "max_tokens": 640, **sizes})


def told(spec: CacheSpec, keys: np.ndarray = K, values: np.ndarray = V, ids=None, **sizes):
    """A cache, a request with rows in it, and its blob."""
    cache = create(spec, **sizes)
    request = cache.admit(ids)
    with cache.step({request: len(keys) if ids is None else ids}) as step:
        step.layer(0).append_kv(keys, values)
    return cache, request, cache.export_request(request)


def read(cache: kvcore.Cache, request) -> list[np.ndarray]:
    """Keys and values [tokens, heads, dim] as the request's rows read."""
    with cache.step({request: 0}) as step:
        return [kvcore.to_numpy(part)[0].astype(np.float32) for part in step.layer(0).gather_kv()[:2]]


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=" to ".join)
def test_rows_are_those_of_a_cache_that_was_given_what_is_read(before, after):
    cache, request, blob = told(spec_of(*SIDES[before]))
    target = create(spec_of(*SIDES[after]))
    moved = target.import_request(blob, convert=True)
    keys, values = read(cache, request)
    other, wanted, _ = told(spec_of(*SIDES[after]), keys, values)
    assert target.digest([moved]) == other.digest([wanted])
    (said,) = moved.converted
    assert said.spec == cache.spec.digest
    exact = all(np.array_equal(a, b) for a, b in zip((keys, values), read(target, moved), strict=True))
    assert said.exact <= exact
    assert said.exact == (after == "fp32" or (before, after) == ("bf16", "fp32"))


def test_a_side_whose_format_stays_keeps_its_bytes_in_other_rows():
    cache, request, blob = told(spec_of("int4_g32", "int4_g32"))
    target = create(spec_of("int4_ch32", "int4_g32"))
    moved = target.import_request(blob, convert=True)
    other, wanted, _ = told(target.spec, *read(cache, request))
    assert np.array_equal(read(target, moved)[1][:64], read(cache, request)[1][:64])
    assert np.array_equal(read(target, moved)[0], read(other, wanted)[0])
    assert moved.converted[0].formats == [("kv", "key", "int4_g32", "int4_ch32")]
    # And again token by token, where the first 64 tokens are the bytes that they were.
    back = cache.import_request(target.export_request(moved), convert=True)
    assert np.array_equal(read(cache, back)[1][:64], read(cache, request)[1][:64])


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize(("before", "after"), [("bf16", "ch32"), ("ch32", "g32"), ("g32", "fp8_row"), ("ch64", "ch32")])
def test_every_backend_makes_the_same_bytes(name, before, after):
    blob = told(spec_of(*SIDES[before]))[2]
    made = []
    for backend in ("reference", name):
        target = create(spec_of(*SIDES[after]), backend)
        made.append(target.export_request(target.import_request(blob, convert=True)))
    assert made[0] == made[1]


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 65])
@pytest.mark.parametrize(("before", "after"), [("bf16", "ch32"), ("ch64", "ch32"), ("ch32", "bf16"), ("ch32", "ch64")])
def test_lengths_about_a_group(length, before, after):
    cache, request, _ = told(spec_of(*SIDES[before]), K[:length], V[:length])
    target = create(spec_of(*SIDES[after]))
    moved = target.import_request(cache.export_request(request), convert=True)
    other, wanted, _ = told(spec_of(*SIDES[after]), *read(cache, request))
    assert target.digest([moved]) == other.digest([wanted])
    # And it goes on as that one does.
    for each, one in ((target, moved), (other, wanted)):
        with each.step({one: 40}) as step:
            step.layer(0).append_kv(K[:40], V[:40])
    assert target.digest([moved]) == other.digest([wanted])


@pytest.mark.parametrize("after", ["fp8_row", "mxfp4", "g32", "ch32"])
def test_hostile_values_are_seen_where_they_are(after):
    keys, values = K.copy(), V.copy()
    keys[3, 0, 5] = np.nan
    keys[40, 1, 7] = 1e30
    values[50, 0, 1], values[60, 1] = np.inf, 0
    keys[:, :, 9] = 0
    cache, request, blob = told(spec_of("bf16", "bf16"), keys, values)
    target = create(spec_of(*SIDES[after]))
    moved = target.import_request(blob, convert=True)
    other, wanted, _ = told(spec_of(*SIDES[after]), *read(cache, request))
    assert target.digest([moved]) == other.digest([wanted])
    found_keys, found_values = read(target, moved)
    assert np.isnan(found_keys[3, 0, 5])
    assert not np.isfinite(found_values[50, 0, 1])
    assert np.isfinite(found_keys[:, 1]).all()
    assert (found_values[60, 1] == 0).all()


EXACT = [
    ("v4_584", "bf16", 512),
    ("v4_584", "fp32", 512),
    ("mxfp4_368", "v4_584", 512),
    ("v32_656", "bf16", 576),
    ("v32_nvfp4_432", "bf16", 576),
    ("v41_528", "bf16", 512),
    ("bf16", "fp32", 64),
]
ROUNDED = [
    ("bf16", "v4_584", 512),
    ("v4_584", "mxfp4_368", 512),
    ("bf16", "v32_nvfp4_432", 576),
    ("v32_656", "v32_nvfp4_432", 576),
]


@pytest.mark.parametrize(("before", "after", "dim"), [*EXACT, *ROUNDED])
def test_latents_are_exact_where_the_target_can_say_them(before, after, dim):
    layer = LayerSpec(window=Window(dim=dim, window=8, format=before), entries=Entries(dim=dim, ratio=1, format=before))
    spec = CacheSpec(layers=[layer], block_tokens=16)
    rows = np.random.default_rng(31).standard_normal((20, dim)).astype(np.float32)
    cache = create(spec)
    request = cache.admit()
    with cache.step({request: 20}) as step:
        step.layer(0).append_window(rows)
        step.layer(0).store_entries(rows)
    target = create(with_formats(spec, {"window": after, "entries": after}))
    moved = target.import_request(cache.export_request(request), convert=True)
    (said,) = moved.converted
    assert said.exact == ((before, after, dim) in EXACT)
    assert sorted(said.formats) == [("entries", "", before, after), ("window", "", before, after)]
    for role in ("window", "entries"):
        found = []
        for each, one, name in ((cache, request, before), (target, moved, after)):
            with each.step({one: 0}) as step:
                held = kvcore.to_numpy(step.layer(0).gather_rows(role).rows)[0]
            found.append((held, encoding.decode(name, held, dim).astype(np.float32)))
        assert np.array_equal(found[1][0], encoding.encode(after, found[0][1]))
        assert np.array_equal(found[0][1], found[1][1]) == said.exact
    if said.exact:
        back = cache.import_request(target.export_request(moved), convert=True)
        assert [one.exact for one in back.converted] == [True, True]


@pytest.mark.parametrize(
    ("before", "after"),
    [("index_fp4_68_h", "index_fp8_132_h"), ("index_fp4_68", "index_fp8_132_h"), ("index_fp4_68_h", "index_fp4_68")],
)
def test_keys_of_an_indexer_keep_their_rotation_or_get_it_or_lose_it(before, after):
    spec = with_formats(stories.STORED, {"index_keys": before})
    cache = stories.create(spec, "reference")
    request = cache.admit()
    stories.tell(cache, {request: range(40)})
    target = stories.create(with_formats(spec, {"index_keys": after}), "reference")
    moved = target.import_request(cache.export_request(request), convert=True)
    found = []
    for each, one, name in ((cache, request, before), (target, moved, after)):
        with each.step({one: 0}) as step:
            held = kvcore.to_numpy(step.layer(1).gather_rows("index_keys").rows)[0]
        values = encoding.decode(name, held).astype(np.float32)
        found.append(encoding.hadamard(values) if name.endswith("_h") else values)
    assert np.abs(found[0] - found[1]).max() < 0.25 * np.abs(found[0]).max()
    assert moved.converted[0].exact == (before.endswith("_h") == after.endswith("_h"))


@pytest.mark.parametrize("after", ["index_fp8_132_h", "index_fp4_68"])
def test_rows_of_many_passes_are_those_of_one(monkeypatch, after):
    spec = with_formats(stories.STORED, {"index_keys": "index_fp4_68_h"})
    cache = stories.create(spec, "reference")
    request = cache.admit()
    stories.tell(cache, {request: range(40)})
    blob = cache.export_request(request)
    made = []
    for channels in (recode.AT_ONCE, 1 << 8):
        monkeypatch.setattr(recode, "AT_ONCE", channels)
        target = stories.create(with_formats(spec, {"index_keys": after}), "reference")
        made.append(target.export_request(target.import_request(blob, convert=True)))
    assert made[0] == made[1]


def test_checkpoints_are_converted_with_their_request():
    spec = with_formats(stories.STORED, {"window": "bf16"})
    cache = stories.create(spec, "reference", prefix="full")
    request = cache.admit()
    for first in range(0, 40, 8):
        stories.tell(cache, {request: range(first, first + 8)})
    blob = cache.export_request(request)
    target = stories.create(with_formats(spec, {"window": "fp32", "key": "fp32"}), "reference")
    made = target.import_request(blob, convert=True)
    lengths = portable_form.opened(blob)[0]["request"]["checkpoints"]
    assert lengths
    # Through files, which keep what a cache without prefixes leaves out.
    moved = converted_blob(blob, {"window": "fp32", "key": "fp32"})
    assert portable_form.opened(moved)[0]["request"]["checkpoints"] == lengths
    for at in lengths:
        before, after = (portable_form.rows_of(one, f"checkpoint {at}")["0.window"] for one in (blob, moved))
        read = np.frombuffer(before, ml_dtypes.bfloat16).astype(np.float32)
        assert np.array_equal(read, np.frombuffer(after, np.float32))
    again = target.import_request(moved)
    assert target.digest([again]) == target.digest([made])


def converted_blob(blob: bytes, formats: dict[str, str]) -> bytes:
    from kvcore.cli.convert import _ops
    from kvcore.portable.convert_file import converted_file

    return converted_file(memoryview(blob), lambda spec: with_formats(spec, formats), _ops, "test").data


def test_what_is_refused_and_changes_nothing():
    blob = told(spec_of("bf16", "bf16"))[2]
    target = create(spec_of("int8_row", "bf16"))
    with pytest.raises(SnapshotError, match=r"key_format.*convert=True"):
        target.import_request(blob)
    other = create(spec_of("int8_row", "bf16", heads=1))
    with pytest.raises(
        SnapshotError, match=r"key_heads = 2 instead of 1; allowed: a spec that differs in formats only"
    ):
        other.import_request(blob, convert=True)
    bent = bytearray(blob)
    bent[-100] ^= 1
    with pytest.raises(SnapshotError, match="other bytes than were exported in page"):
        target.import_request(bytes(bent), convert=True)
    full = create(spec_of("int8_row", "bf16"), max_requests=1)
    full.admit()
    with pytest.raises(OutOfSlots):
        full.import_request(blob, convert=True)
    assert not target.requests
    assert not other.requests
    assert target.free_slots == 4


def test_a_row_of_576_channels_is_none_of_512():
    wide = CacheSpec(layers=[LayerSpec(entries=Entries(dim=576, ratio=1, format="v32_656"))], block_tokens=16)
    with pytest.raises(SpecError, match="576"):
        with_formats(wide, {"entries": "v4_584"})
    with pytest.raises(SpecError, match="formats: got window; allowed: entries"):
        with_formats(wide, {"window": "bf16"})


def test_an_open_group_is_as_far_as_it_goes_back():
    blob = told(spec_of("bf16", "bf16"))[2]
    target = create(spec_of("int4_ch32", "int4_g32"), max_draft_tokens=20)
    moved = target.import_request(blob, convert=True)
    with pytest.raises(RollbackError):
        target.truncate(moved, 63)
    target.truncate(moved, 64)
    other, wanted, _ = told(spec_of("int4_ch32", "int4_g32"), K[:64].astype(ml_dtypes.bfloat16), V[:64])
    assert target.digest([moved]) == other.digest([wanted])


def test_what_was_converted_says_so_wherever_it_goes(backend, tmp_path):
    cache, _, blob = told(spec_of("fp32", "fp32"), ids=list(range(TOKENS)))
    target = create(spec_of("fp8_row", "fp8_row"), backend, prefix="full")
    moved = target.import_request(blob, salt="mine", convert=True)
    (said,) = moved.converted
    assert said.formats == [("kv", "key", "fp32", "fp8_row"), ("kv", "value", "fp32", "fp8_row")]
    fork = target.fork(moved)
    target.save(tmp_path / "saved.kv", [moved])
    others = create(target.spec, prefix="full")
    elsewhere = [
        others.import_request(target.export_request(fork), salt="mine"),
        copy_request(target, moved, others),
        kvcore.load(tmp_path / "saved.kv", backend="reference", prefix="full", max_requests=4).requests[0],
    ]
    assert all(one.converted == (said,) for one in (fork, *elsewhere))
    # Back again it has been through both.
    back = cache.import_request(target.export_request(moved), convert=True)
    assert [one.exact for one in back.converted] == [False, True]
    # Others never find its rows: those ids have other ones here.
    for each in (target, others):
        assert each.admit(list(range(TOKENS)), salt="mine").length == 0
    blocks = store.BlockStore([store.HostTier(1 << 20)])
    with pytest.raises(RequestError, match="a request that was converted"):
        store.save(blocks, target, moved, range(TOKENS))
    assert '"converted"' not in portable_form.opened(blob)[0]["request"]


@pytest.mark.parametrize(
    "said",
    [
        [{"spec": "a", "formats": [], "exact": True}] * 65,
        [{"spec": "a" * 1000, "formats": [], "exact": True}],
        [{"spec": "a", "formats": [["kv", "key", "b" * 200, "c"]], "exact": True}],
        [{"spec": "a", "formats": [["kv", "key"]], "exact": True}],
        [{"spec": "a", "formats": [], "exact": 1}],
        "yes",
    ],
)
def test_a_lie_about_it_is_refused(said):
    cache, _, blob = told(spec_of("bf16", "bf16"))
    with pytest.raises(SnapshotError):
        cache.import_request(portable_form.changed(blob, lambda tree: tree["request"].update(converted=said)))
    assert len(cache.requests) == 1


def test_no_file_is_written_that_says_more_conversions_than_are_read(tmp_path, capsys):
    said = [{"spec": "a", "formats": [], "exact": True}] * 64
    blob = portable_form.changed(told(spec_of("bf16", "bf16"))[2], lambda tree: tree["request"].update(converted=said))
    (tmp_path / "in.blob").write_bytes(blob)
    assert main(["convert", str(tmp_path / "in.blob"), str(tmp_path / "out.blob"), "--formats", "key=int8_row"]) == 2
    assert "converted 64 times" in capsys.readouterr().err
    assert not (tmp_path / "out.blob").exists()


def test_files(tmp_path, capsys):
    cache, request, blob = told(spec_of("bf16", "bf16"))
    cache.fork(request)
    cache.save(tmp_path / "cache.kv")
    (tmp_path / "blob").write_bytes(blob)
    wanted = create(spec_of("int4_ch32", "int4_g32"))
    digest = wanted.digest([wanted.import_request(blob, convert=True)])
    formats = ["--formats", "key=int4_ch32,value=int4_g32"]
    assert main(["convert", str(tmp_path / "cache.kv"), str(tmp_path / "small.kv"), *formats]) == 0
    out = capsys.readouterr().out
    assert "2 requests" in out
    assert "request 1: 77 tokens, back to 64, rounded: kv key bf16 to int4_ch32, kv value bf16 to int4_g32" in out
    loaded = kvcore.load(tmp_path / "small.kv", backend="reference")
    assert [loaded.digest([one]) for one in loaded.requests] == [digest] * 2
    (tmp_path / "spec.json").write_text(kvcore.spec.to_json(wanted.spec))
    by_spec = ["--spec", str(tmp_path / "spec.json"), "--json"]
    assert main(["convert", str(tmp_path / "blob"), str(tmp_path / "small"), *by_spec]) == 0
    assert json.loads(capsys.readouterr().out)["requests"][0]["exact"] is False
    assert wanted.digest([wanted.import_request((tmp_path / "small").read_bytes())]) == digest
    assert main(["describe", str(tmp_path / "small")]) == 0
    assert f"converted from {cache.spec.digest[:16]} (rounded)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--formats", "key"],
        ["--formats", "key=int4"],
        ["--formats", "key=bf16,key=int8_row"],
        ["--formats", "window=bf16"],
        ["--spec", "deepseek_v4_flash_tiny"],
        ["--spec", "nowhere.json"],
    ],
)
def test_a_file_that_is_not_converted_is_not_written(options, tmp_path, capsys):
    cache, _, blob = told(spec_of("bf16", "bf16"))
    (tmp_path / "blob").write_bytes(blob)
    out = tmp_path / "out"
    assert main(["convert", str(tmp_path / "blob"), str(out), *options]) == 2
    assert "kvcore convert: " in capsys.readouterr().err
    (tmp_path / "blob").write_bytes(blob[:-9])
    assert main(["convert", str(tmp_path / "blob"), str(out), "--formats", "key=int8_row", "--json"]) == 2
    assert "error" in json.loads(capsys.readouterr().out)
    cache.save(tmp_path / "cache.kv")
    bent = bytearray((tmp_path / "cache.kv").read_bytes())
    bent[-100] ^= 1
    (tmp_path / "cache.kv").write_bytes(bent)
    assert main(["convert", str(tmp_path / "cache.kv"), str(out), "--formats", "key=int8_row"]) == 2
    assert not out.exists()


def test_presets_take_other_formats():
    spec = presets.deepseek_v4_flash()
    other = with_formats(spec, {"window": "mxfp4_368", "entries": "v4_584", "index_keys": "index_fp8_132_h"})
    assert {layer.window.format for layer in other.all_layers if layer.window} == {"mxfp4_368"}
    assert with_formats(spec, {}) == spec
