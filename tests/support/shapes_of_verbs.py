"""The shapes in the contract's signatures, checked on what a backend's verbs take and give."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import jaxtyping
from beartype.door import die_if_unbearable
from jaxtyping import jaxtyped

import kvcore.ops
from kvcore.conformance.agreement import compare
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import checks_of
from kvcore.ops import Ops
from kvcore.ops.fused import FUSED, REQUIRED
from kvcore.plan import CachePlan
from kvcore.pools import Pools
from kvcore.spec import Format, Rope

VERBS = [*REQUIRED, *FUSED]
CHECKED = (
    *("append_window/v4_584", "append_rotated_window/v4_584", "gather_window/v4_584", "append_tail/tail.m2.overlap"),
    *("compress/v4_584.m2+tail.m2.overlap", "flush/bf16.m2+index_fp4_68_h.m2", "store_entries/v4_584.m2"),
    *("gather_entries/v4_584.m2", "gather_all_entries/v4_584.m2", "index_scores/index_fp8_132.m4"),
    *("select/index_fp8_132.m4", "attend/v4_584+v4_584.m2.rope", "append_kv/int8_row.full.paged"),
    *("gather_kv/int8_row.full.paged", "attend_kv/int8_row.full.paged", "mask/int8_row.full.paged"),
    *("gather_rows/int8_row.full.paged", "digest_rows/v4_584", "restore_ring/v4_584"),
)
"""Checks of the kit in which verbs are called."""


def annotations(array: type) -> dict[str, dict[str, Any]]:
    """Verb -> its annotations, with a framework's class for ``Array``."""
    names = {**vars(jaxtyping), **vars(kvcore.ops), "Array": array, "Pools": Pools, "Sequence": list}
    names |= {"CachePlan": CachePlan, "Format": Format, "Rope": Rope, "Any": Any}
    return {
        name: {parameter: eval(text, names) for parameter, text in getattr(Ops, name).__annotations__.items()}
        for name in VERBS
    }


@contextmanager
def checked(ops: type, array: type) -> Iterator[set[str]]:
    """Every verb of a class of verbs with what it takes and gives checked; gives the names of those that are called."""
    called: set[str] = set()
    shapes = annotations(array)
    with patch.multiple(ops, **{name: with_checks(getattr(ops, name), name, shapes[name], called) for name in VERBS}):
        yield called


def with_checks(verb: Any, name: str, shapes: dict[str, Any], called: set[str]) -> Any:
    """The verb with its arguments and its result held against the contract: one name of a size is one number a call."""
    signature = inspect.signature(getattr(Ops, name))

    @functools.wraps(verb)
    def run(*given: Any, **options: Any) -> Any:
        called.add(name)
        arguments = signature.bind(*given, **options).arguments
        with jaxtyped("context"):
            for parameter, value in arguments.items():
                if parameter in shapes:
                    die_if_unbearable(value, shapes[parameter])
            found = verb(*given, **options)
            die_if_unbearable(found, shapes["return"])
        return found

    return run


def kits_checks() -> list[Any]:
    """The checks of ``CHECKED`` in a layout, on requests of different lengths, and two of encoders."""
    known = {one.id: one for one in checks_of(conformance_spec())}
    layouts = {name: "any" if name.split("/")[0] in ("select", "mask", "digest_rows") else "planar" for name in CHECKED}
    ids = [f"{name}/{layout}/ragged" for name, layout in layouts.items()]
    return [known[one] for one in [*ids, "encode/v4_584/any/bf16_rows", "decode/v4_584/any/rows"]]


def run_checks(reference: Any, backend: Any) -> None:
    """Run them on a backend; results are those of the reference."""
    for check in kits_checks():
        drive = check.prepare()
        wanted = drive(reference.create(check.plan))
        assert not compare(wanted, drive(backend.create(check.plan))).mismatches, check.id
