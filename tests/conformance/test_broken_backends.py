"""Every deliberate mistake is reported as a disagreement, at the right place and, where it can be, with its cause."""

import pytest

from kvcore import parity
from kvcore.conformance.specs import conformance_spec, over_tokens_spec
from kvcore.spec import KV, CacheSpec, Conv, Entries, IndexKeys, LayerSpec, State, Tail, Window
from tests.conformance import broken

SPEC = CacheSpec(
    layers=(
        LayerSpec(
            window=Window(dim=512, window=5, format="v4_584"),
            tail=Tail(dim=512, ratio=4, overlap=True),
            entries=Entries(dim=512, ratio=4, format="v4_584"),
            index_tail=Tail(dim=128, ratio=4, overlap=True),
            index_keys=IndexKeys(dim=128, ratio=4, heads=2, topk=2, format="index_fp4_68_h"),
        ),
        LayerSpec(
            window=Window(dim=64, window=5, format="bf16"),
            tail=Tail(dim=64, ratio=4, overlap=True),
            entries=Entries(dim=64, ratio=4, format="fp32"),
        ),
        LayerSpec(kv=KV(key_heads=2, key_dim=64, key_format="int8_row", value_format="nf4_b64")),
        LayerSpec(state=State(heads=2, key_dim=4, value_dim=3), conv=Conv(dim=6, width=4)),
    ),
    block_tokens=12,
)

MISTAKES = [
    # mistake, check, its first mismatch's output, part of the place, part of the cause
    ("RingOffByOne", "append_window/v4_584/packed/ragged", "1.window", "codes byte 0", "shifted by one row"),
    ("RingOffByOne", "append_window/bf16/tpu_tile/one_token", "1.window", "codes byte 0", "shifted by one row"),
    (
        "NibblesSwapped",
        "store_entries/v4_584.m4+index_fp4_68_h.m4/planar/ragged",
        "1.index_keys",
        "codes",
        "nibbles swapped",
    ),
    ("NibblesSwapped", "append_kv/int8_row-nf4_b64.full.paged/packed/ragged", "1.kv.value", "codes", "nibbles swapped"),
    ("NibblesSwapped", "encode/index_fp4_68_h/any/rows", "rows", "codes", "nibbles swapped"),
    ("ScaleInverted", "append_window/v4_584/planar/longer", "1.window", "scales byte 0", "scale inverted"),
    ("ScaleRoundedDown", "append_window/v4_584/packed/one_over", "1.window", "scales byte 0", "rounded down"),
    ("ScaleFloored", "encode/v4_584/any/rows", "rows", "scales byte 0", "rounded down"),
    ("AnotherRounding", "append_window/v4_584/packed/ragged", "1.window", "codes", "another rounding"),
    ("BigEndian", "append_window/v4_584/tpu_tile/ragged", "1.window", "rope byte 0", "byte order of 16-bit"),
    ("SlotsMixedUp", "append_window/v4_584/packed/ragged", "1.window", "unit", "another unit"),
    ("PaddingWritten", "append_window/v4_584/packed/padded", "1.window", "unit 5, row 0", "-1 wrapped"),
    ("NothingWritten", "append_window/v4_584/packed/ragged", "1.window", "unit", "not written"),
    ("FirstLayerToo", "append_window/v4_584/packed/ragged", "0.window", "unit", "does not touch"),
    ("HalvesSwapped", "append_tail/tail.m4.overlap/packed/ragged", "1.tail", "kv byte 0", "carry and cur"),
    ("OldestChunkWins", "append_window/v4_584/packed/longer", "1.window", "unit 2, row 0", ""),
    ("StaleCarry", "reset_slots/v4_584+tail*/packed/padded", "0.tail", "kv byte 0", ""),
    ("FirstTableForAll", "append_kv/int8_row-nf4_b64.full.paged/packed/ragged", "1.kv.key", "codes byte 0", ""),
    ("FirstTableOnRead", "gather_all_entries/v4_584.m4/packed/ragged", "values", "request 1, entry 0", ""),
    ("LastEntryForNone", "gather_entries/v4_584.m4/packed/ragged", "values", "token 0, pick 2", "-1 wrapped"),
    ("PoisonForgotten", "poison/v4_584+tail*/packed/padded", "0.window", "unit 0, row 0", "does not touch"),
    (
        "MaskedByMultiplying",
        "gather_window/v4_584/packed/ragged",
        "values stored",
        "channel 0",
        "masked by multiplying",
    ),
    ("NibblesSwappedOnRead", "decode/index_fp4_68_h/any/rows", "values", "channel", "nibbles swapped"),
    ("SeesTooLittle", "index_scores/index_fp4_68_h.m4/packed/ragged", "scores", "token", "less is visible"),
    ("SeesTooMuch", "mask/int8_row-nf4_b64.full.paged/any/ragged", "mask", "token", "more is visible"),
    ("TieGoesHigh", "select/index_fp4_68_h.m4/any/ragged", "top 3 of given scores", "pick", ""),
    (
        "WideIndices",
        "select/index_fp4_68_h.m4/any/ragged",
        "top 0 of given scores",
        "whole",
        "dtype int64 instead of int32",
    ),
    (
        "LendsWrongRows",
        "borrow_kv/int8_row-nf4_b64.full.paged/packed/ragged",
        "keys of request 0",
        "row",
        "shifted by +1 along axis 1",
    ),
    (
        "LentBeforeTheAppend",
        "borrow_kv/int8_row-nf4_b64.full.paged/packed/ragged",
        "keys of the appended request",
        "row",
        "NaN: a row that holds nothing was read",
    ),
    (
        "NotAppendedAtOnce",
        "borrow_kv/int8_row-nf4_b64.full.paged/packed/ragged",
        "1.kv.key",
        "codes byte 0",
        "not written",
    ),
    (
        "PartForgotten",
        "index_select/index_fp4_68_h.m4/packed/ragged",
        "top 2 at once",
        "pick",
        "the chosen entries have other scores",
    ),
    ("LowPrecision", "attend/bf16+fp32.m4/packed/ragged", "out all", "token 1, head 0", ""),
    ("SinkTwice", "attend/v4_584+v4_584.m4/packed/ragged", "out picks, sink", "token 0, head 0", ""),
    ("TurnedOn", "attend/v4_584+v4_584.m4.rope/packed/ragged", "out all", "token 1, head 0", ""),
    ("RotatedAtWindowEnd", "flush/fp32.m4/packed/ragged", "1.entries", "codes", ""),
    ("OneRounding", "compress/v4_584.m4+tail.m4.overlap/packed/longer", "norm", "entry 0, channel 0", ""),
    ("CopiesInTurn", "copy_slots/*/packed/padded", "0.window", "unit 0, row 0", ""),
    ("TailScoresZero", "reset_slots/*/packed/padded", "0.tail", "score byte 2", ""),
    ("RotatedOneTooFar", "append_rotated_window/bf16/packed/ragged", "1.window, normed", "codes", ""),
    ("TailForgotten", "append_flush/v4_584.m4+index_fp4_68_h.m4/packed/ragged", "1.tail", "kv byte 0", ""),
    ("IndexKept", "padded_index/v4_584/any/padded", "next positions", "token 0", "off by -1"),
    ("DigestOfOneLane", "digest_rows/v4_584/any/ragged", "lanes", "lane 1", ""),
    ("MovesNothing", "move_strips/v4_584+tail*/packed/ragged", "history of request 0 in pages", "page 0, byte 0", ""),
    ("DeclinesTooLate", "move_strips/bf16+tail*/packed/longer", "history of request 0 in pages", "page 0, byte 0", ""),
    ("StateOneTokenOld", "read_state/state.fp32.matrix/packed/ragged", "states before the step", "request", "NaN"),
    ("StateOfAnother", "read_state/state.fp32.matrix/packed/ragged", "states before the step", "request", ""),
    ("StatesInBetweenKept", "write_state/state.fp32.matrix/packed/ragged", "1.state", "unit", "not written"),
    ("StateOfRefusedDrafts", "select_state/state.fp32.matrix/packed/ragged", "1.state", "unit", ""),
    ("StateBeforeARollback", "read_state/state.fp32.matrix/packed/ragged", "states before the step", "request", "NaN"),
    ("StateOfTheFirstToken", "append_state/state.fp32.matrix/packed/ragged", "1.state", "unit", ""),
    ("InputsOneTokenOld", "gather_conv/conv.bf16.w4/packed/ragged", "inputs before the step", "request", ""),
    (
        "PagesCountedFromZero",
        "digest_strips/int8_row*/any/longer",
        "lanes of history of request 0 from page 1 on",
        "page 0, lane 0",
        "",
    ),
]


@pytest.mark.parametrize(
    ("mistake", "check", "output", "where", "cause"),
    [pytest.param(*row, id=f"{row[0]} in {row[1]}") for row in MISTAKES],
)
def test_mistake_is_diagnosed(mistake: str, check: str, output: str, where: str, cause: str) -> None:
    report = parity.run(SPEC, [broken.info(getattr(broken, mistake)), broken.info(name="sound")], only=check)
    of_mistake = [record for record in report.checks if record.backend == "broken"]
    assert of_mistake, f"no check matches {check}"
    record = next(record for record in of_mistake if record.status == "disagree")
    assert record.mismatches > 0
    assert record.first_mismatch is not None
    assert record.first_mismatch.output == output
    assert where in record.first_mismatch.where
    assert cause in record.first_mismatch.cause
    assert bool(cause) == bool(record.first_mismatch.cause)
    assert {record.status for record in report.checks if record.backend == "sound"} == {"agree"}
    assert not report.agrees


def first(mistake: type, check: str):
    (record,) = parity.run(SPEC, [broken.info(mistake)], only=check).checks
    assert record.first_mismatch is not None
    return record.first_mismatch


def test_both_bytes_of_swapped_nibbles() -> None:
    mismatch = first(broken.NibblesSwapped, "encode/index_fp4_68_h/any/rows")
    assert mismatch.got_bytes == mismatch.want_bytes[::-1] != mismatch.want_bytes


def test_both_values_of_an_inverted_scale() -> None:
    mismatch = first(broken.ScaleInverted, "append_window/v4_584/packed/ragged")
    assert int(mismatch.got_bytes, 16) == 254 - int(mismatch.want_bytes, 16)
    assert mismatch.want_value.startswith("2^")
    assert mismatch.got_value == f"2^{-int(mismatch.want_value.removeprefix('2^'))}"


def test_both_bytes_of_a_big_endian_element() -> None:
    mismatch = first(broken.BigEndian, "append_window/v4_584/packed/ragged")
    assert mismatch.got_bytes == mismatch.want_bytes[2:] + mismatch.want_bytes[:2]
    assert "(channel 448)" in mismatch.where


def test_what_was_never_written_shows_as_poison() -> None:
    mismatch = first(broken.NothingWritten, "append_window/v4_584/packed/one_token")
    assert mismatch.got_bytes == "ff"
    assert mismatch.got_value == "nan"
    assert mismatch.want_value != "nan"


def test_every_mistake_is_used() -> None:
    mistakes = {
        name for name, kind in vars(broken).items() if isinstance(kind, type) and issubclass(kind, broken.ReferenceOps)
    }
    elsewhere = {"ReferenceOps", "Encoding", "Raises"}
    assert mistakes - elsewhere == {row[0] for row in MISTAKES}


def test_suite_spec_holds_every_registered_format() -> None:
    from kvcore.spec import FORMATS

    specs = conformance_spec(), over_tokens_spec()
    held = {part.format.name for spec in specs for _, _, component in spec.components() for part in component.parts}
    assert held >= set(FORMATS)
