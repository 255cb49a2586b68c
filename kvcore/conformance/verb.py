"""How one verb is checked: what it needs, how it is driven, what is looked at afterwards."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvcore.conformance.outputs import Output

if TYPE_CHECKING:
    from kvcore.conformance.case import Bench

Rule = Literal["storage", "arithmetic", "selection"]

ANY_LAYOUT = "any"
"""In a check's id and among a row's layouts: one that stands for all, since the verb touches no pool."""


class Verb(NamedTuple):
    """One row of the table of checks.

    Attributes:
        name: of the verb in ``kvcore.ops.Ops``; first part of a check's id.
        drive: calls the verb on a bench and returns everything that a mistake could show in.
        rule: ``storage``: exact. ``arithmetic``: within the tolerance table. ``selection``: what is chosen may differ
            where the scores agree.
        role: the role under test; shape classes are relative to its rows.
        roles: roles that a layer keeps when it is cut down for the check.
        needs: roles without which a layer is left out.
        named: roles that the check's id names; the role under test unless given.
        writes: the verb writes to the layer's pools, so a layer that shares another's is left out.
        layouts: check in every layout; False where the verb touches no pool; or the names of some.
        lacks: roles that a layer must not have.
        shapes: names of the shape classes; all of ``SHAPES`` if empty.
        extra: names of shape classes besides those, out of ``EXTRA_SHAPES``.
        also: verbs that the same drive covers.
        variant: ends the second part of the check's id, where another row drives the verb otherwise.
    """

    name: str
    drive: Callable[["Bench"], list[Output]]
    rule: Rule
    role: str
    roles: tuple[str, ...]
    needs: tuple[str, ...]
    named: tuple[str, ...] = ()
    writes: bool = False
    layouts: bool | tuple[str, ...] = True
    lacks: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    variant: str = ""
    extra: tuple[str, ...] = ()
