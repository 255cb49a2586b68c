"""Checks of the conformance kit by their ids, on a device."""

from collections.abc import Callable, Iterator

from kvcore import parity
from kvcore.conformance.specs import conformance_spec
from kvcore.parity.show import failure_text
from kvcore.plugins import registry
from kvcore.spec import CacheSpec
from tests.device.check_attention import Problem

RINGS = "restore_ring/*/packed/ragged", "restore_ring/*/by_head/padded"
"""Rows of rings one by one, with copies and without."""

SMALL = (
    "restore_ring/v4_584/packed/ragged",
    "restore_ring/*.ring/by_head/padded",
    *(f"{verb}/*/packed/ragged" for verb in ("write_state", "select_state", "gather_conv")),
)
"""Verbs that no other check of the small run calls: rings one by one, and recurrent layers'."""


def kit(*patterns: str, device: str = "cpu", spec: Callable[[], CacheSpec] = conformance_spec) -> Iterator[Problem]:
    """What the checks whose ids match say."""
    for pattern in patterns:
        report = parity.run(spec(), [registry().backends["torch_triton"]], device=device, only=pattern)
        yield from (
            (record.check, "" if record.status == "agree" else failure_text(record)) for record in report.checks
        )
