"""KeyboardInterrupt at any line on JAX, whose arrays are replaced rather than written: a verb happens or does not."""

from tests.reliability import interrupt
from tests.support.backends_under_test import seed_of
from tests.support.samples import examples

EVERY = examples(96, 48)


def test_lines_of_kvcore(tmp_path) -> None:
    # One test of all verbs, so that what JAX compiles for a world is compiled once; the figure has further points.
    broken, tried = [], 0
    first = seed_of("interruptions of JAX")
    for verb in interrupt.VERBS:
        check = interrupt.Check(verb, "jax_pallas", str(tmp_path))
        points = interrupt.points(verb, "jax_pallas", str(tmp_path))
        # Another remainder for every verb, so that lines that all of them come to are not all tried or all left out.
        for n, _ in points[(first + tried) % min(EVERY, len(points)) :: EVERY]:
            tried += 1
            broken += [(verb.name, n, error) for error in check.point(n) or ()]
    assert broken == []
    assert tried > 60
