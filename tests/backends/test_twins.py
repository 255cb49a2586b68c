"""The backends are twins: the same files of functions, in the same order, with the same parameters.

Read as text, so that no framework is needed. What a backend has beside is listed here; what begins with an underscore
is a file's own.
"""

import ast
from pathlib import Path

import pytest

BACKENDS = ("reference", "torch_triton", "jax_pallas")
ROOT = Path(__file__).parents[2] / "kvcore" / "backends"
FILES = ("encoding", "rows", "window", "tail", "entries", "indexer", "attention", "kv", "lifecycle")
"""By role and subject; a backend's table of verbs is its ``backend.py``."""

BESIDE = {
    "reference": {
        "encoding": {"group_values", "scale_values", "dtype_of", "put", "unpack_nibbles"},
        "rows": {"split_bytes", "join_bytes"},
        "tail": {"pool"},
    },
    "torch_triton": {
        # Of tensors what NumPy has, or what asks a GPU for nothing.
        "encoding": {
            "group_values",
            "scale_values",
            "spread",
            "within",
            "levels",
            "pairs_of",
            "nf4_midpoints",
            "e2m1_edges",
            "plain_code",
        }
        | {"put", "reinterpret"},
        "rows": {"field", "numbers", "split_bytes", "join_bytes", "of_request", "own_token", "numbers_from", "maximum"}
        | {"blank", "portions"},
        "tail": {"pool", "frequencies_of", "on_device"},
        "attention": {"inverse_rope"},
        "lifecycle": {"mix"},
        # A CPU's pools are lent as they lie.
        "kv": {"kv_view", "append_kv_view"},
    },
    "jax_pallas": {
        "encoding": {"large", "sylvester", "bytes_of", "unpack_nibbles"},
        # How kernels move rows, and arrays that are not written in place.
        "rows": {"load_in_order", "own_token", "origin", "read_fp32", "append_values", "store_values", "read_values"}
        | {"read_all_values", "of", "visible", "numbered", "requests_like", "divided", "rest"}
        | {"only_if"},  # rings of a program that may write them or not
        "tail": {"flush_latents", "windows", "cos_sin", "frequencies_of"},
        "entries": {"untaken"},
        "indexer": {"index_select"},  # in one program
        "attention": {"inverse_rope", "read", "by_tokens", "no_keys", "finish"},
        "kv": {"attend_in_place", "in_order", "seen_blocks"},
        "lifecycle": {"mix"},
    },
}
MORE = {
    ("jax_pallas", "tail.flush"): ("append", "newest", "now"),  # of the launch, or the program, that does both
    ("jax_pallas", "indexer.select"): ("kernels",),  # no pools say it
}
"""Parameters, at the end, of calls that another backend does not have."""

UNLIKE = {"rows.first_token", "attention.softmax_sum"}
"""The same by name alone: what is worked out for one request or token there is worked out for all of them here."""


def functions(backend: str, file: str) -> dict[str, list[str]]:
    """Public function -> its parameters as written, keyword-only ones after ``*``; without annotations."""
    tree = ast.parse((ROOT / backend / f"{file}.py").read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            given = node.args
            names = [each.arg for each in [*given.posonlyargs, *given.args]]
            star = ["*", *(each.arg for each in given.kwonlyargs)] if given.kwonlyargs else []
            found[node.name] = names + star
    return found


def common(backend: str, file: str) -> list[str]:
    beside = BESIDE[backend].get(file, set())
    return [name for name in functions(backend, file) if name not in beside]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_files_have_the_same_functions_in_the_same_order(backend: str, file: str) -> None:
    assert common(backend, file) == common(BACKENDS[0], file)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_functions_take_the_same(backend: str, file: str) -> None:
    reference, own = functions(BACKENDS[0], file), functions(backend, file)
    for name in common(BACKENDS[0], file):
        if f"{file}.{name}" not in UNLIKE:
            more = MORE.get((backend, f"{file}.{name}"), ())
            assert own[name] == [*reference[name], *more], name


@pytest.mark.parametrize("backend", BACKENDS)
def test_verbs_of_a_layer_take_the_layer_first(backend: str) -> None:
    for file in ("window", "tail", "entries", "indexer", "attention", "kv", "lifecycle"):
        for name in common(BACKENDS[0], file):
            names = [each for each in functions(backend, file)[name] if each in ("layer", "pools", "index")]
            assert names in ([], ["index"], ["layer", "index"], ["layer", "pools", "index"]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_backend_has_beside_is_there(backend: str) -> None:
    for file, names in BESIDE[backend].items():
        assert names <= functions(backend, file).keys()


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_of_twins_are_annotated(backend: str) -> None:
    for file in FILES:
        tree = ast.parse((ROOT / backend / f"{file}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in common(BACKENDS[0], file):
                given = [*node.args.args, *node.args.kwonlyargs]
                assert [each.arg for each in given if each.annotation is None] == [], f"{file}.{node.name}"
