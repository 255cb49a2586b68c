"""``kvcore describe``: what it prints of each kind of file, and how it exits."""

import json

import numpy as np
import pytest

import kvcore
from kvcore.adoption import to_json
from kvcore.cli import main
from kvcore.spec import presets
from tests.support import stories

SPEC = presets.classic(layers=2, key_heads=2, key_dim=8, block_tokens=16, key_format="fp32", name="two layers")


@pytest.fixture
def cache():
    cache = kvcore.create_cache(SPEC, backend="reference", max_requests=2, max_tokens=64)
    for length in (20, 5):
        stories.tell(cache, {cache.admit(): list(range(length))})
    return cache


def test_a_snapshot_and_a_blob(cache, tmp_path, capsys):
    cache.save(tmp_path / "cache.kv")
    assert main(["describe", str(tmp_path / "cache.kv")]) == 0
    out = capsys.readouterr().out
    assert "kvcore.snapshot" in out
    assert "request 0: 20 tokens" in out
    assert "request 1: 5 tokens" in out
    assert "layers 0, 1" in out
    (tmp_path / "blob").write_bytes(cache.export_request(cache.requests[0]))
    assert main(["describe", "--json", str(tmp_path / "blob")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["form"], found["spec_digest"], len(found["requests"])) == ("kvcore.request", SPEC.digest, 1)
    assert found["requests"][0]["tokens"] == 20


def test_a_descriptor(tmp_path, capsys):
    engine = [np.zeros((4, 2, 16, 2, 8), np.float32) for _ in range(2)]
    adopted = kvcore.adopt(SPEC, engine, layout="NL_X_NB_TWO_BS_NH_HS")
    (tmp_path / "layout.json").write_text(to_json(adopted.descriptor))
    assert main(["describe", str(tmp_path / "layout.json")]) == 0
    out = capsys.readouterr().out
    assert "1.kv value codes: tensor '1' from 1024, 4 blocks of 16 tokens, bytes to the next block 2048, row 64" in out


@pytest.mark.parametrize("text", [b"", b"{}", b"not one of these", b"{"])
def test_what_is_none_of_these(text, tmp_path, capsys):
    (tmp_path / "file").write_bytes(text)
    assert main(["describe", str(tmp_path / "file")]) == 2
    assert "kvcore describe: " in capsys.readouterr().err
    assert main(["describe", "--json", str(tmp_path / "nowhere")]) == 2
    assert "error" in json.loads(capsys.readouterr().out)
