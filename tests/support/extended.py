"""What a maintainer writes to extend the library, as lines that are put into a copy of it: counted, then run there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Line(NamedTuple):
    """One more line of a file, after the one that begins so (both without their indentation)."""

    file: str
    after: str
    text: str


E5M2 = (
    Line(
        "kvcore/spec/codes.py", 'Code(name="e4m3"', 'Code(name="e5m2", bits=8, largest=57344, significand=3, nan=0x7F),'
    ),
    Line("kvcore/backends/reference/encoding.py", '"e4m3":', '"e5m2": np.dtype(ml_dtypes.float8_e5m2),'),
    Line("kvcore/backends/torch_triton/encoding.py", '"e4m3":', '"e5m2": torch.float8_e5m2,'),
    Line("kvcore/backends/jax_pallas/encoding.py", '"e4m3":', '"e5m2": jnp.float8_e5m2,'),
)
"""An element code of 8 bits: the table of codes, and how each backend casts to it."""

E5M2_CHECKS = """
import json, sys
from kvcore.parity.run import run
from kvcore.plugins import registry
from kvcore.spec import FORMATS, KV, CacheSpec, Field, Format, LayerSpec, Window

scaled = Field(name="codes", dims=64, code="e5m2", group=32, scale="fp32", rule="fp32")
scales = Field(name="scales", dims=2, code="fp32")
FORMATS.register(Format(name="e5m2_scaled", fields=(scaled, scales), planes=(("codes", "scales"),), amax_floor=1e-4))
plain = Field(name="codes", dims=64, code="e5m2")
FORMATS.register(Format(name="e5m2_plain", fields=(plain,), planes=(("codes",),)))
layers = (
    LayerSpec(window=Window(dim=64, window=5, format="e5m2_scaled")),
    LayerSpec(kv=KV(key_heads=2, key_dim=64, key_format="e5m2_plain", value_format="e5m2_scaled")),
)
spec = CacheSpec(layers=layers, block_tokens=8)
reports = [run(spec, [registry().backends[sys.argv[1]]], only=chosen) for chosen in sys.argv[2:]]
print(json.dumps({record.check: record.status + record.detail for report in reports for record in report.checks}))
"""
"""The kit over two formats of it; arguments: the backend, and which checks."""

E5M2_CHOSEN = ("*/p*/ragged", "*e5m2*/any/*")

ROW_COUNTS = (
    Line(
        "kvcore/ops/fused.py",
        "return VisibleRows(self.asarray(positions)",
        """
    def row_counts(self, layer: int, index: StepIndex) -> Array:
        positions = to_numpy(self.visible_rows(layer, index).positions)
        return self.asarray((positions >= 0).sum(axis=1).astype(np.int32))""",
    ),
    Line("kvcore/ops/checks.py", '"gather_entries": ("entries",),', '"row_counts": ("kv",),'),
    Line(
        "kvcore/cache/layer.py",
        "return self._ops.visible_rows(self._layer",
        """
    def row_counts(self) -> Array:
        self._writes.component("kv", KV)
        return self._ops.row_counts(self._layer, self._index)""",
    ),
    Line(
        "kvcore/conformance/checks/__init__.py",
        '_role("mask"',
        '_role("row_counts", kv.row_counts, "kv", layouts=False),',
    ),
    Line(
        "kvcore/conformance/checks/kv.py",
        'found.append(exact(f"valid{name}"',
        """
    return found


def row_counts(bench: Bench) -> list[Output]:
    found = [exact("counts", to_numpy(bench.ops.row_counts(bench.layer, bench.index)), "request")]""",
    ),
)
"""A verb that counts what ``gather_kv`` finds: its default, what it takes, its name on a layer, and its check."""

ROW_COUNTS_CHECKS = """
import json, sys
import numpy as np
import kvcore
from kvcore.parity.run import run
from kvcore.plugins import registry
from kvcore.spec import KV, CacheSpec, LayerSpec

spec = CacheSpec(layers=(LayerSpec(kv=KV(key_heads=1, key_dim=4, storage="ring", window=5)),), block_tokens=8)
report = run(spec, [registry().backends[sys.argv[1]]], only="row_counts/*")
found = {record.check: record.status + record.detail for record in report.checks}
cache = kvcore.create_cache(spec, backend=sys.argv[1], device="cpu", max_requests=2, max_tokens=64)
with cache.step({cache.admit(): 3, cache.admit(): 9}) as step:
    step.layer(0).append_kv(*[np.ones((12, 1, 4), np.float32)] * 2)
    found["of a layer"] = kvcore.to_numpy(step.layer(0).row_counts()).tolist()
print(json.dumps(found))
"""
"""The kit's checks of it, and what it says of 3 and of 9 tokens in one step; argument: the backend."""

MIRROR = Line(
    "kvcore/backends/__init__.py",
    '"""The backends that come with kvcore."""',
    """yield BackendInfo(
        name="mirror",
        summary="the reference again",
        requires=("numpy",),
        devices=("cpu",),
        capabilities=EVERYTHING,
        priority=None,
        install="pip install kvcore",
        probe=_runs,
        load=lambda: __import__("kvcore.backends.mirror", fromlist=["*"]).ReferenceBackend(),
    )""",
)
"""A backend of the repository: its record."""

MIRROR_CHECKS = """
import json, sys
from kvcore.parity.run import run
from kvcore.plugins import registry
from kvcore.spec import presets

report = run(presets.deepseek_v4_flash_tiny(), [registry().backends["mirror"]], only=sys.argv[1])
print(json.dumps({record.check: record.status + record.detail for record in report.checks}))
"""


def copy(folder: Path, *lines: Line) -> Path:
    """The library's sources in a folder, with these lines in them."""
    shutil.copytree(ROOT / "kvcore", folder / "kvcore", ignore=shutil.ignore_patterns("__pycache__"))
    for line in lines:
        path = folder / line.file
        text = path.read_text(encoding="utf-8").split("\n")
        (place,) = [number for number, each in enumerate(text) if each.lstrip().startswith(line.after)]
        indent = text[place][: len(text[place]) - len(text[place].lstrip())]
        text.insert(place + 1, indent + line.text)
        path.write_text("\n".join(text), encoding="utf-8")
    return folder


def told(folder: Path, code: str, *arguments: str) -> Any:
    """What a program prints as JSON that imports the library from the folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
