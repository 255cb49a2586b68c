"""A component that kvcore does not know lives the same life on JAX as on the reference, position by position."""

from kvcore.parity.run import run
from kvcore.plugins import registry
from tests.support import outside_components as outside


def test_the_same_life():
    assert outside.live_a_life("jax_pallas", "tpu_tile") == outside.live_a_life("reference", "packed")


def test_an_export_goes_on_here():
    source, target = outside.create("reference"), outside.create("jax_pallas")
    request = source.admit()
    outside.take(source, {request: (1, 6)})
    moved = target.import_request(source.export_request(request))
    assert target.digest([moved]) == source.digest([request])
    for cache, one in ((source, request), (target, moved)):
        outside.take(cache, {one: (1, 3)})
    assert target.digest() == source.digest()


def test_the_kit_checks_it():
    report = run(outside.spec(), [registry().backends["jax_pallas"]], only="*/last.fp32/planar/ragged")
    assert {record.check.partition("/")[0] for record in report.checks} >= {"gather_rows", "restore_ring", "store_rows"}
    assert {record.status for record in report.checks} == {"agree"}, [r for r in report.checks if r.status != "agree"]
