"""The command line: what it prints, what it writes, and how it ends."""

import json
import subprocess
import sys
from fnmatch import fnmatch

import pytest

from kvcore import plugins
from kvcore.cli import main, plan_figures, tables
from kvcore.cli.sizes import parse_bytes, parse_count, show_bytes
from kvcore.errors import SpecError
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec, Window, presets, to_json
from tests.conformance import broken

SMALL = CacheSpec(layers=(LayerSpec(window=Window(dim=8, window=3, format="fp32")),), block_tokens=8, name="one window")


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text(to_json(SMALL))
    return str(path)


@pytest.fixture
def with_backends(monkeypatch):
    """Put backends of the test's own into the registry."""

    def add(*infos):
        registry = plugins.Registry(entry_points=False)
        registry.backends.update({info.name: info for info in infos})
        monkeypatch.setattr(plugins, "_registry", [registry])

    return add


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("40GiB", 40 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("2tib", 2 * 2**40),
        ("65536", 65536),
        ("65_536 B", 65536),
        ("0.5KiB", 512),
    ],
)
def test_bytes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text, "--budget") == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "40 gibibytes", "-1", "0", "1.5", "1e9", "40GiB40", "nan", "0x10", "1.2345B"]
)
def test_other_bytes_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"--budget: got .*allowed: bytes, such as 40GiB"):
        parse_bytes(text, "--budget")


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("128Ki", 131072), ("1M", 1_000_000), ("131,072", 131072)])
def test_counts_are_read(text: str, count: int) -> None:
    assert parse_count(text, "--max-tokens") == count


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (40 * 2**30, "40.00 GiB"), (5000 * 2**40, "5,000.00 TiB")],
)
def test_bytes_are_shown(count: int, text: str) -> None:
    assert show_bytes(count) == text


def plan_json(capsys, *arguments: str) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_tokens_to_bytes_and_back(capsys) -> None:
    by_tokens = plan_json(capsys, "deepseek_v4_flash", "--max-requests", "64", "--max-tokens", "1Mi")
    # The published figures of one block and one slot: 21 × (37,440 + 4,608) + 20 × 1,728 bytes, and
    # 44 × 74,880 + 21 × (65,536 + 16,384) + 20 × 524,288.
    assert by_tokens["block_bytes"] == 917_568
    assert by_tokens["slot_bytes"] == 15_500_800
    assert by_tokens["blocks"] == 4096
    assert by_tokens["nbytes"] == 4096 * 917_568 + 64 * 15_500_800
    # A row of 584 bytes of every window, on boundaries of 16, and one of every tail, for 64 tokens of a step.
    assert by_tokens["undo_bytes"] == 64 * (44 * 592 + 21 * (8192 + 2048) + 20 * 4096)
    total = by_tokens["nbytes"] + by_tokens["undo_bytes"]
    assert by_tokens["total_bytes"] == total
    back = plan_json(capsys, "deepseek_v4_flash", "--max-requests", "64", "--budget", str(total))
    assert (back["blocks"], back["max_tokens"], back["unused_bytes"]) == (4096, 2**20, 0)
    less = plan_json(capsys, "deepseek_v4_flash", "--max-requests", "64", "--budget", str(total - 1))
    assert (less["blocks"], less["unused_bytes"]) == (4095, 917_567)


def test_plan_shows_padding_by_pool(capsys) -> None:
    pools = plan_json(capsys, "deepseek_v4_flash")["pools"]
    entries = [pool for pool in pools if pool["role"] == "entries"]
    # 64 rows of 584 bytes fill 37,376 of 37,440; 2 rows fill 1,168 of 1,728.
    assert [(pool["unit_bytes"], pool["padding_bytes"], pool["layers"]) for pool in entries] == [
        (37_440, 64, 21),
        (1_728, 560, 20),
    ]
    assert sum(pool["nbytes"] for pool in pools) == plan_json(capsys, "deepseek_v4_flash")["nbytes"]


def test_plan_bytes_per_token(capsys) -> None:
    figures = plan_json(capsys, "deepseek_v4_flash")["bytes_per_token"]
    # 21 CSA layers: (584 + 68) / 4 a token; 20 HCA layers: 584 / 128.
    assert figures["logical"]["exact"] == "14057/4"
    assert figures["logical"]["value"] == 21 * 652 / 4 + 20 * 584 / 128
    assert figures["padded"]["value"] == 917_568 / 256


def test_plan_pads_are_not_counted_where_they_are_not_stored() -> None:
    plan = plan_cache(SMALL_V4, max_requests=1, max_tokens=8, layout="planar")
    (window,) = plan_figures.describe(plan)["pools"]
    assert (window["row_bytes"], window["unit_bytes"], window["padding_bytes"]) == (584, 4 * 583, 0)


SMALL_V4 = CacheSpec(layers=(LayerSpec(window=Window(dim=512, window=4)),), block_tokens=8)


def test_plan_groups_layers_by_kind(capsys) -> None:
    kinds = plan_json(capsys, "deepseek_v4_1_flash_tiny")["layer_kinds"]
    assert [(kind["kind"], kind["layers"]) for kind in kinds] == [
        ("window 8", [0, 6]),
        ("window 8 + tail m=2 + entries m=2 + index_keys m=2", [1]),
        ("window 8 + entries of layer 1 + index_keys of layer 1", [2]),
        ("window 8 + entries m=1 + index_keys m=1", [3]),
        ("window 8 + entries of layer 3 + index_keys of layer 3", [4, 5]),
    ]
    assert kinds[2]["block_bytes"] == 0


def test_plan_of_a_slot_cache_grows_by_token() -> None:
    kv = KV(key_heads=2, key_dim=8, storage="slot")
    spec = CacheSpec(layers=(LayerSpec(kv=kv),), block_tokens=8)
    figures = plan_figures.describe(plan_cache(spec, max_requests=3, max_tokens=100))
    assert figures["bytes_per_token"]["padded"]["exact"] == "64"
    assert figures["max_tokens"] == 100


def test_plan_prints_tables(capsys) -> None:
    assert main(["plan", "deepseek_v4_flash", "--budget", "40GiB"]) == 0
    text = capsys.readouterr().out
    for part in (
        "Pools",
        "Layers",
        "padding B",
        "2-42 step 2",
        "917,568 B, 256 tokens each",
        "undo: 323,008 B beside the pools",
        "bytes to tokens: 40.00 GiB hold",
    ):
        assert part in text


def test_plan_reads_a_spec_file(capsys, spec_file) -> None:
    assert plan_json(capsys, spec_file, "--max-requests", "2")["nbytes"] == 2 * 3 * 8 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["plan", "no_such_spec"], "SPEC: got 'no_such_spec'", id="no such spec"),
        pytest.param(["plan", "deepseek_v4_flash", "--budget", "many"], "--budget: got 'many'", id="no size"),
        pytest.param(["plan", "deepseek_v4_flash", "--max-tokens", "0"], "--max-tokens: got '0'", id="no tokens"),
        pytest.param(["plan", "deepseek_v4_flash", "--budget", "1MiB"], "budget_bytes: got 1048576", id="too small"),
        pytest.param(
            ["plan", "deepseek_v4_flash", "--max-draft-tokens", "-1"], "max_draft_tokens: got -1", id="negative drafts"
        ),
        pytest.param(["parity", "run", "--backend", "no_such"], "--backend: got no_such", id="no such backend"),
        pytest.param(["parity", "run", "--spec", "nowhere"], "--spec: got 'nowhere'", id="no such parity spec"),
        pytest.param(
            ["parity", "run", "--backend", "reference", "--device", "cuda"],
            "reference: runs on cpu, not on cuda",
            id="a named backend on a device it lacks",
        ),
        pytest.param(
            ["parity", "run", "--backend", "reference", "--check", "nothing/*"], "--check: got nothing/*", id="no check"
        ),
        pytest.param(["parity", "run", "--out", "/no/such/folder/report.json"], "--out: got", id="nowhere to write"),
        pytest.param(["parity", "show", "nothing.json"], "nothing.json: got No such file", id="no report"),
    ],
)
def test_usage_errors(capsys, arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("kvcore: ")
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="no command"),
        pytest.param(["parity"], id="no command of parity"),
        pytest.param(["plan"], id="no spec"),
        pytest.param(["plan", "tiny", "--budget", "1GiB", "--max-tokens", "1"], id="budget and tokens"),
        pytest.param(["plan", "tiny", "--layout", "diagonal"], id="unknown layout"),
    ],
)
def test_what_argparse_refuses(capsys, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: kvcore" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["info", "--help"],
        ["plan", "--help"],
        ["parity", "--help"],
        ["parity", "run", "--help"],
        ["bench", "--help"],
        ["check", "--help"],
    ],
)
def test_help_has_examples(capsys, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "examples:\n  kvcore " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--out", "no/such/folder/bench.json"], "--out: got no/such/folder/bench.json", id="out"),
        pytest.param(["--svg", "."], "--svg: got .", id="svg"),
    ],
)
def test_bench_refuses_before_it_measures(capsys, arguments: list[str], message: str) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bench_prints_its_record(capsys, monkeypatch, tmp_path) -> None:
    row = {"name": "append", "nbytes": 8, "graph_us": 2.0, "single_us": 4.0, "floor_us": 1.0, "copy_us": 1.5}
    found = {
        "device": "a GPU",
        "ceilings": {"copy_gb_s": 8.0},
        "goals_measured_at": {"copy_gb_s": 8.0, "empty_kernel_us": 1.0},
        "rows": [{**row, "goal_us": None, "goal_here_us": None, "best_peer_us": None, "why": "it is small"}],
    }

    def record(_):
        print("on the way")
        return found

    monkeypatch.setattr("kvcore.bench.record", record)
    assert main(["bench", "--json", "--out", str(tmp_path / "bench.json"), "--svg", str(tmp_path / "bench.svg")]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == found == json.loads((tmp_path / "bench.json").read_text())
    assert printed.err == "on the way\n"
    assert "append" in (tmp_path / "bench.svg").read_text()
    assert main(["bench"]) == 0
    table = capsys.readouterr().out
    assert "a GPU" in table
    assert "append: it is small" in table


RUN = ["parity", "run", "--check", "append_window/*"]


def test_parity_run_agrees(capsys, spec_file, tmp_path) -> None:
    out = tmp_path / "report.json"
    assert main([*RUN, "--backend", "reference", "--spec", spec_file, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "append_window" in printed
    assert "pooling" in printed
    assert printed.rstrip().splitlines()[-2:] == ["agree", f"report: {out}"]
    written = json.loads(out.read_text())
    assert written["schema"] == "kvcore.parity/1"
    assert written["spec"] == {"name": "one window", "digest": SMALL.digest}
    assert len(written["checks"]) == 22
    assert written["runs"][0]["command"].startswith("kvcore parity run --check append_window/*")


def test_parity_run_of_a_sample_has_each_shape_once(capsys, spec_file) -> None:
    assert main([*RUN, "--backend", "reference", "--spec", spec_file, "--sample", "--json"]) == 0
    ids = [record["check"].split("/") for record in json.loads(capsys.readouterr().out)["checks"]]
    assert len({shape for *_, shape in ids}) <= len(ids) == len({(formats, shape) for _, formats, _, shape in ids}) == 8
    assert {layout for _, _, layout, _ in ids} == {"packed", "planar", "tpu_tile"}


def test_parity_run_disagrees(capsys, spec_file, with_backends) -> None:
    with_backends(broken.info(broken.RingOffByOne))
    assert main([*RUN, "--backend", "broken", "--spec", spec_file]) == 1
    printed = capsys.readouterr().out
    assert "likely cause: shifted by one row" in printed
    assert printed.rstrip().endswith("disagree")


def test_parity_run_of_all_backends_shows_what_cannot_run(capsys, spec_file, with_backends) -> None:
    with_backends(broken.info(name="absent", probe=lambda: "no such chip"))
    assert main([*RUN, "--spec", spec_file, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    status = {record["status"] for record in report["checks"] if record["backend"] == "absent"}
    assert status == {"unavailable"}


def test_parity_run_of_a_named_backend_that_cannot_run(capsys, spec_file, with_backends) -> None:
    with_backends(broken.info(name="absent", probe=lambda: "no such chip"))
    assert main([*RUN, "--backend", "reference", "absent", "--spec", spec_file]) == 2
    assert "--backend: got absent: no such chip" in capsys.readouterr().err


def test_parity_merge_and_show(capsys, spec_file, tmp_path, with_backends) -> None:
    with_backends(broken.info(broken.RingOffByOne))
    one, two, both = (str(tmp_path / name) for name in ("one.json", "two.json", "both.json"))
    assert main([*RUN, "--backend", "reference", "--spec", spec_file, "--out", one]) == 0
    assert main([*RUN, "--backend", "broken", "--spec", spec_file, "--out", two]) == 1
    assert main(["parity", "merge", one, "--out", both]) == 0
    assert main(["parity", "merge", one, two, "--out", both]) == 1
    capsys.readouterr()
    assert main(["parity", "show", both, "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert [column["backend"] for column in summary["columns"]] == ["broken", "reference"]
    assert summary["agrees"] is False
    assert main(["parity", "show", one]) == 0
    assert "append_window" in capsys.readouterr().out


def test_parity_merge_of_other_specs(capsys, spec_file, tmp_path) -> None:
    one, two = (str(tmp_path / name) for name in ("one.json", "two.json"))
    assert main([*RUN, "--backend", "reference", "--spec", spec_file, "--out", one]) == 0
    other = tmp_path / "other.json"
    other.write_text(to_json(SMALL_V4))
    assert main([*RUN, "--backend", "reference", "--spec", str(other), "--out", two]) == 0
    assert main(["parity", "merge", one, two, "--out", str(tmp_path / "both.json")]) == 2
    assert f"{two}: got spec" in capsys.readouterr().err
    assert not (tmp_path / "both.json").exists()


def test_info(capsys, with_backends) -> None:
    with_backends(broken.info(name="absent", requires=("no_such_module",)))
    plugins.registry().failed["bad_plugin"] = "ImportError: no module"
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["numpy"]
    by_name = {backend["name"]: backend for backend in found["backends"]}
    assert by_name["reference"]["can_run"] is None  # nothing was asked of it
    assert by_name["absent"]["can_run"] is False
    assert by_name["absent"]["reason"] == "no_such_module is not installed; pip install nothing"
    assert found["failed"] == {"bad_plugin": "ImportError: no module"}
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "bad_plugin" in text
    assert "no_such_module is not installed" in text


@pytest.mark.parametrize(
    ("modules", "nodes", "said", "wanted"),
    [
        pytest.param((), (), None, None, id="no jax"),
        pytest.param(("jax",), (), None, "cpu (no accelerator is seen)", id="nothing"),
        pytest.param(("jax",), ("/dev/nvidia0",), None, "cpu (/dev/nvidia0 is there, but none of ", id="no plug-in"),
        pytest.param(
            ("jax", "jax_cuda12_plugin"), ("/dev/nvidia0",), None, "cuda (jax_cuda12_plugin, /dev/nvidia0)", id="cuda"
        ),
        pytest.param(("jax", "libtpu"), ("/dev/accel0",), None, "tpu (libtpu, /dev/accel0)", id="tpu"),
        pytest.param(("jax", "libtpu"), (), None, "cpu (no accelerator is seen)", id="a compiler alone"),
        pytest.param(("jax", "libtpu"), ("/dev/accel0",), "cpu,tpu", "cpu (JAX_PLATFORMS)", id="said"),
    ],
)
def test_info_says_which_device_jax_would_use(monkeypatch, capsys, modules, nodes, said, wanted) -> None:
    from kvcore.cli import info

    monkeypatch.setattr(info, "find_spec", lambda name: name in modules or None)
    monkeypatch.setattr(info, "glob", lambda pattern: [node for node in nodes if fnmatch(node, pattern)])
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if said:
        monkeypatch.setenv("JAX_PLATFORMS", said)
    assert main(["info"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("JAX would use: ")]
    assert lines == [] if wanted is None else lines[0].startswith(f"JAX would use: {wanted}")


def test_info_probe_runs_each_backend_by_itself(capsys) -> None:
    assert main(["info", "--probe", "--json"]) == 0
    by_name = {backend["name"]: backend for backend in json.loads(capsys.readouterr().out)["backends"]}
    assert (by_name["reference"]["can_run"], by_name["reference"]["how"]) == (True, "cpu")


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        pytest.param("import time; time.sleep(60)", "its probe took longer than 0.5 s", id="hangs"),
        pytest.param("import os; os.kill(os.getpid(), 11)", "its probe was killed by signal 11", id="crashes"),
        pytest.param("raise ValueError('no driver')", "its probe failed: ValueError: no driver", id="raises"),
        pytest.param("print('hello')", "its probe printed no answer", id="says nothing"),
    ],
)
def test_info_survives_a_probe_that(capsys, monkeypatch, probe: str, reason: str) -> None:
    monkeypatch.setattr("kvcore.cli.info.PROBE", probe)
    assert main(["info", "--probe", "--timeout", "0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backends"][0]["reason"] == reason


def test_info_prints_without_a_registry(capsys, monkeypatch) -> None:
    def fail():
        raise RuntimeError("two providers")

    monkeypatch.setattr(plugins, "registry", fail)
    assert main(["info"]) == 0
    assert "RuntimeError: two providers" in capsys.readouterr().out


def test_tables_without_rich(capsys, monkeypatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda _: None)
    tables.print_table("Title", ["verb", "a\nb"], [["append", 3], ["x", 12]])
    assert capsys.readouterr().out == "Title\nverb    a b\n------  ---\nappend    3\nx        12\n\n"


def test_python_m_kvcore() -> None:
    done = subprocess.run([sys.executable, "-m", "kvcore", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvcore ")


HELP_ALONE = """
import sys
from kvcore.cli import main
try:
    main(["plan", "--help"])
finally:
    assert not {"numpy", "torch", "jax", "rich"} & set(sys.modules)
"""


def test_help_imports_no_numpy() -> None:
    subprocess.run([sys.executable, "-c", HELP_ALONE], check=True, capture_output=True)


def test_every_preset_can_be_planned(capsys) -> None:
    for name in presets.PRESETS:
        assert plan_json(capsys, name)["nbytes"] > 0
