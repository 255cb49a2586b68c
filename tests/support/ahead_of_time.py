"""Compile a kernel for a GPU that is not there, and read what the assembler says about it.

What is compiled for an A100, which has no fp8 of its own, is compiled for AMD's GPUs too, by Triton's other backend.
"""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Hashable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

import kvcore.kernels.triton
from kvcore.spec import FORMATS
from tests.support.samples import fewest

ARCHITECTURES = {"A100": 80, "H100": 90, "B200": 100}
HOPPER = 90
"""What kernels in Gluon are written for."""
AMD = {"MI300": "gfx942", "MI350": "gfx950"}
OTHERS = {80: tuple(AMD.values())}
"""By the GPU whose constants they take: AMD's, for which nothing is tuned."""
FOR_NVIDIA = {"attend_codes_kernel": (80, 90, 100), "attend_packed_kernel": (90, 100), "long_scores_kernel": (90,)}
"""Kernels of one maker's layouts of registers, or launched beside such, and the capabilities that these are for."""
RECORD = Path(__file__).parents[2] / "records" / "compile_triton.json"
WRITES = "KVCORE_COMPILE_RECORD"
"""Variable that names the file to write a record to."""
OTHER_COMPILER = 64
"""Bytes of spills more than recorded that another Triton than the record's may come to: a few words cost nothing."""
UNRECORDED = 128
"""Bytes of spills of a case that the record lacks."""

BYTES = {
    "codes", "scales", "plain", "index_codes", "index_scales", "index_plain", "source", "target", "fresh",
    "entry_codes", "entry_scales", "entry_plain", "own", "key_codes", "key_scales", "key_plain", "own_keys",
    "own_values", "key_tail", "tail",
}  # fmt: skip
FLOATS = {
    "kv_tail", "score_tail", "index_kv_tail", "index_score_tail", "scratch", "frequencies", "partial", "partial_lse",
    "sink", "lse", "weights", "scores",
}  # fmt: skip
GIVEN = {"q", "k", "v", "values", "kv", "score", "index_kv", "index_score", "norm", "index_norm"}
OUTPUTS = {"valid_out": "i8", "pairs": "i64"}


class Resources(NamedTuple):
    """What one compiled kernel takes."""

    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int
    warps: int


def compiled(
    kernel: Any,
    arch: int | str,
    constants: dict[str, Any],
    *,
    given: str = "bf16",
    exact: bool = True,
    warps: int = 4,
    registers: int | None = None,
    types: Mapping[str, str] = MappingProxyType({}),
):
    """The kernel compiled with the constants that a launch would pass; ``given`` is the dtype of its float inputs.

    ``arch`` is a compute capability of NVIDIA's or a name of AMD's; ``registers`` the most of a thread.
    ``types`` names elements of pointers that are not always the same.
    """
    signature, attributes = {}, {}
    for number, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            name_of = name.removesuffix("_ptr")
            signature[name] = f"*{types.get(name_of) or _element(name_of, given, exact)}"
            attributes[(number,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("eps", "scale") else "i32"
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False} | ({"maxnreg": registers} if registers else {})
    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = _not_assembled
        return triton.compile(source, target=target, options=options)


def _not_assembled(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
    """Triton asks for a key of its cache, or hands over its stages: PTX is assembled once, by ``resources``."""
    if backend is None:
        return "not assembled", ""
    if "cubin" in stages:
        stages["cubin"] = lambda _ptx, _metadata: b""
    return None


Row = tuple[str, str, str]
"""Kernel, GPU, case."""


class Record(NamedTuple):
    """Triton's version, what is recorded, what was found, which is written if asked for, and what is compiled."""

    triton: str
    known: Mapping[Row, Mapping[str, Any]]
    found: list[dict[str, Any]]
    compiles: frozenset[Row]


def sample(known: Mapping[Row, Mapping[str, Any]]) -> frozenset[Row]:
    """Few rows that show every kernel on every GPU and in all that its cases name, and every GPU in every format.

    Of rows that show as much, those on Hopper, for which most is written, and those nearest to a GPU's limits.
    """

    def shows(row: Row) -> set[Hashable]:
        kernel, arch, case = row
        named = {(kernel, name) for name in re.findall(r"\w+", case)}
        return {(kernel, arch), *named, *((arch, format) for format in formats_of(case))}

    def demand(row: Row) -> tuple[bool, int, int]:
        return row[1] != f"sm_{HOPPER}", -known[row]["spilled_bytes"], -known[row]["registers"]

    return frozenset(fewest(sorted(known, key=demand), shows))


def formats_of(case: str) -> set[str]:
    """Formats that a case names."""
    return {word for word in re.findall(r"\w+", case) if word in FORMATS}


def check(
    record: Record, case: str, kernel: Any, arch: int, constants: dict[str, Any], *, shared: int = 48 * 1024, **options
) -> "Resources":
    """What a kernel takes, which is noted: no more shared memory than ``shared`` bytes, no more spills than before.

    Of rows that the record knows and that are not to be compiled, what the record says.
    """
    found = _taken(record, case, kernel, arch, constants, options)
    assert found.shared_bytes <= shared, f"{kernel.fn.__name__}: {found}"
    for other in () if kernel.fn.__name__ in FOR_NVIDIA else OTHERS.get(arch, ()):
        known = {name: _without_tf32(value) for name, value in constants.items()}
        _taken(record, case, kernel, other, known, options)
    return found


def _without_tf32(constant: Any) -> Any:
    """A constant for AMD's compiler, which does not have tf32 for all of its GPUs."""
    return constant._replace(precision="ieee") if hasattr(constant, "precision") else constant


def _taken(
    record: Record, case: str, kernel: Any, arch: int | str, constants: dict[str, Any], options: dict[str, Any]
) -> Resources:
    """What a kernel takes of one GPU; it spills no more than is recorded."""
    row = name, gpu, _ = kernel.fn.__name__, arch if isinstance(arch, str) else f"sm_{arch}", case
    recorded, allowed = record.known.get(row), UNRECORDED
    if recorded and row not in record.compiles:
        return Resources(*(recorded[field] for field in Resources._fields))
    binary = compiled(kernel, arch, constants, **options)
    found = resources_of_amd(binary) if isinstance(arch, str) else resources(binary)
    record.found.append({"kernel": name, "arch": gpu, "case": case, **found._asdict()})
    if not os.environ.get(WRITES):
        if recorded:
            allowed = recorded["spilled_bytes"] + (record.triton != triton.__version__) * OTHER_COMPILER
        assert found.spilled_bytes <= allowed, f"{name} for {gpu}, {case!r} spills more than {allowed}: {found}"
    return found


def kernels() -> dict[str, Any]:
    """Every kernel of the package, by its name."""
    package = kvcore.kernels.triton
    modules = [module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    return {
        name: value
        for module in map(importlib.import_module, modules)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


def resources(binary: Any) -> Resources:
    """Registers and spills from the assembler, shared memory from the compiler."""
    text = binary.asm["ptx"]
    arch = re.search(r"^\.target (sm_\w+)", text, re.MULTILINE).group(1)
    version = re.search(r"^\.version (\S+)", text, re.MULTILINE).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(text)
        said = subprocess.run(
            [assembler(version), "-v", f"--gpu-name={arch}", str(path), "-o", str(Path(folder, "kernel.cubin"))],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    stack, stores, loads = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", said
    ).groups()
    registers = int(re.search(r"Used (\d+) registers", said).group(1))
    return Resources(registers, int(stores) + int(loads), int(stack), binary.metadata.shared, binary.metadata.num_warps)


def resources_of_amd(binary: Any) -> Resources:
    """Registers of a lane and spills from the code object's own description; its spills are counted in registers."""
    said = {
        name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", binary.asm["amdgcn"], re.MULTILINE)
    }
    spilled = 4 * (said["vgpr_spill_count"] + said["sgpr_spill_count"])
    return Resources(
        said["vgpr_count"],
        spilled,
        said["private_segment_fixed_size"],
        said["group_segment_fixed_size"],
        binary.metadata.num_warps,
    )


def assembler(version: str) -> str:
    """The ptxas that comes with triton: the one that knows the PTX version, where there are two."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newer = folder / "ptxas-blackwell"
    return str(newer if newer.exists() and float(version) > 8.8 else folder / "ptxas")


def _element(name: str, given: str, exact: bool) -> str:
    if name in BYTES:
        return "u8"
    if name in FLOATS:
        return "fp32"
    if name in GIVEN:
        return given
    if name == "out":
        return "bf16" if exact else "fp32"
    return OUTPUTS.get(name, "i32")
