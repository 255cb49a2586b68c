"""The checks of a spec: the table of verbs crossed with its roles, formats, layouts and the shape classes."""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvcore.conformance.case import Bench, Case
from kvcore.conformance.checks import FORMAT_CHECKS, FormatBench, verbs_of
from kvcore.conformance.outputs import Output
from kvcore.conformance.reduced import Reduced, plan_of, reduced_layers, sizes
from kvcore.conformance.shapes import EXTRA_SHAPES, SHAPES, Shape
from kvcore.conformance.verb import ANY_LAYOUT, Rule, Verb
from kvcore.ops import Ops
from kvcore.plan import CachePlan
from kvcore.plugins import VERBS, Needs
from kvcore.spec import LAYOUTS, TAIL_OF, CacheSpec, Field, Format
from kvcore.spec.layout import BY_HEAD


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check, ready to be driven on any backend's verbs.

    Attributes:
        id: ``verb/formats/layout/shape``, stable for a spec; seeds come from it.
        verb: name of the verb.
        rule: how results are compared.
        needs: what a backend must declare, else the check is ``unsupported``.
        plan: the small cache that the verbs must be bound to.
        prepare: makes the inputs once; what it returns drives one backend's verbs and gives the outputs.
    """

    id: str
    verb: str
    rule: Rule
    needs: Needs
    plan: CachePlan
    prepare: Callable[[], Callable[[Ops], list[Output]]]


def checks_of(spec: CacheSpec) -> tuple[Check, ...]:
    """Every check of a spec, formats first, then verb by verb."""
    return (*_format_checks(spec), *_verb_checks(spec))


def sample_of(checks: Iterable[Check]) -> list[Check]:
    """Two fifths of them: of every verb and formats each shape in one layout, the next shape in the next layout.

    Which layout comes first goes round as well, so that the sample of many formats has each shape in each layout.
    """
    grids: dict[tuple[str, str], dict[str, list[Check]]] = {}
    for check in checks:
        verb, formats, _, shape = check.id.split("/")
        grids.setdefault((verb, formats), {}).setdefault(shape, []).append(check)
    return [
        in_layouts[(first + number) % len(in_layouts)]
        for first, shapes in enumerate(grids.values())
        for number, in_layouts in enumerate(shapes.values())
    ]


def formats_of(spec: CacheSpec) -> list[Format]:
    """The distinct sized formats of a spec, in order of first use."""
    parts = [part.format for _, _, component in spec.components() for part in component.parts]
    return list(dict.fromkeys(parts))


def computed_formats_of(spec: CacheSpec) -> list[Format]:
    """Those that rows are stored in which a verb computed: entries and index keys."""
    parts = [part.format for _, role, component in spec.components() if role in TAIL_OF for part in component.parts]
    return list(dict.fromkeys(parts))


def _format_checks(spec: CacheSpec) -> Iterator[Check]:
    plan = _any_plan(spec)
    formats = formats_of(spec)
    for format, label in [*_labelled(formats), *((format, format.name) for format in _bare(formats))]:
        for row in FORMAT_CHECKS:
            id = f"{row.name}/{label}/{ANY_LAYOUT}/{row.case}"

            def prepare(id=id, format=format, drive=row.drive) -> Callable[[Ops], list[Output]]:
                return lambda ops: drive(FormatBench(id, format, ops))

            yield Check(
                id=id,
                verb=row.name,
                rule="storage",
                needs=Needs(formats=frozenset({format.name})),
                plan=plan,
                prepare=prepare,
            )


def _bare(formats: list[Format]) -> list[Format]:
    """Each code that stands under a scale in those formats, alone: as a format of outside code may have it."""
    fields = [field for format in formats for field in format.fields if field.is_value]
    scaled = dict.fromkeys(field.code for field in fields if field.group is not None)
    return [
        Format(name=f"bare_{code}", fields=(Field(name="codes", dims=None, code=code),), planes=(("codes",),)).for_dim(
            64
        )
        for code in scaled
        if not any(field.code == code and field.group is None for field in fields)
    ]


def _labelled(formats: list[Format]) -> Iterator[tuple[Format, str]]:
    """Formats without a size of their own are told apart by the one they were given."""
    for format in formats:
        same = sum(other.name == format.name for other in formats)
        yield format, format.name if same == 1 else f"{format.name}.d{format.dim}"


def _any_plan(spec: CacheSpec) -> CachePlan:
    """A plan to bind verbs to that touch no pool."""
    _, role, _ = next(spec.components())
    reduced = next(iter(reduced_layers(spec, next(verb for verb in verbs_of(spec) if verb.role == role))))
    return plan_of(reduced.spec, sizes(reduced, role).full, LAYOUTS[0])


def _verb_checks(spec: CacheSpec) -> Iterator[Check]:
    seen: set[str] = set()
    for verb in verbs_of(spec):
        for reduced in reduced_layers(spec, verb):
            for layout in _layouts(reduced, verb):
                for shape in _shapes(verb, layout):
                    check = _check(verb, reduced, layout, shape)
                    # A layer with both of two alternative roles would be checked twice.
                    if check.id not in seen:
                        seen.add(check.id)
                        yield check


def _shapes(verb: Verb, layout: str) -> list[Shape]:
    """The verb's shape classes in a layout."""
    usual = [shape for shape in SHAPES if shape.name in (verb.shapes or [one.name for one in SHAPES])]
    extra = [shape for shape in EXTRA_SHAPES if shape.name in verb.extra]
    return [*usual, *(shape for shape in extra if layout in (shape.layouts or (layout,)))]


def _layouts(reduced: Reduced, verb: Verb) -> tuple[str, ...]:
    """Layouts that differ for the layer: ``by_head`` is ``packed`` where rows have one head."""
    if not verb.layouts:
        return (ANY_LAYOUT,)
    if isinstance(verb.layouts, tuple):
        return verb.layouts
    heads = [part.heads for _, component in reduced.layer.components() for part in component.parts]
    return LAYOUTS if max(heads) > 1 else tuple(layout for layout in LAYOUTS if layout != BY_HEAD)


def _check(verb: Verb, reduced: Reduced, layout: str, shape: Shape) -> Check:
    relative = sizes(reduced, verb.role)
    shapes = SHAPES if shape in SHAPES else (shape,)
    plan = plan_of(reduced.spec, relative.full, LAYOUTS[0] if layout == ANY_LAYOUT else layout, shapes)
    label = f"{reduced.label}.{verb.variant}" if verb.variant else reduced.label
    id = f"{verb.name}/{label}/{layout}/{shape.name}"

    def prepare() -> Callable[[Ops], list[Output]]:
        case = Case(id, plan, verb.role, shape, relative)
        return lambda ops: verb.drive(Bench(case, ops))

    needs = Needs.of(reduced.spec, layout, {verb.name.removesuffix("_kv")} & set(VERBS))
    return Check(id=id, verb=verb.name, rule=verb.rule, needs=needs, plan=plan, prepare=prepare)
