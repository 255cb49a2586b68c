"""Plug-ins that fail in any way are rows and stop nobody; backends are chosen by what a spec needs."""

import json
import os
import signal
import sys
from types import SimpleNamespace

import msgspec
import pytest

import kvcore
from kvcore import plugins
from kvcore.backends.reference import ReferenceBackend
from kvcore.cli import main
from kvcore.errors import BackendError, SpecError
from kvcore.foreign import Failed, isolated
from kvcore.plugins import CAPABILITIES, BackendInfo, Needs
from kvcore.spec import KV, CacheSpec, LayerSpec, Window, to_json

LATENT = CacheSpec(layers=(LayerSpec(window=Window(dim=8, window=4, format="fp32")),), block_tokens=8)
CLASSIC = CacheSpec(layers=(LayerSpec(kv=KV(key_heads=1, key_dim=8, value_format="int8_row")),), block_tokens=8)


def info(name="mine", **fields):
    given = {
        "summary": "a test's own", "requires": (), "devices": ("cpu",), "capabilities": CAPABILITIES, "priority": 900,
        "install": "pip install nothing", "probe": lambda: None, "load": ReferenceBackend,
    }  # fmt: skip
    return BackendInfo(name=name, **{**given, **fields})


@pytest.fixture
def installed(monkeypatch):
    """Put entry points of the test's own in the place of those that are installed."""

    def add(**loads):
        entries = [SimpleNamespace(name=name, load=load, dist=None) for name, load in loads.items()]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries if group == "kvcore" else [])
        monkeypatch.setattr(plugins, "_registry", [])
        return plugins.registry()

    return add


def plugin(hook):
    """What an entry point loads: a module with the hook."""
    return lambda: SimpleNamespace(kvcore_backends=kvcore.hookimpl(hook))


def raising(error):
    def load():
        raise error

    return load


def half_way():
    yield info("half")
    raise SystemExit("no licence")


def no_formats():
    return []


class NoText(Exception):
    def __str__(self):
        raise ValueError("not even a text")


BROKEN = {
    "exits": (raising(SystemExit(3)), "SystemExit: 3"),
    "interrupts": (raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    "ends": (raising(GeneratorExit()), "GeneratorExit"),
    "raises": (raising(ImportError("no module")), "ImportError: no module"),
    "has no text": (raising(NoText()), "NoText"),
    "exits half way": (plugin(half_way), "SystemExit: no licence"),
    "yields text": (plugin(lambda: ["mine"]), "TypeError: kvcore_backends yields str, not BackendInfo"),
    "yields nothing": (plugin(lambda: None), "TypeError: 'NoneType' object is not iterable"),
    "has no hook": (lambda: SimpleNamespace(), "TypeError: no kvcore_backends, the hook that yields backends"),
    "has an unknown hook": (
        lambda: SimpleNamespace(kvcore_formats=kvcore.hookimpl(no_formats), kvcore_backends=no_formats),
        "PluginValidationError: ",
    ),
    "has a number for a name": (plugin(lambda: [info(7)]), "TypeError: BackendInfo.name is 7"),
    "is called auto": (plugin(lambda: [info("auto")]), "TypeError: BackendInfo.name is 'auto'"),
    "has text for devices": (plugin(lambda: [info(devices="cpu")]), "TypeError: BackendInfo.devices is 'cpu'"),
    "has no probe": (plugin(lambda: [info(probe=None)]), "TypeError: BackendInfo.probe is None"),
    "has words for a priority": (plugin(lambda: [info(priority="high")]), "TypeError: BackendInfo.priority is 'high'"),
    "is one good and one bad": (plugin(lambda: [info("good"), 3]), "TypeError: kvcore_backends yields int"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plug_in_is_a_row(name, installed, capsys):
    load, reason = BROKEN[name]
    found = installed(before=plugin(lambda: [info("before")]), broken=load, after=plugin(lambda: [info("after")]))
    assert found.failed["broken"].startswith(reason)
    assert [*found.backends] == ["reference", "torch_triton", "jax_pallas", "before", "after"]
    assert kvcore.create_cache(LATENT, backend="reference", max_requests=1).backend.name == "reference"
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"]["broken"].startswith(reason)
    with pytest.raises(BackendError, match="a plug-in that loads"):
        found.load("broken")


def test_a_broken_plug_in_cannot_take_a_name_away(installed):
    found = installed(reference=raising(SystemExit(1)))
    assert found.failed == {"reference": "SystemExit: 1"}
    assert found.load("reference").name == "reference"


def test_entry_points_that_cannot_be_listed_are_a_row(monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: raising(ValueError("bad metadata"))())
    found = plugins.Registry()
    assert found.failed == {"entry points": "ValueError: bad metadata"}
    assert "reference" in found.backends


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), RuntimeError("no driver")], ids=repr)
@pytest.mark.parametrize("where", ["probe", "load"])
def test_a_probe_or_load_that_raises(where, error, installed):
    reason = {"probe": "its probe failed: ", "load": "failed to load: "}[where] + type(error).__name__
    found = installed(
        bad=plugin(lambda: [info("bad", priority=1000, **{where: raising(error)})]), good=plugin(lambda: [info("good")])
    )
    assert isinstance(found.auto(None), ReferenceBackend)
    with pytest.raises(BackendError) as caught:
        found.load("bad")
    assert caught.value.got.startswith(reason)
    found.backends = {"bad": found.backends["bad"]}
    with pytest.raises(BackendError, match="no backend") as caught:
        found.auto(None)
    assert f"bad: {reason}" in caught.value.allowed


@pytest.mark.parametrize(("fields", "reason"), [
    ({"probe": lambda: False}, "its probe returned False, neither a reason nor None"),
    ({"load": lambda: None}, "failed to load: NoneType is no backend"),
    ({"requires": ("..",)}, "its probe failed: "),
])  # fmt: skip
def test_a_record_that_lies(fields, reason, installed):
    found = installed(liar=plugin(lambda: [info("liar", **fields)]))
    with pytest.raises(BackendError) as caught:
        found.load("liar")
    assert caught.value.got.startswith(reason)


@pytest.fixture
def interruptible():
    """What a program has at its start; a worker of several tests may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_from_outside_goes_on():
    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10**8):  # the interrupt is raised between two of these
            pass

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        isolated(interrupted)
    assert signal.getsignal(signal.SIGINT) is handler
    assert isolated(raising(KeyboardInterrupt("mine"))).reason == "KeyboardInterrupt: mine"
    assert signal.getsignal(signal.SIGINT) is handler
    assert isolated(lambda: 3) == 3
    assert not isinstance(isolated(lambda: 3), Failed)


# what is declared -> what a spec needs -> what is said
LACKING = {
    "a role": ({"window", "packed"}, CLASSIC, "auto", "does not declare kv"),
    "a role and a layout": ({"window", "packed"}, CLASSIC, "planar", "does not declare kv, planar"),
    "a layout": ({"kv", "packed"}, CLASSIC, "planar", "does not declare planar"),
    "a format": ({"kv", "packed", "bf16", "fp32"}, CLASSIC, "packed", "does not declare int8_row"),
    "nothing is declared": (set(), LATENT, "auto", "does not declare window"),
}


@pytest.mark.parametrize("case", LACKING)
def test_capabilities_choose(case, installed):
    declared, spec, layout, said = LACKING[case]
    poor = info("poor", capabilities=frozenset(declared))
    found = installed(poor=plugin(lambda: [poor]))
    chosen = kvcore.create_cache(spec, max_requests=1, max_tokens=8, layout=layout)
    assert chosen.backend.name == "torch_triton"  # auto, and poor has a higher priority
    with pytest.raises(BackendError) as caught:
        kvcore.create_cache(spec, backend="poor", max_requests=1, max_tokens=8, layout=layout)
    assert (caught.value.got, caught.value.where) == (said, "backend 'poor'")
    assert "reference" in caught.value.hint
    found.backends = {"poor": poor}
    with pytest.raises(BackendError, match="no backend") as caught:
        kvcore.create_cache(spec, max_requests=1, max_tokens=8, layout=layout)
    assert f"poor: {said}" in caught.value.allowed


@pytest.mark.parametrize("declared", [{"kv", "packed"}, {"kv", "packed", "bf16", "int8_row"}, [*CAPABILITIES]])
def test_what_declares_enough_is_chosen(declared, installed):
    installed(able=plugin(lambda: [info("able", capabilities=declared)]))
    cache = kvcore.create_cache(CLASSIC, max_requests=1, max_tokens=8, layout="packed")
    assert isinstance(cache.backend, ReferenceBackend)  # what the test's record loads


def test_verbs_can_be_needed_too(installed):
    found = installed(stores=plugin(lambda: [info("stores", capabilities=CAPABILITIES - {"attend"})]))
    assert found.load("stores", Needs.of(CLASSIC)).name == "reference"
    with pytest.raises(BackendError, match="does not declare attend"):
        found.load("stores", Needs.of(CLASSIC, verbs=["attend"]))


def test_roles_of_outside_code_are_one_capability(installed):
    from tests.support import outside_components as outside

    installed(own=plugin(lambda: [info("own", capabilities=CAPABILITIES - {"any_role"})]))
    with pytest.raises(BackendError, match="does not declare any_role"):
        outside.create("own")


def test_a_wrong_spec_is_said_before_any_backend_is_asked():
    with pytest.raises(SpecError, match="a CacheSpec"):
        kvcore.create_cache({"layers": []}, max_requests=1)


def test_info_says_what_is_lacking(installed, capsys, tmp_path):
    path = tmp_path / "spec.json"
    path.write_text(to_json(CLASSIC))
    installed(poor=plugin(lambda: [info("poor", capabilities=frozenset({"window", "packed"}))]))
    assert main(["info", "--spec", str(path), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    assert (rows["poor"]["can_run"], rows["poor"]["reason"]) == (False, "does not declare kv")
    assert rows["reference"]["reason"] is None
    assert (rows["reference"]["not_declared"], "kv" in rows["poor"]["not_declared"]) == ([], True)
    assert main(["info", "--spec", "no such thing"]) == 2


def test_the_built_in_records_pass_the_check_of_records():
    found = plugins.Registry(entry_points=False)
    assert found.failed == {}
    assert all(msgspec.structs.asdict(one)["capabilities"] == CAPABILITIES for one in found.backends.values())
