"""A spec by name: a preset, or a JSON file. What the command line and the conformance kit take."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvcore.errors import SpecError
from kvcore.foreign import UNREADABLE
from kvcore.spec import presets
from kvcore.spec.codec import from_json
from kvcore.spec.hf_config import from_hf_config
from kvcore.spec.model import CacheSpec


def load_spec(text: str, where: str, **others: CacheSpec) -> CacheSpec:
    """The preset of that name, one of ``others``, or what that file holds: a spec, or a model's ``config.json``.

    Raises:
        SpecError: neither a known name nor a readable spec file nor a configuration that a spec can be made of.
    """
    if text in others:
        return others[text]
    if text in presets.PRESETS:
        return presets.PRESETS[text]()
    try:
        content = Path(text).read_bytes()
    except OSError as error:
        raise SpecError(
            got=f"{text!r} ({error.strerror})",
            where=where,
            allowed=f"a JSON file, a spec's or a model's, or one of {', '.join([*others, *presets.PRESETS])}",
        ) from error
    configuration = _configuration(content)
    return from_json(content) if configuration is None else from_hf_config(configuration)


def _configuration(content: bytes) -> Mapping[str, Any] | None:
    """The content of a model's ``config.json``; None for anything else, which a spec's reader judges."""
    try:
        found = msgspec.json.decode(content, type=dict[str, Any])
    except UNREADABLE:
        return None
    return found if "model_type" in found and "schema_version" not in found else None
