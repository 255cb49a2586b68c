"""Text of records, snapshots and plug-ins that came from elsewhere: nothing in it reaches a terminal as it is."""

import json
import os

import msgspec
import pytest

from kvcore import create_cache
from kvcore.cli import main
from kvcore.cli.info import _print as print_info
from kvcore.conformance.locate import Mismatch
from kvcore.errors import KvcoreError, SpecError
from kvcore.foreign import MOST, printable, shortened
from kvcore.parity.quality import Quality
from kvcore.parity.records import Record, Report, Run, SpecRef, parse, write
from kvcore.spec import CacheSpec, LayerSpec, Window

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2028\x7f\r\nagree"
BAD = set("\x1b\x07\x9b\u202e\u2028\x7f\r")


def evil_report():
    """A report whose every text drives a terminal."""
    texts = {field.name: EVIL for field in msgspec.structs.fields(Mismatch) if field.type is str}
    mismatch = Mismatch(**{**texts, "coordinate": (1, 2)})
    record = Record(
        check=f"append/{EVIL}/packed/{EVIL}",
        backend=EVIL,
        how=EVIL,
        status="disagree",
        rule="storage",
        mismatches=1,
        first_mismatch=mismatch,
        detail=EVIL,
    )
    texts = dict.fromkeys(Run.__struct_fields__, EVIL)
    return Report(
        schema="kvcore.parity/1",
        spec=SpecRef(name=EVIL, digest=EVIL),
        runs=(Run(**{**texts, "versions": {EVIL: EVIL}}),),
        tolerances=(),
        checks=(record, msgspec.structs.replace(record, first_mismatch=None)),
    )


def test_text_is_shown_as_json_writes_it():
    assert printable("plain, ≤ 3 µs × 2 …") == "plain, ≤ 3 µs × 2 …"
    assert printable("\x1b[0m\n") == "\\u001b[0m\\u000a"
    assert printable("a\nb\r", lines=True) == "a\nb\\u000d"
    assert printable("\ud800\U000e0001") == "\\ud800\\udb40\\udc01"
    assert json.loads(f'"{printable(EVIL)}"') == EVIL
    assert not BAD & set(printable(EVIL, lines=True))


def deep(levels):
    """A list in a list in a list."""
    found = []
    for _ in range(levels):
        found = [found]
    return found


VALUES = {
    "text": EVIL,
    "long text": "x" * 10**6,
    "bytes": b"\x1b" * 10**6,
    "an integer": 10**5000,
    "a list": [EVIL] * 1000,
    "a list of such integers": [10**5000],
    "a deep list": deep(100_000),
    "nothing": None,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_in_a_message_is_short_and_printable(value):
    assert len(shortened(value)) <= MOST + 1
    assert shortened(value).isprintable()
    assert str(SpecError(got=value, where="here", allowed="others"))


def test_every_error_is_printable():
    error = SpecError(got=EVIL, where=EVIL, allowed=EVIL, hint=EVIL)
    assert not BAD & set(str(error))
    assert error.got == EVIL
    assert issubclass(SpecError, KvcoreError)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("parity show FILE", 1),
        ("parity show FILE --json", 1),
        ("parity merge FILE FILE", 1),
        ("parity merge FILE FILE --json", 1),
        ("parity merge FILE OTHER", 2),
        ("parity html FILE --out PAGE", 1),
        ("plan SPEC --max-requests 1", 0),
        ("plan SPEC --max-requests 1 --json", 0),
        ("plan BAD --max-requests 1", 2),
        ("check FILE", 2),
    ],
)
@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_commands_escape_what_they_print(tmp_path, capsys, monkeypatch, command, code, rich):
    if not rich:
        monkeypatch.setattr("kvcore.cli.tables.find_spec", lambda _: None)
    report = evil_report()
    other = msgspec.structs.replace(report, spec=SpecRef(name="\x1b[1m", digest="\x1b[2m"))
    spec = {"schema_version": 1, "name": EVIL, "layers": [{"window": {"dim": 8, "window": 4, "format": "bf16"}}]}
    files = {
        "FILE": write(report),
        "OTHER": write(other),
        "SPEC": json.dumps(spec).encode(),
        "BAD": json.dumps({**spec, EVIL: 1}).encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    page = tmp_path / "PAGE"
    assert main([str(tmp_path / word) if word in {*files, "PAGE"} else word for word in command.split()]) == code
    printed = capsys.readouterr()
    assert not BAD & set(printed.out + printed.err)
    if page.exists():
        assert not BAD & set(page.read_text())
    # No line of a record is one of ours.
    assert "agree" not in printed.out.splitlines()


def test_a_cache_of_a_foreign_spec_is_shown_as_text():
    spec = CacheSpec(layers=[LayerSpec(window=Window(dim=8, window=4, format="bf16"))], name=EVIL)
    cache = create_cache(spec, backend="reference", max_requests=1)
    assert not BAD & set(f"{cache!r}{cache.plan!r}")


def test_plug_ins_are_shown_and_not_obeyed(capsys):
    backend = dict.fromkeys(("name", "summary", "reason", "how"), EVIL)
    print_info(
        {
            "kvcore": "1",
            "python": "3",
            "platform": EVIL,
            "commit": None,
            "versions": {EVIL: EVIL},
            "jax_device": EVIL,
            "environment": {"KVCORE_BACKEND": EVIL},
            "backends": [{**backend, "devices": [EVIL], "can_run": None, "priority": None, "not_declared": [EVIL]}],
            "failed": {EVIL: EVIL},
        }
    )
    assert not BAD & set(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "in no folder"])
def test_a_report_is_written_to_a_file_or_not_at_all(tmp_path, capsys, kind):
    record, out = tmp_path / "record.json", tmp_path / "out.json"
    record.write_bytes(write(evil_report()))
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "device":
        out.symlink_to("/dev/full")
    elif kind == "folder":
        out.mkdir()
    else:
        out = tmp_path / "nowhere" / "out.json"
    for command in (["merge", str(record)], ["html", str(record)]):
        assert main(["parity", *command, "--out", str(out)]) == 2
        assert "a file in a folder that exists" in capsys.readouterr().err


def test_a_report_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    record, out, precious = (tmp_path / name for name in ("record.json", "out.json", "precious"))
    record.write_bytes(write(evil_report()))
    precious.write_bytes(b"precious")
    out.symlink_to(precious)
    assert main(["parity", "merge", str(record), "--out", str(out)]) == 1
    assert (parse(out.read_bytes()).spec, precious.read_bytes()) == (evil_report().spec, b"precious")
    assert not out.is_symlink()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"quality": (Quality(format="fp32", bits=0.0, error=0.1),)}, id="no bits"),
        pytest.param({"quality": (Quality(format="fp32", bits=-8.0, error=0.1),)}, id="fewer"),
        pytest.param({"quality": (Quality(format="fp32", bits=8.0, error=0.1),) * 65}, id="too many formats"),
        pytest.param(
            {"checks": (Record(check="append", backend="a", how="", status="agree", rule="storage"),)}, id="an id"
        ),
    ],
)
def test_what_no_page_can_show_is_no_report(change):
    with pytest.raises(SpecError):
        parse(write(msgspec.structs.replace(evil_report(), **change)))
