"""Backends as plug-ins: one hook, one record, and the rules by which one is chosen.

A backend is a ``BackendInfo``; built-in ones come from a fixed tuple, others through the entry-point group ``kvcore``.
Nothing here imports a framework: ``requires`` is answered by ``find_spec``, and only ``probe`` and ``load`` import. A
plug-in that cannot be loaded becomes a row that ``kvcore info`` shows and that is raised when it is asked for by name.
"""

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec

import msgspec
import pluggy

from kvcore.errors import BackendError
from kvcore.ops import Backend

hookspec = pluggy.HookspecMarker("kvcore")
hookimpl = pluggy.HookimplMarker("kvcore")

BUILT_IN = ("kvcore.backends.records",)
GROUP = "kvcore"


class KnownGap(msgspec.Struct, frozen=True, kw_only=True):
    """A check that a backend is known not to pass: its id, ``not_yet`` or ``never``, and why."""

    check: str
    status: str
    reason: str


class BackendInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the registry knows about a backend without importing it.

    Attributes:
        name: what ``create_cache(backend=...)`` takes.
        summary: one line for ``kvcore info``.
        requires: modules that must be importable.
        devices: devices it runs on, the preferred one first, for example ``("cuda", "cpu")``.
        capabilities: roles and verbs it supports, in the spec's words.
        priority: order for ``backend="auto"``, highest first; None means only when named.
        install: the command that installs what it requires.
        probe: returns None if the backend runs here, else the reason in one sentence.
        load: imports the framework and returns the backend.
        known_gaps: checks of the conformance kit that it does not pass.
        forget: drops the programs that the backend compiled and keeps; None if it keeps none. Whoever binds it to very
            many plans calls it now and then, so that memory stays bounded.
    """

    name: str
    summary: str
    requires: tuple[str, ...]
    devices: tuple[str, ...]
    capabilities: frozenset[str]
    priority: int | None
    install: str
    probe: Callable[[], str | None]
    load: Callable[[], Backend]
    known_gaps: tuple[KnownGap, ...] = ()
    forget: Callable[[], None] | None = None

    def objection(self, *, probe: bool = True) -> str | None:
        """Why the backend cannot run here, or None; without ``probe`` nothing is imported."""
        missing = [name for name in self.requires if find_spec(name) is None]
        if missing:
            return f"{', '.join(missing)} is not installed; {self.install}"
        return self.probe() if probe else None


class Hooks:
    """The one hook of the project."""

    @hookspec
    def kvcore_backends(self) -> Iterable[BackendInfo]:  # type: ignore[empty-body]
        """Yield one record for every cache backend this package provides."""


class Registry:
    """All backends that can be seen from here, and the plug-ins that failed to load."""

    def __init__(self, *, entry_points: bool = True, blocked: Iterable[str] = ()) -> None:
        self.backends: dict[str, BackendInfo] = {}
        self.failed: dict[str, str] = {}
        self._providers: dict[str, str] = {}
        self._manager = pluggy.PluginManager("kvcore")
        self._manager.add_hookspecs(Hooks)
        for module in BUILT_IN:
            self._add("kvcore", lambda module=module: import_module(module))
        if entry_points:
            self._add_entry_points(set(blocked))

    def _add_entry_points(self, blocked: set[str]) -> None:
        from importlib.metadata import entry_points

        for entry in entry_points(group=GROUP):
            provider = f"{entry.name} ({entry.dist.name} {entry.dist.version})" if entry.dist else entry.name
            if entry.name in blocked:
                self.failed[entry.name] = "blocked by KVCORE_BLOCK_PLUGINS"
            else:
                self._add(provider, entry.load, name=entry.name)

    def _add(self, provider: str, load: Callable[[], object], name: str | None = None) -> None:
        """Register one plug-in in isolation: whatever it does wrong is its own row."""
        try:
            plugin = load()
            self._manager.register(plugin, name=name)
            self._manager.check_pending()
            hook = getattr(plugin, "kvcore_backends", None)
            records = list(hook()) if hook is not None else []
        except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way; the row says how
            self.failed[name or provider] = f"{type(error).__name__}: {error}"
            return
        for record in records:
            if record.name in self.backends:
                raise BackendError(
                    got=f"backend {record.name!r} twice",
                    where="plug-ins",
                    allowed=f"one provider; have {self._providers[record.name]} and {provider}",
                    hint="Uninstall one, or set KVCORE_BLOCK_PLUGINS.",
                )
            self.backends[record.name] = record
            self._providers[record.name] = provider

    def load(self, name: str) -> Backend:
        """The backend of that name.

        Raises:
            BackendError: unknown, failed to load, or cannot run here.
        """
        if name in self.failed:
            raise BackendError(got=self.failed[name], where=f"backend {name!r}", allowed="a plug-in that loads")
        if name not in self.backends:
            raise BackendError(got=name, where="backend", allowed=", ".join(["auto", *self.backends]))
        objection = self.backends[name].objection()
        if objection is not None:
            raise BackendError(
                got=objection, where=f"backend {name!r}", allowed="a backend that runs here", hint=self._others(name)
            )
        return self.backends[name].load()

    def auto(self, device: str | None) -> Backend:
        """The backend of highest priority that runs here, on ``device`` if one is given."""
        kind = None if device is None else device.split(":")[0]
        candidates = sorted(
            (info for info in self.backends.values() if info.priority is not None),
            key=lambda info: -(info.priority or 0),
        )
        reasons: list[str] = []
        for info in candidates:
            if kind is not None and kind not in info.devices:
                reasons.append(f"{info.name}: runs on {', '.join(info.devices)}, not on {kind}")
                continue
            objection = info.objection()
            if objection is None:
                return info.load()
            reasons.append(f"{info.name}: {objection}")
        reasons += [f"{name}: {reason}" for name, reason in self.failed.items()]
        raise BackendError(
            got="no backend for backend='auto'",
            where="backend",
            allowed="; ".join(reasons) or "an installed backend",
            hint="The reference runs everywhere, slowly: backend='reference'.",
        )

    def _others(self, name: str) -> str:
        able = [other for other, info in self.backends.items() if other != name and info.objection(probe=False) is None]
        return f"Installed here: {', '.join(able)}." if able else ""


_default: ContextVar[str | None] = ContextVar("kvcore_backend", default=None)
_registry: list[Registry] = []


def registry() -> Registry:
    """The registry of this process, built at first use."""
    if not _registry:
        blocked = os.environ.get("KVCORE_BLOCK_PLUGINS", "").split(",")
        _registry.append(Registry(blocked=[name.strip() for name in blocked]))
    return _registry[0]


def choose_backend(name: str, device: str | None = None) -> Backend:
    """Argument, then ``use_backend``, then KVCORE_BACKEND, then the best that runs here.

    Raises:
        BackendError: with every candidate and why it was passed over.
    """
    _check_name(name)
    if name == "auto":
        name = _default.get() or os.environ.get("KVCORE_BACKEND") or "auto"
    return registry().auto(device) if name == "auto" else registry().load(name)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise BackendError(got=name, where="backend", allowed="a backend's name or 'auto'")


@contextmanager
def use_backend(name: str) -> Generator[None]:
    """Within the block, ``backend="auto"`` means ``name``."""
    token = _default.set(name)
    try:
        yield
    finally:
        _default.reset(token)
