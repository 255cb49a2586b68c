"""The table of checks: every verb of ``kvcore.ops.Ops``, and how it is driven.

One table for all who check a backend. To add a verb is to add a row here; a test compares the table with the Protocol.
"""

from kvcore.conformance.checks import attention, compression, indexer, kv, life, paged, recurrent, rings, strips
from kvcore.conformance.checks.formats import FORMAT_CHECKS, FormatBench, FormatCheck
from kvcore.conformance.checks.held import Drive, held
from kvcore.conformance.verb import ANY_LAYOUT, Rule, Verb
from kvcore.spec import ROLES, TAIL_OF, CacheSpec

_INDEXED = ("entries", "index_keys")
_COMPRESSED = (*TAIL_OF, *TAIL_OF.values())


_WHOLE = ("window", "kv", "entries")


def _with_entries(role: str) -> tuple[str, ...]:
    """Index keys stand only beside entries."""
    return _INDEXED if role == "index_keys" else (role,)


def _role(name, drive, role, *, roles=None, **options):
    """A storage check of one role."""
    return Verb(name, drive, "storage", role, roles or (role,), (role,), **options)


def _edges(name: str, drive: Drive, role: str, **options) -> Verb:
    """A writer that encodes, given what encoders get wrong."""
    options |= {"layouts": ("packed",), "shapes": ("ragged",), "variant": "edges", "writes": True}
    return _role(name, drive, role, **options)


def _held(name: str, drive: Drive, role: str, *, roles: tuple[str, ...] | None = None, rule: Rule = "storage") -> Verb:
    """A reader that is called on other pools while what it returned is held."""
    drive = held(drive, name)
    options = {"layouts": ("packed",), "shapes": ("ragged",), "variant": "held"}
    return Verb(name, drive, rule, role, roles or (role,), (role,), **options)


VERBS: tuple[Verb, ...] = (
    _role("append_window", rings.append_window, "window", writes=True),
    Verb(
        "append_rotated_window",
        compression.append_rotated_window,
        "arithmetic",
        role="window",
        roles=("window",),
        needs=("window",),
        writes=True,
        also=("rotated_rows",),
    ),
    _edges("append_window", rings.append_edges, "window"),
    _role("gather_window", rings.gather_window, "window"),
    _held("gather_window", rings.gather_window, "window"),
    _role("append_tail", rings.append_tail, "tail", writes=True),
    _role("join", rings.join, "tail", layouts=False),
    _role("append_index_tail", rings.append_index_tail, "index_tail", writes=True),
    Verb(
        "compress",
        compression.compress("entries"),
        "arithmetic",
        role="tail",
        roles=("tail", "entries"),
        needs=("tail", "entries"),
        named=("entries", "tail"),
    ),
    Verb(
        "compress",
        compression.compress("index_keys"),
        "arithmetic",
        role="index_tail",
        roles=_COMPRESSED,
        needs=("index_tail", "index_keys"),
        named=("index_keys", "index_tail"),
    ),
    Verb(
        "flush",
        compression.flush,
        "arithmetic",
        role="tail",
        roles=_COMPRESSED,
        needs=("tail", "entries"),
        named=_INDEXED,
        writes=True,
        extra=("taken_over",),
    ),
    Verb(
        "append_flush",
        compression.append_flush,
        "arithmetic",
        role="tail",
        roles=_COMPRESSED,
        needs=("tail", "entries"),
        named=_INDEXED,
        writes=True,
        extra=("taken_over",),
    ),
    _role(
        "store_entries",
        paged.store_entries,
        "entries",
        roles=_INDEXED,
        named=_INDEXED,
        writes=True,
        extra=("taken_over",),
    ),
    _edges("store_entries", paged.store_edges, "entries", roles=_INDEXED, named=_INDEXED),
    _role("closed", paged.closed, "entries", layouts=False),
    _role("gather_entries", paged.gather_entries, "entries"),
    _held("gather_entries", paged.gather_entries, "entries"),
    _role("gather_all_entries", paged.gather_all("entries"), "entries"),
    _held("gather_all_entries", paged.gather_all("entries"), "entries"),
    _role("gather_all_entries", paged.gather_all("index_keys"), "index_keys", roles=_INDEXED),
    Verb("index_scores", indexer.index_scores, "arithmetic", "index_keys", _INDEXED, ("index_keys",)),
    _held("index_scores", indexer.index_scores, "index_keys", roles=_INDEXED, rule="arithmetic"),
    Verb(
        "select",
        indexer.select,
        "selection",
        "index_keys",
        _INDEXED,
        ("index_keys",),
        layouts=(ANY_LAYOUT, "tpu_tile"),  # A TPU's kernels work on whole tiles: there the choice is a kernel, too.
    ),
    Verb("index_select", indexer.index_select, "selection", "index_keys", _INDEXED, ("index_keys",)),
    *(
        Verb(
            "attend",
            attention.attend(role, back=bool(variant)),
            "arithmetic",
            role=role,
            roles=("window", "entries"),
            needs=(role,),
            named=("window", "entries"),
            lacks=lacks,
            shapes=shapes,
            variant=variant,
        )
        for variant, shapes in (("", ()), ("rope", ("ragged", "padded")))
        for role, lacks in (("window", ()), ("entries", ("window",)))
    ),
    *(
        Verb(
            "attend",
            held(attention.attend(role), "attend"),
            "arithmetic",
            role=role,
            roles=("window", "entries"),
            needs=(role,),
            named=("window", "entries"),
            layouts=("packed",),
            lacks=lacks,
            shapes=("ragged",),
            variant="held",
        )
        for role, lacks in (("window", ()), ("entries", ("window",)))
    ),
    Verb(
        "attend",
        attention.attend_unseen,
        "arithmetic",
        role="window",
        roles=("window", "entries"),
        needs=("window",),
        named=("window", "entries"),
        layouts=("packed", "tpu_tile"),
        shapes=("ragged",),
        variant="unseen",
    ),
    _role("append_kv", kv.append_kv, "kv", writes=True, extra=("taken_over",)),
    _edges("append_kv", kv.append_edges, "kv"),
    _role("gather_kv", kv.gather_kv, "kv"),
    _held("gather_kv", kv.gather_kv, "kv"),
    _role("borrow_kv", kv.kv_view, "kv", also=("kv_view", "append_kv_view"), extra=("apart",)),
    _role("mask", kv.mask, "kv", layouts=False, also=("visible_rows",)),
    _role("from_batch", kv.from_batch, "kv", layouts=False, also=("to_batch",)),
    Verb("attend_kv", kv.attend_kv, "arithmetic", "kv", ("kv",), ("kv",), extra=("pieces",)),
    _held("attend_kv", kv.attend_kv, "kv", rule="arithmetic"),
    Verb(
        "attend_kv",
        kv.attend_kv_unseen,
        "arithmetic",
        "kv",
        ("kv",),
        ("kv",),
        layouts=("packed", "tpu_tile"),
        shapes=("ragged",),
        variant="unseen",
    ),
    _role("append_state", recurrent.append_state, "state", writes=True),
    _role("write_state", recurrent.write_state, "state", writes=True),
    _role("select_state", recurrent.select_state, "state", writes=True),
    _role("read_state", recurrent.read_state, "state"),
    _held("read_state", recurrent.read_state, "state"),
    _role("append_conv", recurrent.append_conv, "conv", writes=True),
    _role("gather_conv", recurrent.gather_conv, "conv"),
    _held("gather_conv", recurrent.gather_conv, "conv"),
    *(_role("gather_rows", life.gather_rows(role), role, roles=_with_entries(role)) for role in ROLES),
    *(_held("gather_rows", life.gather_rows(role), role, roles=_with_entries(role)) for role in ROLES),
    *(
        _role(
            "store_rows",
            life.store_rows(role),
            role,
            roles=_with_entries(role),
            writes=True,
            shapes=("ragged", "padded"),
        )
        for role in ROLES
    ),
    *(_role("digest_rows", life.digest_rows(role), role, roles=_with_entries(role), layouts=False) for role in ROLES),
    *(
        _role("restore_ring", rings.restore_ring(role), role, also=("read_ring",))
        for role in ROLES
        if role not in TAIL_OF
    ),
    # Whole layers: each is met by the first of these roles that it has.
    *(
        Verb(verb.__name__, verb, "storage", role, ROLES, (role,), ROLES, shapes=("padded",))
        for verb in (life.allocate, life.reset_slots, life.poison, life.copy_slots, life.copy_blocks)
        for role in _WHOLE
    ),
    *(
        Verb(
            verb.__name__,
            verb,
            "storage",
            role,
            ROLES,
            (role,),
            ROLES,
            layouts=layouts,
            shapes=("no_tokens", "ragged", "longer"),
        )
        for verb, layouts in ((strips.move_strips, True), (strips.digest_strips, False))
        for role in _WHOLE
    ),
    # So are layers without any of those, by what they carry on.
    *(
        Verb(verb.__name__, verb, "storage", role, ROLES, (role,), ROLES, lacks=lacks, shapes=("padded",))
        for verb in (life.allocate, life.reset_slots, life.poison, life.copy_slots, strips.move_strips)
        for role, lacks in (("state", _WHOLE), ("conv", (*_WHOLE, "state")))
    ),
    *(_role("index", life.index, role, layouts=False) for role in ("window", "kv")),
    *(_role("padded_index", life.padded_index, role, layouts=False, shapes=("padded",)) for role in ("window", "kv")),
    *(
        _role(
            "padded_index",
            life.padded_steps(role),
            role,
            writes=True,
            layouts=("packed",),
            shapes=("padded",),
            variant="steps",
        )
        for role in _WHOLE
    ),
    *(_role("asarray", life.asarray, role, layouts=False, shapes=("ragged",)) for role in _WHOLE),
)
"""Checks of verbs on layers, in the order in which a report shows them."""


def verbs_of(spec: CacheSpec) -> tuple[Verb, ...]:
    """The table for a spec: further roles, which layers of outside code have, are checked by what all roles share."""
    roles = dict.fromkeys(role for layer in spec.all_layers for role in layer.roles if role not in ROLES)
    return (*VERBS, *(verb for role in roles for verb in _shared_by_all(role)))


def _shared_by_all(role: str) -> tuple[Verb, ...]:
    """What holds for every component, whatever it is: its rows are stored, moved, put back, reset and digested."""
    whole = (life.allocate, life.reset_slots, life.poison, life.copy_slots, life.copy_blocks)
    return (
        _role("store_rows", rings.store_own_rows(role), role, writes=True, variant="step"),
        _role("gather_rows", life.gather_rows(role), role),
        _role("store_rows", life.store_rows(role), role, writes=True, shapes=("ragged", "padded")),
        _role("digest_rows", life.digest_rows(role), role, layouts=False),
        _role("restore_ring", rings.restore_ring(role), role, also=("read_ring",)),
        *(_role(verb.__name__, verb, role, shapes=("padded",)) for verb in whole),
    )


__all__ = ["FORMAT_CHECKS", "VERBS", "FormatBench", "FormatCheck", "Verb", "verbs_of"]
