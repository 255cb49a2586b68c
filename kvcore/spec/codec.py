"""Specs as JSON, both ways, with errors that name the path."""

import re
from importlib import resources
from typing import Any

import msgspec

from kvcore.errors import SpecError
from kvcore.foreign import MOST, UNREADABLE
from kvcore.spec.model import CacheSpec

SCHEMA_VERSION = 1

LARGEST_JSON = 1 << 24
"""Bytes of a spec as JSON; the largest model's takes a thousandth."""


def to_json(spec: CacheSpec, *, indent: int | None = None) -> str:
    """The spec as JSON text with its schema version; ``from_json`` gives the same spec back.

    Example:
        >>> from kvcore.spec import from_json, presets, to_json
        >>> spec = presets.deepseek_v4_flash_tiny()
        >>> from_json(to_json(spec)) == spec
        True
    """
    document = {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(spec)}
    text = msgspec.json.encode(document)
    return (msgspec.json.format(text, indent=indent) if indent else text).decode()


def from_json(text: str | bytes) -> CacheSpec:
    """Read a spec. Unknown keys, wrong types and broken rules are SpecErrors that name the path."""
    try:
        size = len(text)
        # As text, until it is known what it should be: objects of anything take many times its bytes.
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw]) if size <= LARGEST_JSON else None
    except UNREADABLE as error:
        raise SpecError(got=str(error), where="spec JSON", allowed="one JSON object") from error
    if parts is None:
        raise SpecError(got=f"{size} bytes", where="spec JSON", allowed=f"{LARGEST_JSON} bytes or fewer")
    version = bytes(parts.pop("schema_version", msgspec.Raw(b"nothing")))
    if version != b"%d" % SCHEMA_VERSION:
        raise SpecError(
            got=version[:MOST].decode(errors="replace"),
            where="schema_version",
            allowed=f"{SCHEMA_VERSION}",
            hint="Update kvcore to read newer specs.",
        )
    try:
        return msgspec.json.decode(msgspec.json.encode(parts), type=CacheSpec)
    except msgspec.ValidationError as error:
        raise _with_path(error) from error
    except UNREADABLE as error:
        raise SpecError(got=str(error), where="spec JSON", allowed="the fields of the JSON Schema") from error


def json_schema() -> dict[str, Any]:
    """The JSON Schema of spec documents, as published in the package (``spec/schema.json``)."""
    return msgspec.json.decode(resources.files("kvcore.spec").joinpath("schema.json").read_bytes())


def build_json_schema() -> dict[str, Any]:
    """The JSON Schema worked out from the classes; the published file must equal it."""
    schema = msgspec.json.schema(CacheSpec)
    spec = schema["$defs"]["CacheSpec"]
    spec["properties"] = {"schema_version": {"const": SCHEMA_VERSION}, **spec["properties"]}
    spec["required"] = ["schema_version", *spec["required"]]
    for definition in schema["$defs"].values():
        # The summary only: how Python indents the rest of a docstring depends on its version.
        definition["description"] = definition["description"].partition("\n\n")[0]
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "kvcore cache spec", **schema}
    return msgspec.json.decode(msgspec.json.encode(schema))


def _with_path(error: msgspec.ValidationError) -> SpecError:
    text, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    cause = error.__cause__
    if isinstance(cause, SpecError):
        where = f"{path}.{cause.where}" if path else cause.where
        return SpecError(got=cause.got, where=where, allowed=cause.allowed, hint=cause.hint)
    field = re.search(r"field `(.+?)`", text)
    if field:
        path = f"{path}.{field[1]}" if path else field[1]
    kind = re.match(r"Expected `(.+?)`, got `(.+?)`", text)
    if kind:
        return SpecError(got=kind[2], where=path or "spec JSON", allowed=kind[1])
    missing = "missing" in text
    got, allowed = ("nothing", "a value: the field is required") if missing else (text, "the fields of the JSON Schema")
    return SpecError(got=got, where=path or "spec JSON", allowed=allowed)
