"""``import kvcore`` costs next to nothing: no array library, no framework, no plug-in discovery."""

import subprocess
import sys

import pytest

HEAVY = (
    "numpy",
    "ml_dtypes",
    "torch",
    "triton",
    "jax",
    "jaxlib",
    "transformers",
    "rich",
    "jinja2",
    "hypothesis",
    "pytest",
)


def loaded_by(statement):
    """Names of the modules that a statement adds in a fresh interpreter."""
    code = f"import sys; before = set(sys.modules); {statement}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def heavy_among(modules, names):
    return [module for module in modules if module.partition(".")[0] in names or module in names]


def test_importing_kvcore():
    modules = loaded_by("import kvcore")
    assert "kvcore" in modules
    assert heavy_among(modules, (*HEAVY, "importlib.metadata", "msgspec", "pluggy")) == []


@pytest.mark.parametrize(
    "statement",
    [
        "import kvcore.spec",
        "from kvcore import CacheSpec",
        "from kvcore.spec import presets, to_json; to_json(presets.deepseek_v4_flash())",
        "from kvcore.plan import plan_cache",
        "import kvcore; kvcore.spec.json_schema()",
    ],
)
def test_specs_and_plans_need_no_arrays(statement):
    modules = loaded_by(statement)
    assert "kvcore.spec.model" in modules
    assert heavy_among(modules, HEAVY) == []


def test_the_reference_needs_no_framework():
    modules = loaded_by(
        "import kvcore; "
        "spec = kvcore.spec.presets.deepseek_v4_flash_tiny(); "
        "kvcore.create_cache(spec, backend='reference', max_requests=1, max_tokens=32)"
    )
    assert "kvcore.backends.reference" in modules
    assert heavy_among(modules, ("torch", "triton", "jax", "jaxlib", "transformers", "rich")) == []


def test_torchs_backend_needs_no_triton_on_a_cpu():
    modules = loaded_by(
        "sys.modules['triton'] = None  # as where it is not installed\n"
        "import kvcore, torch\n"
        "spec = kvcore.CacheSpec(layers=[kvcore.spec.LayerSpec(kv=kvcore.spec.KV(key_heads=1, key_dim=4))])\n"
        "cache = kvcore.create_cache(spec, backend='torch_triton', device='cpu', max_requests=1, max_tokens=32)\n"
        "rows = torch.ones(1, 1, 4)\n"
        "with cache.step({cache.admit(): 1}) as step: step.layer(0).append_kv(rows, rows)"
    )
    assert "kvcore.backends.torch_triton.backend" in modules
    assert heavy_among(modules, ("jax", "jaxlib", "transformers", "rich")) == []


def test_a_list_of_backends_needs_no_arrays():
    modules = loaded_by(
        "import contextlib, io; from kvcore.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['info'])\n"
    )
    assert "kvcore.backends" in modules
    assert heavy_among(modules, set(HEAVY) - {"rich"}) == []


def test_public_names_are_all_there():
    code = "import kvcore; print([name for name in kvcore.__all__ if not hasattr(kvcore, name)], len(dir(kvcore)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    missing, _, count = done.stdout.strip().rpartition(" ")
    assert missing == "[]"
    assert int(count) >= 10


def test_an_unknown_name_is_an_attribute_error():
    import kvcore

    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = kvcore.nope
