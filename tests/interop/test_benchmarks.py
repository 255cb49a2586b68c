"""The benchmarks of real and Llama-like models, in short forms: that they run, and that their records are whole."""

import json

import pytest

from benchmarks import beside_transformers, quality, serve


def test_rows_are_added_to_a_record():
    """Other rows stay, a row of the same format is replaced, and the record says how the new ones were run."""

    def record(command, **perplexity):
        rows = [{"format": name, "perplexity": value} for name, value in perplexity.items()]
        return {**dict.fromkeys(quality.SAME, "same"), "command": command, "rows": rows}

    old = record("first", bf16=10.0, mxfp4=13.0, int8_row=11.0)
    both = quality.merged(old, record("second", bf16=10.0, mxfp4=12.0, fp16=10.5))
    assert {row["format"]: row["perplexity"] for row in both["rows"]} == {
        "bf16": 10.0,
        "fp16": 10.5,
        "int8_row": 11.0,
        "mxfp4": 12.0,
    }
    assert [row["format"] for row in both["rows"]] == ["bf16", "fp16", "int8_row", "mxfp4"]
    assert (both["command"], both["added"]) == ("first", [{"formats": ["mxfp4", "fp16"], "command": "second"}])
    with pytest.raises(ValueError, match="greedy"):
        quality.merged({**old, "greedy": "fewer"}, both)
    with pytest.raises(ValueError, match="perplexity of bf16"):
        quality.merged(old, record("third", bf16=10.1))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param(700, [(0, 1)], id="shorter than a window"),
        pytest.param(1024, [(0, 1)], id="one window"),
        pytest.param(1025, [(0, 1), (1, 1024)], id="one token more"),
        pytest.param(2000, [(0, 1), (768, 1024), (976, 1792)], id="three windows, the last moved back"),
    ],
)
def test_every_token_is_scored_once(tokens, expected):
    assert quality.windows(tokens) == expected


def test_decode_step_beside_transformers(tmp_path):
    """Results are compared before times are; times of a tiny context say nothing and are not looked at."""
    beside_transformers.main(["--contexts", "96", "--steps", "1", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "beside_transformers.json").read_text())
    caches = {row["cache"] for row in record["rows"]}
    assert {"DynamicCache", "StaticCache", "kvcore", "kvcore, paged", "kvcore, attend"} <= caches
    assert {row["dtype"] for row in record["rows"]} == {"bfloat16", "float32"}


def test_serving_beside_transformers(tmp_path, capsys, monkeypatch):
    """Every way gives the same tokens; how fast a tiny model is served says nothing and is not looked at."""
    for name, tokens in {"SHARED": 32, "OWN": 4, "NEW": 3}.items():
        monkeypatch.setattr(serve, name, tokens)
    monkeypatch.setattr(serve, "PAGES", {serve.BLOCK: "generate_batch"})
    serve.main(["--model", "tiny", "--concurrent", "2", "--rounds", "1", "--loads", "shared", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "serve_cpu.json").read_text())
    ways = {row["way"] for row in record["rows"]}
    assert {"engine", "engine, drafts", "generate, one batch", "generate, one by one", "generate_batch"} <= ways
    assert {row["same_as_alone"] for row in record["rows"]} == {"2 of 2"}
    assert set(record["times_the_tokens_per_cpu_second"]["shared: engine"]) == ways - {"engine"}
    assert capsys.readouterr().out.startswith("tiny, float32, 2 requests of 32 + 4 tokens, 3 new each")
    assert [serve.percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (50, 99)] == [2.0, 4.0]
