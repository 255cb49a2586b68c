"""The verbs that users call have examples in their docstrings, and the examples run, on the reference."""

import doctest
import inspect

import pytest

import kvcore
from kvcore import plan, spec
from kvcore.cache import Cache, LayerHandle, Step
from kvcore.ops import Ops
from kvcore.plugins import use_backend
from kvcore.portable.convert import with_formats
from kvcore.requests.request import Request
from kvcore.store import BlockStore

# With the examples of a class, those of its methods begin; these must have some, and whatever else has some is run.
CLASSES = {
    Cache: "admit step truncate release fork checkpoint restorable fits export_request save",
    Step: "from_batch abort",
    LayerHandle: "append_kv append_window flush select attend mask",
    Request: "",
}
FUNCTIONS = [
    kvcore.create_cache, kvcore.load, kvcore.to_numpy, kvcore.Periodic, use_backend, spec.CacheSpec,
    spec.from_hf_config, spec.to_json, spec.address, plan.plan_cache, plan.logical_bytes, plan.bytes_per_token,
    kvcore.adopt, BlockStore, Ops.explain, with_formats,
]  # fmt: skip
METHODS = [
    (kind, name)
    for kind, names in CLASSES.items()
    for name, value in sorted(inspect.getmembers(kind))
    if not name.startswith("_") and (name in names.split() or ">>>" in (inspect.getdoc(value) or ""))
]


def run(names: dict, *documented: object) -> int:
    """Run the examples of docstrings one after the other; returns how many there were."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    for value in documented:
        text = inspect.getdoc(value) or ""
        name = getattr(value, "__qualname__", str(value))
        test = doctest.DocTestParser().get_doctest(text, names, name, name, None)
        assert test.examples, f"{name} has no example"
        report: list[str] = []
        runner.run(test, out=report.append, clear_globs=False)
        assert not runner.failures, "".join(report)
        names = test.globs
    return runner.tries


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class(kind):
    assert run({}, kind) > 0


@pytest.mark.parametrize(("kind", "name"), METHODS, ids=[f"{kind.__name__}.{name}" for kind, name in METHODS])
def test_a_method_after_its_class(kind, name):
    assert run({}, kind, inspect.getattr_static(kind, name)) > 0


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_alone(function):
    assert run({}, function) > 0


def test_an_example_that_is_wrong_fails():
    def wrong():
        """
        >>> 1 + 1
        3
        """

    with pytest.raises(AssertionError, match="Expected"):
        run({}, wrong)
