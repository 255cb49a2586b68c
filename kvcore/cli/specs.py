"""A spec named on the command line: a preset, or a JSON file."""

from pathlib import Path

from kvcore.errors import SpecError
from kvcore.spec import CacheSpec, from_json, presets


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
