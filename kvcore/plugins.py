"""Backends as plug-ins: one hook, one record, and the rules by which one is chosen.

A backend is a ``BackendInfo``; built-in ones come from a fixed tuple, others through the entry-point group ``kvcore``.
Nothing here imports a framework: ``requires`` is answered by ``find_spec``, and only ``probe`` and ``load`` import. A
plug-in that cannot be loaded becomes a row that ``kvcore info`` shows and that is raised when it is asked for by name.
Whatever it raises is its own row, ``SystemExit`` too; only an interrupt that came from outside, a Ctrl-C, goes on.
"""

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pluggy

from kvcore.errors import BackendError, SpecError
from kvcore.foreign import Failed, isolated
from kvcore.spec import FORMATS, LAYOUTS, ROLES, CacheSpec

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from kvcore.ops import Backend  # NumPy, which a list of backends does not need

hookspec = pluggy.HookspecMarker("kvcore")
hookimpl = pluggy.HookimplMarker("kvcore")

BUILT_IN = ("kvcore.backends",)
GROUP = "kvcore"


ANY_ROLE = "any_role"
"""What a backend declares that stores rows of components it does not know, by what they say of themselves."""

VERBS = ("attend", "select")
"""Verbs that a backend may lack: what it stores can be read, and computed with elsewhere."""

CAPABILITIES = frozenset({*ROLES, ANY_ROLE, *LAYOUTS, *VERBS})
"""The words that a backend may declare, beside names of formats."""


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a backend, in the words of a spec.

    Attributes:
        roles: of all layers.
        formats: names of all formats that rows are stored in.
        layout: of the pools; None for the backend's own choice.
        verbs: of ``VERBS``.
    """

    roles: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    layout: str | None = None
    verbs: frozenset[str] = frozenset()

    @classmethod
    def of(cls, spec: CacheSpec, layout: str = "auto", verbs: Iterable[str] = ()) -> "Needs":
        """What a cache of this spec needs. Raises SpecError where ``spec`` is none."""
        _check_spec(spec)
        components = [(role, component) for _, role, component in spec.components()]
        return cls(
            roles=frozenset(role for role, _ in components),
            formats=frozenset(part.format.name for _, component in components for part in component.parts),
            layout=layout if layout in LAYOUTS else None,
            verbs=frozenset(verbs),
        )

    def unmet(self, capabilities: frozenset[str]) -> list[str]:
        """What a backend does not declare, in the words above; all formats are declared by naming none."""
        words = {role if role in ROLES else ANY_ROLE for role in self.roles} | self.verbs
        words |= set() if self.layout is None else {self.layout}
        named = capabilities & FORMATS.keys()
        return sorted(words - capabilities) + sorted(self.formats - named if named else ())


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
        capabilities: what it supports, in the spec's words: roles (``any_role``: those of outside code, by what their
            components declare), layouts, and ``attend`` and ``select``. Names of formats, if it stores those only;
            by naming none it says that it stores every format of the codes that there are. A backend that does not
            declare what a spec needs is not chosen for it, and the kit's checks that need it are ``unsupported``.
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
    load: "Callable[[], Backend]"
    known_gaps: tuple[KnownGap, ...] = ()
    forget: Callable[[], None] | None = None

    def objection(self, *, probe: bool = True) -> str | None:
        """Why the backend cannot run here, or None; without ``probe`` nothing is imported. What it raises is one."""
        found = isolated(self._objection, probe)
        return f"its probe failed: {found.reason}" if isinstance(found, Failed) else found

    def lacks(self, needs: Needs) -> str | None:
        """What the backend does not declare of what is needed, in a sentence, or None."""
        unmet = needs.unmet(frozenset(self.capabilities))
        return f"does not declare {', '.join(unmet)}" if unmet else None

    def _objection(self, probe: bool) -> str | None:
        missing = [name for name in self.requires if find_spec(name) is None]
        if missing:
            return f"{', '.join(missing)} is not installed; {self.install}"
        found: Any = self.probe() if probe else None
        if found is not None and not isinstance(found, str):
            return f"its probe returned {found!r}, neither a reason nor None"
        return found


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

        found = isolated(lambda: list(entry_points(group=GROUP)))
        if isinstance(found, Failed):
            self.failed["entry points"] = found.reason
            return
        for entry in found:
            if entry.name in blocked:
                self.failed[entry.name] = "blocked by KVCORE_BLOCK_PLUGINS"
                continue
            provider = isolated(_provider, entry)
            self._add(entry.name if isinstance(provider, Failed) else provider, entry.load, name=entry.name)

    def _add(self, provider: str, load: Callable[[], object], name: str | None = None) -> None:
        """Register one plug-in in isolation: whatever it does wrong is its own row, and nothing of it is taken."""
        records = isolated(self._records, load, name)
        if isinstance(records, Failed):
            self.failed[name or provider] = records.reason
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

    def _records(self, load: Callable[[], object], name: str | None) -> list[BackendInfo]:
        plugin = load()
        self._manager.register(plugin, name=name)
        try:
            self._manager.check_pending()
            hook = getattr(plugin, "kvcore_backends", None)
            if hook is None:
                raise TypeError("no kvcore_backends, the hook that yields backends")
            records = list(hook())
            for record in records:
                _check_record(record)
        except BaseException:
            # A plug-in that stays registered would fail the check of those that come after it.
            self._manager.unregister(plugin)
            raise
        return records

    def load(self, name: str, needs: Needs | None = None) -> "Backend":
        """The backend of that name.

        Raises:
            BackendError: unknown, failed to load, cannot run here, or does not declare what is needed.
        """
        where = f"backend {name!r}"
        if name not in self.backends:
            if name in self.failed:
                raise BackendError(got=self.failed[name], where=where, allowed="a plug-in that loads")
            raise BackendError(got=name, where="backend", allowed=", ".join(["auto", *self.backends]))
        info = self.backends[name]
        lacking = None if needs is None else info.lacks(needs)
        if lacking is not None:
            allowed = "a backend that declares what the spec needs"
            raise BackendError(got=lacking, where=where, allowed=allowed, hint=self._others(name, needs))
        found = _loaded(info)
        if isinstance(found, str):
            allowed = "a backend that runs here"
            raise BackendError(got=found, where=where, allowed=allowed, hint=self._others(name, needs))
        return found

    def auto(self, device: str | None, needs: Needs | None = None) -> "Backend":
        """The backend of highest priority that runs here, on ``device`` if one is given, and has what is needed."""
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
            found = (None if needs is None else info.lacks(needs)) or _loaded(info)
            if not isinstance(found, str):
                return found
            reasons.append(f"{info.name}: {found}")
        reasons += [f"{name}: {reason}" for name, reason in self.failed.items()]
        raise BackendError(
            got="no backend for backend='auto'",
            where="backend",
            allowed="; ".join(reasons) or "an installed backend",
            hint="The reference runs everywhere, slowly: backend='reference'.",
        )

    def _others(self, name: str, needs: Needs | None) -> str:
        able = [
            other
            for other, info in self.backends.items()
            if other != name and not (needs and info.lacks(needs)) and info.objection(probe=False) is None
        ]
        return f"Installed here: {', '.join(able)}." if able else ""


def _provider(entry: "EntryPoint") -> str:
    return f"{entry.name} ({entry.dist.name} {entry.dist.version})" if entry.dist else entry.name


def _loaded(info: BackendInfo) -> "Backend | str":
    """The backend, or why there is none."""
    objection = info.objection()
    if objection is not None:
        return objection
    found: Any = isolated(info.load)
    if isinstance(found, Failed):
        return f"failed to load: {found.reason}"
    if not all(callable(getattr(found, name, None)) for name in ("create", "default_layout")):
        return f"failed to load: {type(found).__name__} is no backend, without create or default_layout"
    return found


def _check_record(record: object) -> None:
    """Refuse what is no ``BackendInfo``, or one whose fields are not what they are said to be."""
    if not isinstance(record, BackendInfo):
        raise TypeError(f"kvcore_backends yields {type(record).__name__}, not BackendInfo")
    texts: dict[str, Any] = {"name": record.name, "summary": record.summary, "install": record.install}
    rows: dict[str, Any] = {name: getattr(record, name) for name in ("requires", "devices", "capabilities")}
    calls: dict[str, Any] = {"probe": record.probe, "load": record.load, "forget": record.forget or repr}
    gaps: Any = record.known_gaps
    priority: Any = record.priority
    fits = {
        **{name: isinstance(value, str) for name, value in texts.items()},
        **{name: _are(str, value) for name, value in rows.items()},
        **{name: callable(value) for name, value in calls.items()},
        "known_gaps": _are(KnownGap, gaps),
        "priority": priority is None or (isinstance(priority, int) and not isinstance(priority, bool)),
    }
    wrong = [name for name, fit in fits.items() if not fit] or (["name"] if record.name in ("", "auto") else [])
    if wrong:
        raise TypeError(f"BackendInfo.{wrong[0]} is {getattr(record, wrong[0])!r}")


def _are(kind: type, values: Any) -> bool:
    if not isinstance(values, (tuple, list, set, frozenset)):
        return False
    return all(isinstance(value, kind) for value in cast("Iterable[object]", values))


_default: ContextVar[str | None] = ContextVar("kvcore_backend", default=None)
_registry: list[Registry] = []


def registry() -> Registry:
    """The registry of this process, built at first use."""
    if not _registry:
        blocked = os.environ.get("KVCORE_BLOCK_PLUGINS", "").split(",")
        _registry.append(Registry(blocked=[name.strip() for name in blocked]))
    return _registry[0]


def choose_backend(name: str, device: str | None = None, needs: Needs | None = None) -> "Backend":
    """Argument, then ``use_backend``, then KVCORE_BACKEND, then the best that runs here and declares what is needed.

    Args:
        name: a backend's name, or ``auto``.
        device: where it is to run; None for its own choice.
        needs: ``Needs.of(spec, layout)``; None asks for nothing.

    Raises:
        BackendError: the one that was named lacks something; or every candidate and why it was passed over.
    """
    _check_name(name)
    if name == "auto":
        name = _default.get() or os.environ.get("KVCORE_BACKEND") or "auto"
    return registry().auto(device, needs) if name == "auto" else registry().load(name, needs)


def _check_spec(spec: object) -> None:
    if not isinstance(spec, CacheSpec):
        raise SpecError(got=spec, where="spec", allowed="a CacheSpec", hint="kvcore.spec.presets has ready-made ones.")


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise BackendError(got=name, where="backend", allowed="a backend's name or 'auto'")


@contextmanager
def use_backend(name: str) -> Generator[None]:
    """Within the block, ``backend="auto"`` means ``name``.

    Example:
        >>> import kvcore
        >>> spec = kvcore.spec.presets.classic(layers=1, key_heads=1, key_dim=4)
        >>> with kvcore.use_backend("reference"):
        ...     kvcore.create_cache(spec, max_requests=1, max_tokens=256).backend.name
        'reference'
    """
    token = _default.set(name)
    try:
        yield
    finally:
        _default.reset(token)
