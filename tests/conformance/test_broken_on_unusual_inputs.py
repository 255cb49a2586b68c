"""Mistakes that ordinary inputs do not show: each is found by the checks that are there for it, and by no others."""

from fnmatch import fnmatchcase

import pytest

from kvcore import parity
from kvcore.spec import FORMATS, KV, CacheSpec, Entries, Field, Format, IndexKeys, LayerSpec, Tail, Window
from tests.conformance import broken, broken_inputs

SPEC = CacheSpec(
    layers=(
        LayerSpec(
            window=Window(dim=64, window=5, format="bf16"),
            tail=Tail(dim=64, ratio=4, overlap=True),
            entries=Entries(dim=64, ratio=4, format="fp32"),
        ),
        LayerSpec(
            tail=Tail(dim=64, ratio=4, overlap=False),
            entries=Entries(dim=64, ratio=4, format="bf16"),
            index_tail=Tail(dim=128, ratio=4, overlap=False),
            index_keys=IndexKeys(dim=128, ratio=4, heads=2, topk=3, format="index_fp8_132"),
        ),
        LayerSpec(kv=KV(key_heads=2, key_dim=64, key_format="fp32", value_format="nf4_b64")),
        LayerSpec(kv=KV(key_heads=2, key_dim=16, storage="slot")),
        LayerSpec(kv=KV(key_heads=2, key_dim=16, storage="ring", window=5)),
        LayerSpec(kv=KV(key_heads=2, key_dim=16, window=7)),
        LayerSpec(kv=KV(key_heads=2, key_dim=16, value_heads=4, key_format="fp16")),
    ),
    block_tokens=12,
)

MISTAKES = [
    # mistake, checks that are run, those of them that disagree, output, part of the place, part of the cause
    ("LentEvenly", "borrow_kv/*/packed/*", "*/apart", "keys of all requests", "request 2, row 0", ""),
    ("MidpointsUp", "encode/nf4_b64/*", "*/edges", "rows", "codes", ""),
    ("WrittenAgain", "append_kv/*nf4_b64*/*", "*/taken_over", "1.kv.key", "unit", "does not touch"),
    ("WrittenAgain", "store_entries/*", "*/taken_over", "1.entries", "unit", "does not touch"),
    ("WrittenAgain", "*flush/*", "*/taken_over", "1.entries", "unit", "does not touch"),
    ("LastPieceOnly", "attend_kv/*.full.slot/packed/*", "*/pieces", "out plain", "token 0", ""),
    ("LastPieceOnly", "attend_kv/*.window.paged/packed/[p-r]*", "*/pieces", "out plain", "token 0", ""),
    ("PayloadKept", "encode/bf16.d64/*", "*/[rbe]*s", "rows", "codes byte", ""),
    ("PayloadKept", "append_window/bf16/packed/*", "*/*", "1.window", "codes byte 4", ""),
    ("PaddingOfRingsForgotten", "attend_kv/*.window.*/packed/ragged", "*.ring*/packed/*", "out padded", "token", ""),
    ("NothingTimesNaN", "compress/*/packed/ragged", "*", "pooling", "entry 0", "NaN"),
    ("KeptByIndex", "gather_kv/bf16*/packed/*", "*.held/packed/ragged", "keys before the step", "request 1", ""),
    ("MemoryHandedOutTwice", "gather_entries/*", "*.held/packed/ragged", "values", "token", ""),
    ("LastColumnForgotten", "append_kv/fp16*/packed/*", "*/packed/*", "1.kv", "unit", ""),
    ("NothingDividedByNothing", "compress/*/packed/longer", "*", "pooling", "entry", "NaN"),
    ("DeadRowsDigested", "digest_rows/bf16.window*/*/ragged", "*", "lanes", "request", ""),
    ("MidpointsUpOnTheWay", "append_kv/*nf4_b64*/packed/ragged", "*.edges/packed/ragged", "1.kv.value", "codes", ""),
    ("BeyondHalf", "append_kv/fp16*/packed/*", "*", "1.kv", "codes", ""),
    ("ValueHeadsLikeKeys", "attend_kv/fp16*/packed/ragged", "*", "out plain", "token 0, head 2", ""),
    ("NaNIsLargest", "encode/bare_nf4/*", "*/[rbe]*s", "rows", "codes", ""),
    ("UnseenWeighed", "attend_kv/bf16*/packed/ragged", "*.unseen/packed/ragged", "out", "token 0", ""),
    ("TiesTurnedInTiles", "select/*", "*/tpu_tile/*", "top 3 of given scores", "token", ""),
    ("PlacesByIndex", "padded_index/*paged*", "*.steps/packed/padded", "1.kv", "row", ""),
]


def disagreeing(mistake: str, only: str, spec: CacheSpec = SPEC) -> list[parity.Record]:
    """Records of what disagrees; the reference itself does not."""
    records = parity.run(spec, [broken.info(getattr(broken_inputs, mistake)), broken.info(name="sound")], only=only)
    assert records.checks, f"no check matches {only}"
    assert {record.status for record in records.checks if record.backend == "sound"} == {"agree"}
    return [record for record in records.checks if record.status != "agree"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mistake", "only", "checks", "output", "where", "cause"),
    [pytest.param(*row, id=f"{row[0]} in {row[1]}") for row in MISTAKES],
)
def test_mistake_is_found_by_its_checks(
    mistake: str, only: str, checks: str, output: str, where: str, cause: str
) -> None:
    found = disagreeing(mistake, only)
    assert found
    assert [record.check for record in found if not fnmatchcase(record.check, checks)] == []
    first = found[0].first_mismatch
    assert found[0].status == "disagree"
    assert first is not None
    assert output in first.output
    assert where in first.where
    assert cause in first.cause


def test_a_code_without_a_scale_is_checked_around_its_largest_value() -> None:
    fields = (Field(name="codes", dims=None, code="e4m3"),)
    FORMATS.register(Format(name="test_e4m3_plain", fields=fields, planes=(("codes",),)))
    try:
        spec = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=2, key_dim=64, key_format="test_e4m3_plain"))])
        found = disagreeing("NaNAboveLargest", "encode/test_e4m3_plain/*", spec)
    finally:
        FORMATS._formats.pop("test_e4m3_plain", None)
    (first,) = [record.first_mismatch for record in found if record.check.endswith("/edges")]
    assert first is not None
    assert first.got_bytes == "7f"
    assert first.want_bytes in ("7e", "fe")


def test_every_mistake_is_used() -> None:
    kinds = {
        name
        for name, kind in vars(broken_inputs).items()
        if isinstance(kind, type) and kind.__module__ == broken_inputs.__name__
    }
    assert kinds == {row[0] for row in MISTAKES} | {"NaNAboveLargest"}
