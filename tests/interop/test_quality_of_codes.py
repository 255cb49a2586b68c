"""The benchmark of codes: what it takes for a cache is what a cache gives back, and its baselines do what they say."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvcore
from benchmarks import codes_of_others
from benchmarks import quality_of_codes as quality
from benchmarks.coded_attention import METHODS as ALL_METHODS
from benchmarks.coded_attention import Coded, Shape, turned
from kvcore.spec import KV, CacheSpec, LayerSpec

SHAPE = Shape(2, 64)
ROWS = np.random.default_rng(8).standard_normal((70, 1, 64)).astype(np.float32)


@pytest.mark.parametrize("method", ["int8_row", "int4_g32", "int4_ch32 keys, int4_g32 values"])
def test_coded_rows_are_those_that_a_cache_gives_back(method):
    keys, values = ALL_METHODS[method](SHAPE)
    names = (method, method) if " " not in method else ("int4_ch32", "int4_g32")
    layer = LayerSpec(kv=KV(key_heads=1, key_dim=64, key_format=names[0], value_format=names[1]))
    spec = CacheSpec(layers=[layer], block_tokens=64)
    cache = kvcore.create_cache(spec, backend="reference", max_requests=1, max_tokens=128)
    rows = torch.from_numpy(ROWS).bfloat16().float()
    with cache.step({cache.admit(): 70}) as step:
        step.layer(0).append_kv(rows.numpy(), rows.numpy())
        found = [kvcore.to_numpy(part)[0, :, 0].astype(np.float32) for part in step.layer(0).gather_kv()[:2]]
    query, key = torch.tensor([[69]]), torch.arange(70)[None]
    for side, given in zip((keys, values), found, strict=True):
        assert side.code is not None
        coded, raw = side.code(rows.numpy()[:, 0]), side.raw(query, key)[0].numpy()
        assert np.array_equal(np.where(raw[:, None], rows.numpy()[:, 0], coded), given)


def test_bits_and_what_stays_raw():
    keys, values = ALL_METHODS["int4_ch64 keys, int4_g64 values"](SHAPE)
    assert (keys.bits, values.bits, keys.tokens, values.tokens) == (4.5, 4.5, 64, 64)
    assert keys.raw_tokens(1024) == 31.5
    keys, values = ALL_METHODS["KIVI, 2 bits, residual 128"](SHAPE)
    assert (keys.bits, values.bits, keys.raw_tokens(256), values.raw_tokens(128)) == (3.0, 3.0, 63.5, 64.5)
    at = torch.arange(200)
    assert values.raw(at[150:151, None], at[None])[0].nonzero().min() == 23
    assert keys.raw(at[150:151, None], at[None])[0].nonzero().min() == 128


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("KIVI, 4 bits, residual 128", 0.08),
        ("NVFP4", 0.13),
        ("TurboQuant, 4 bits", 0.11),
        ("TurboQuant, 3 bits", 0.2),
        ("KVQuant, 4 bits, 1 % aside", 0.12),
        ("KVarN, 4-bit keys, 2-bit values", 0.6),
    ],
)
def test_the_error_of_a_baseline(method, most):
    rows = np.random.default_rng(9).standard_normal((256, 64)).astype(np.float32)
    for side in ALL_METHODS[method](SHAPE):
        assert side.code is not None
        assert 0.01 < np.sqrt(np.mean((side.code(rows) - rows) ** 2)) < most


def test_a_rotation_is_undone():
    rows = ROWS[:, 0]
    assert np.allclose(codes_of_others.rotated(lambda turned: turned)(rows), rows, atol=1e-5)


def test_a_rotary_turn_is_undone_and_moves_all_positions_but_the_first():
    rows = torch.from_numpy(ROWS[:, 0])[None, None]
    found = turned(rows, 1e5)
    assert torch.allclose(turned(found, 1e5, back=True), rows, atol=1e-5)
    assert torch.equal(found[0, 0, 0], rows[0, 0, 0])
    assert not torch.allclose(found[0, 0, 1:], rows[0, 0, 1:], atol=0.1)


def test_what_is_set_aside_is_read_as_it_is():
    rows = np.random.default_rng(10).standard_normal((200, 8)).astype(np.float32)
    rows[17, 3], rows[40, 3] = 1000, -900
    read = codes_of_others.nuq(4, over_tokens=True)(rows)
    assert (read[17, 3], read[40, 3]) == (1000, -900)
    assert np.abs(read - rows).max() < 0.5


@pytest.mark.parametrize("method", [method for method in ALL_METHODS if method != "bf16"])
def test_heads_and_requests_are_coded_each_by_itself(method):
    rows = np.random.default_rng(11).standard_normal((2, 3, 256, 64)).astype(np.float32)
    rows[1, 2] *= 100
    for side in ALL_METHODS[method](SHAPE):
        assert side.code is not None
        together = side.code(rows)
        assert together.shape == rows.shape
        alone = np.stack([side.code(one) for one in rows.reshape(6, 256, 64)]).reshape(rows.shape)
        assert np.array_equal(together, alone)


CONFIG = SimpleNamespace(
    num_key_value_heads=SHAPE.heads,
    head_dim=SHAPE.dim,
    rope_parameters={"full": {"rope_theta": 1e4}},
    layer_types=("full",),
)
MODEL = SimpleNamespace(config=CONFIG, set_attn_implementation=lambda _: None)
LAYER = SimpleNamespace(layer_idx=0)
LOCAL = ["bf16", "int8_row", "int4_ch32 keys, int4_g32 values", "KIVI, 4 bits, residual 128", "TurboQuant, 4 bits"]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("method", LOCAL)
def test_a_generated_token_sees_what_it_would_see_in_a_text(method, window):
    """Token by token, each row coded once, is what one pass gives; a later request sees nothing of an earlier one."""
    generator = torch.Generator().manual_seed(12)
    attention = Coded(MODEL)
    for _ in range(2):
        query, key, value = (torch.randn(2, heads, 150, 64, generator=generator) for heads in (4, 2, 2))
        attention.use(method)
        whole, _ = attention(LAYER, query, key, value, None, 0.3, window)
        attention.use(method)
        steps = [attention(LAYER, query[:, :, :100], key[:, :, :100], value[:, :, :100], None, 0.3, window)[0]]
        for at in range(100, 150):
            parts = query[:, :, at : at + 1], key[:, :, : at + 1], value[:, :, : at + 1]
            steps.append(attention(LAYER, *parts, None, 0.3, window)[0])
        assert torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-4)


METHODS = ["bf16", "int8_row"]
SETTINGS = {
    "model": "some",
    "keys": [1, 64],
    "device": "cpu",
    "windows": 2,
    "tokens": 8,
    "needles": 1,
    "prompts": 2,
    "new": 2,
}
TASKS = [
    quality.Task("window", 0, torch.zeros(1, 8, dtype=torch.long), 5),
    quality.Task("window", 1, torch.zeros(1, 8, dtype=torch.long), 5),
    quality.Task("needle", 0, torch.arange(8)[None], 2),
    quality.Task("prompts", 0, torch.zeros(2, 4, dtype=torch.long), 2),
]


def noted(progress, task, shift=0.0, best=(1, 2)):
    for number, method in enumerate(METHODS):
        progress.add(task, method, quality.Found([1.0 + number * shift, 2.0 + number * shift], list(best)))


def test_a_run_that_was_broken_off_goes_on(tmp_path):
    path = tmp_path / "lines"
    progress = quality.Progress(SETTINGS, path)
    assert quality.as_record(progress, METHODS, SETTINGS, TASKS) is None
    noted(progress, TASKS[0], 0.1)
    progress.add(TASKS[1], "bf16", quality.Found([9.0, 9.0], [1, 2]))
    record = quality.as_record(progress, METHODS, SETTINGS, TASKS)
    # A window counts once every method has done it.
    assert record["text"].startswith("genesis_1_25.txt: 1 windows of 8 tokens, of which the last 5 count")
    assert record["stopped_early"]
    assert [row["change"] for row in record["rows"]] == [0, round(float(np.expm1(0.1)), 5)]
    assert [row["needles_found"] for row in record["rows"]] == [None, None]
    with path.open("a") as file:
        file.write('["window", 1, "int8')  # killed while it wrote
    again = quality.Progress(SETTINGS, path, resume=True)
    assert again.found == progress.found
    noted(again, TASKS[1], 0.3)
    noted(again, TASKS[2], best=(6, 7))
    again.add(TASKS[3], "bf16", quality.Found([], [1, 2, 3, 4]))
    again.add(TASKS[3], "int8_row", quality.Found([], [1, 9, 9, 4]))
    record = quality.as_record(again, METHODS, SETTINGS, TASKS)
    assert record["text"].startswith("genesis_1_25.txt: 2 windows")
    assert not record["stopped_early"]
    assert [row["needles_found"] for row in record["rows"]] == [1, 1]
    assert record["greedy"].startswith("2 prompts")
    assert [row["greedy_tokens_same"] for row in record["rows"]] == [1, 0.5]
    assert [row["greedy_tokens_before_first_difference"] for row in record["rows"]] == [1, 0.25]
    assert "| int8_row | 8.50 |" in quality.as_table(record)
    assert quality.as_svg(record).count("<circle") == 1
    assert quality.Progress(SETTINGS, path, resume=True).found == again.found
    with pytest.raises(ValueError, match="lines is of"):
        quality.Progress({**SETTINGS, "tokens": 16}, path, resume=True)


class Tokenizer:
    """A token for four letters of a long text, numbered by their place, or for one letter of a short one; -1 begins."""

    def __call__(self, text, return_tensors=None, *, add_special_tokens=True):
        begin = [-1] if add_special_tokens else []
        ids = [*begin, *(range(len(text) // 4) if len(text) > 1000 else (-2 - ord(letter) for letter in text))]
        return SimpleNamespace(input_ids=torch.tensor([ids]) if return_tensors == "pt" else ids)


def test_tasks_are_spread_over_the_text_and_score_no_token_twice():
    given = quality.tasks(Tokenizer(), windows=99, tokens=1024, needles=3, prompts=5, new=2)
    kinds = {kind: [task for task in given if task.kind == kind] for kind in ("window", "needle", "prompts")}
    assert [len(tasks) for tasks in kinds.values()] == [len(kinds["window"]), 3, 2]
    assert all(
        task.ids.shape[1] == size and (task.ids[:, 0] == -1).all()
        for kind, size in (("window", 1024), ("needle", quality.NEEDLE), ("prompts", quality.ASKED))
        for task in kinds[kind]
    )
    scored = torch.cat([task.ids[0, -task.asked :] for task in kinds["window"]])
    assert len(scored.unique()) == len(scored) > 0.9 * scored.max()
    assert scored[: len(scored) // 2].max() > 0.9 * scored.max()  # however many are done
    assert [len(task.ids) for task in kinds["prompts"]] == [4, 1]
    for task in kinds["needle"]:
        answer = [-2 - int(one) for one in task.ids[0, -task.asked :]]
        assert "".join(map(chr, answer)).strip().isdigit()


def test_a_finished_run_gives_its_record_again(tmp_path):
    """Units are done in any order, and none a second time."""
    choices = ["--windows", "2", "--tokens", "64", "--needles", "1", "--prompts", "1", "--new", "2"]
    chosen = quality.parsed([*choices, "--methods", "int8_row", "--out", str(tmp_path), "--resume"])
    model = SimpleNamespace(config=CONFIG)

    def work(units):
        for unit in reversed(units):
            done.append((unit.task.kind, unit.task.number, unit.method))
            best = [1] * unit.task.asked * (len(unit.task.ids) if unit.task.kind == "prompts" else 1)
            yield unit, quality.Found([1.0], best)

    done: list[tuple[str, int, str]] = []
    first = list(quality.records(chosen, tmp_path / "some.gguf", model, Tokenizer(), work))
    assert len(set(done)) == len(done) == 8
    assert [row["method"] for row in first[-1]["rows"]] == ["bf16", "int8_row"]
    assert (first[-1]["model"], first[-1]["stopped_early"]) == ("some, fp32 arithmetic", False)
    again = list(quality.records(chosen, tmp_path / "some.gguf", model, Tokenizer(), work))
    assert len(done) == 8
    assert again == first[-1:]
