"""Every error that kvcore raises on purpose, in one small tree.

Each error is also the built-in that fits, so that callers who know nothing of kvcore can still catch it. A message has
four parts: what was got, where, what is allowed, and what to do.
"""

from kvcore.foreign import printable, written


class KvcoreError(Exception):
    """Base of all kvcore errors.

    Attributes:
        got: the offending value, as text.
        where: the argument, field or path that held it, for example ``layers[1].window.dim``.
        allowed: what would have been accepted.
        hint: what to do next; may be empty.
    """

    def __init__(self, *, got: object, where: str, allowed: str, hint: str = "") -> None:
        self.got = got if isinstance(got, str) and got else written(got)
        self.where = where
        self.allowed = allowed
        self.hint = hint
        text = f"{where}: got {self.got}; allowed: {allowed}."
        # Some of it may have come from elsewhere, and messages go to terminals.
        super().__init__(printable(f"{text} {hint}" if hint else text, lines=True))

    def __reduce__(self) -> tuple[object, ...]:
        parts = {"got": self.got, "where": self.where, "allowed": self.allowed, "hint": self.hint}
        return _rebuild, (type(self), parts)


def _rebuild(kind: type[KvcoreError], parts: dict[str, str]) -> KvcoreError:
    return kind(**parts)


class SpecError(KvcoreError, ValueError):
    """A spec, format, layout or plan request that cannot be built."""


class ShapeError(KvcoreError, ValueError):
    """An argument of a verb has the wrong shape, dtype, device or kind."""


class RequestError(KvcoreError, ValueError):
    """A request that is released, stale, or belongs to another cache."""


class RollbackError(KvcoreError, ValueError):
    """A truncation deeper than what the rings still hold."""


class SnapshotError(KvcoreError, ValueError):
    """A saved or exported state that is damaged or belongs to another spec."""


class NonFiniteError(KvcoreError, ValueError):
    """NaN or infinity (or a value beyond a clipping format's range) met under ``check=True``."""


class StepError(KvcoreError, RuntimeError):
    """A step used out of turn: nested, closed, incomplete, or a verb that the layer does not have."""


class BackendError(KvcoreError, RuntimeError):
    """A backend that is unknown, cannot run here, or was registered twice."""


class TransferError(KvcoreError, RuntimeError):
    """A request that could not be pulled from another process; nothing was changed here.

    Attributes:
        reason: ``unknown``, ``out_of_range``, ``consumed``, ``stale``, ``expired`` (the exporter refused the
            reference), ``no_room`` (its places are taken), ``peer_lost``, ``timeout`` (it did not answer), or
            ``damaged`` (what came does not verify).
    """

    def __init__(self, *, reason: str, got: object, where: str, allowed: str, hint: str = "") -> None:
        super().__init__(got=got, where=where, allowed=allowed, hint=hint)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        parts = {"got": self.got, "where": self.where, "allowed": self.allowed, "hint": self.hint}
        return _rebuild, (type(self), {"reason": self.reason, **parts})


class FaultError(KvcoreError, RuntimeError):
    """Rows, or what says where they lie, that are not as they were written, met under ``canary``.

    Attributes:
        faults: what was found, each a ``kvcore.cache.Fault``; empty where the error came from another process.
    """

    def __init__(
        self, *, got: object, where: str, allowed: str, hint: str = "", faults: tuple[object, ...] = ()
    ) -> None:
        super().__init__(got=got, where=where, allowed=allowed, hint=hint)
        self.faults = faults


class OutOfBlocks(KvcoreError, MemoryError):
    """The paged pools cannot hold the tokens asked for; nothing was taken."""


class OutOfSlots(KvcoreError, MemoryError):
    """Every request slot is taken; nothing was changed."""
