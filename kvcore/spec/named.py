"""A spec by name: a preset, or a JSON file. What the command line and the conformance kit take."""

from pathlib import Path

from kvcore.errors import SpecError
from kvcore.spec import presets
from kvcore.spec.codec import from_json
from kvcore.spec.model import CacheSpec


def load_spec(text: str, where: str, **others: CacheSpec) -> CacheSpec:
    """The preset of that name, one of ``others``, or the spec in that file.

    Raises:
        SpecError: neither a known name nor a readable spec file.
    """
    if text in others:
        return others[text]
    if text in presets.PRESETS:
        return presets.PRESETS[text]()
    try:
        return from_json(Path(text).read_bytes())
    except OSError as error:
        raise SpecError(
            got=f"{text!r} ({error.strerror})",
            where=where,
            allowed=f"a JSON file, or one of {', '.join([*others, *presets.PRESETS])}",
        ) from error
