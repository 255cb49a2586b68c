"""A model configuration's fields, checked as they are read: an object's attributes, or those of a ``config.json``."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from kvcore.errors import SpecError

MOST_LAYERS = 4096
"""Of a configuration."""

_UNSAID: Any = object()


class Fields:
    """Fields of one configuration by their standard names.

    A field that is absent takes the default that the caller gives; one that is ``None`` says "none".

    Args:
        config: an object with attributes, or a mapping.
        where: what errors call it.
        names: standard name -> what this configuration calls it, if it does not use the standard one.
        instead: fields whose values go before the configuration's.
    """

    def __init__(
        self,
        config: Any,
        where: str = "config",
        names: Mapping[str, str] | None = None,
        instead: Mapping[str, Any] | None = None,
    ) -> None:
        self.where = where
        self._config: Any = config
        self._names = names or {}
        self._instead = instead or {}

    def renamed(self, names: Mapping[str, str]) -> "Fields":
        """The same fields, where some have names of their own."""
        return Fields(self._config, self.where, names, self._instead)

    def restated(self, values: Mapping[str, Any], where: str = "") -> "Fields":
        """The same fields but for some."""
        return Fields(self._config, where or self.where, self._names, {**self._instead, **values})

    def of_layer(self, number: int) -> "Fields":
        """The fields of one layer, where the configuration says some for it alone (``per_layer_config``)."""
        layers = self.get("per_layer_config")
        where = f"{self.where}.per_layer_config[{number}]"
        if isinstance(layers, Mapping):  # a file's, by numbers as text, without what all layers have in common
            by_number = cast("Mapping[Any, Any]", layers).items()
            own = next((own for key, own in by_number if str(key).isdecimal() and int(key) == number), None)
            return self.restated(cast("Mapping[str, Any]", own), where) if isinstance(own, Mapping) else self
        if isinstance(layers, Sequence) and not isinstance(layers, str):
            whole = cast("Sequence[Any]", layers)
            return Fields(whole[number], where, self._names, self._instead) if number < len(whole) else self
        return self

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is; ``default`` if the configuration does not have the field."""
        value = self._raw(name)
        return default if value is _UNSAID else value

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least ``least``; without a default it must be said."""
        value = self._raw(name)
        if value is _UNSAID and default is not None:
            return default
        if value is _UNSAID or value is None:
            raise SpecError(got="nothing", where=self.path(name), allowed=f"an integer, {least} or more")
        return self._integer(name, value, least, "")

    def layers(self, listed: int | None = None) -> int:
        """How many layers there are: a number from which that many are made, so no model's is beyond the limit.

        ``listed``: how many something else lists, where the number itself may be left out.
        """
        count = self.integer("num_hidden_layers", listed)
        if count > MOST_LAYERS:
            self.fail("num_hidden_layers", f"1 to {MOST_LAYERS}")
        return count

    def size(self, name: str, default: int | None, *, least: int = 1) -> int | None:
        """An integer, or None where the configuration says ``None``; 0, where it is allowed, is None too."""
        value = self._raw(name)
        if value is _UNSAID:
            return default
        return None if value is None else self._integer(name, value, least, " or none") or None

    def flag(self, name: str, default: bool) -> bool:
        """True or false; ``None`` is false."""
        value = self._raw(name)
        if value is _UNSAID:
            return default
        if value is not None and not isinstance(value, bool):
            self.fail(name, "true or false")
        return bool(value)

    def names_of(self, name: str, allowed: Sequence[str]) -> list[str] | None:
        """A list of words, each one of ``allowed``; None if the configuration does not have it."""
        values = self._list(name)
        for number, value in enumerate(values or ()):
            if not isinstance(value, str) or value not in allowed:
                raise SpecError(got=value, where=f"{self.path(name)}[{number}]", allowed=", ".join(allowed))
        return values

    def integers(self, name: str) -> list[int] | None:
        """A list of integers, 0 or more; None if the configuration does not have it."""
        values = self._list(name)
        return values and [self._integer(f"{name}[{number}]", value, 0, "") for number, value in enumerate(values)]

    def flags(self, name: str, count: int) -> list[bool] | None:
        """``count`` or more numbers 0 or 1, of which the first ``count``; None if there are none."""
        values = self.integers(name)
        if not values:
            return None
        if len(values) < count:
            raise SpecError(got=f"{len(values)} layers", where=self.path(name), allowed=f"{count} or more")
        return [bool(value) for value in values[:count]]

    def refuse(self, name: str, allowed: str) -> None:
        """Raise if the configuration says anything here but ``None``, 0 or false."""
        if self.get(name):
            self.fail(name, allowed, hint="Compose a CacheSpec if the model does use it.")

    def fail(self, name: str, allowed: str, hint: str = "") -> NoReturn:
        """Raise for the value of a field."""
        raise SpecError(got=self.get(name), where=self.path(name), allowed=allowed, hint=hint)

    def path(self, name: str) -> str:
        """The field as errors name it."""
        return f"{self.where}.{self._names.get(name, name)}"

    def _raw(self, name: str) -> Any:
        for known in (self._names.get(name), name):
            if known is None:
                continue
            if known in self._instead:
                return self._instead[known]
            config = self._config
            is_mapping = isinstance(config, Mapping)
            try:
                value = (
                    cast("Mapping[str, Any]", config).get(known, _UNSAID)
                    if is_mapping
                    else getattr(config, known, _UNSAID)
                )
            except Exception as error:
                # An attribute of outside code may raise anything; one that differs by layer does.
                raise SpecError(
                    got=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}",
                    where=f"{self.where}.{known}",
                    allowed="a value that can be read",
                    hint="Compose a CacheSpec if it differs from layer to layer.",
                ) from error
            if value is not _UNSAID:
                return value
        return _UNSAID

    def _list(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
            self.fail(name, "a list")
        return list(cast("Sequence[Any]", value))

    def _integer(self, name: str, value: Any, least: int, otherwise: str) -> int:
        try:
            found = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            found = None
        if found is None or found < least:
            got = repr(value) if isinstance(value, str) else value  # "8" is not 8
            raise SpecError(got=got, where=self.path(name), allowed=f"an integer, {least} or more{otherwise}")
        return found
