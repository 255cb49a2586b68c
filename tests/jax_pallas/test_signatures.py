"""Shapes in the signatures of the verbs: written for every one, true of what they take and give, wrong ones refused."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

import kvcore.ops
from kvcore.backends.jax_pallas import JaxBackend, JaxOps
from kvcore.backends.reference import ReferenceBackend
from kvcore.conformance.agreement import compare
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import checks_of
from kvcore.ops import Ops
from kvcore.plan import CachePlan
from kvcore.spec import Format, Rope

NAMES = {
    **vars(jaxtyping),
    **vars(kvcore.ops),
    "Array": jax.Array,
    "CachePlan": CachePlan,
    "Format": Format,
    "Rope": Rope,
}
VERBS = [name for name in vars(JaxOps) if inspect.isfunction(vars(Ops).get(name)) and not name.startswith("_")]
CHECKED = (
    *("append_window/v4_584", "append_rotated_window/v4_584", "gather_window/v4_584", "append_tail/tail.m2.overlap"),
    *("compress/v4_584.m2+tail.m2.overlap", "flush/bf16.m2+index_fp4_68_h.m2", "store_entries/v4_584.m2"),
    *("gather_entries/v4_584.m2", "gather_all_entries/v4_584.m2", "index_scores/index_fp8_132.m4"),
    *("select/index_fp8_132.m4", "attend/v4_584+v4_584.m2.rope", "append_kv/int8_row.full.paged"),
    *("gather_kv/int8_row.full.paged", "attend_kv/int8_row.full.paged", "mask/int8_row.full.paged"),
    *("gather_rows/int8_row.full.paged", "digest_rows/v4_584", "restore_ring/v4_584"),
)


def resolved(verb: Any) -> dict[str, Any]:
    """A verb's annotations as objects."""
    return {name: eval(text, {**vars(inspect.getmodule(verb)), **NAMES}) for name, text in verb.__annotations__.items()}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every verb with its annotations checked on each call; gives the names of those that were called."""
    called: set[str] = set()
    for name in VERBS:
        monkeypatch.setattr(JaxOps, name, with_checks(vars(JaxOps)[name], called))
    return called


def with_checks(plain: Any, called: set[str]) -> Any:
    """The verb, checked by beartype with jaxtyping's bindings of names to sizes."""
    copy = type(plain)(plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    copy.__annotations__ = resolved(plain)
    strict = jaxtyped(typechecker=beartype)(copy)

    @functools.wraps(plain)
    def verb(*args: Any, **options: Any) -> Any:
        called.add(plain.__name__)
        return strict(*args, **options)

    return verb


@pytest.mark.parametrize("name", VERBS)
def test_every_argument_and_result_is_annotated(name: str) -> None:
    verb = vars(JaxOps)[name]
    given = [one for one in inspect.signature(verb).parameters if one != "self"]
    assert set(resolved(verb)) == {*given, "return"}
    assert given == [one for one in inspect.signature(getattr(Ops, name)).parameters if one != "self"]


def test_what_verbs_take_and_give_is_as_annotated(checked: set[str]) -> None:
    known = {one.id: one for one in checks_of(conformance_spec())}
    layouts = {name: "any" if name.split("/")[0] in ("select", "mask", "digest_rows") else "planar" for name in CHECKED}
    ids = [f"{name}/{layout}/ragged" for name, layout in layouts.items()]
    chosen = [known[one] for one in [*ids, "encode/v4_584/any/bf16_rows", "decode/v4_584/any/rows"]]
    for check in chosen:
        drive = check.prepare()
        wanted = drive(ReferenceBackend().create(check.plan))
        assert not compare(wanted, drive(JaxBackend().create(check.plan))).mismatches, check.id
    assert checked >= {name.split("/")[0] for name in (*CHECKED, "encode", "decode", "asarray", "index")}


@pytest.mark.usefixtures("checked")
def test_a_wrong_shape_or_dtype_is_refused_by_the_annotation() -> None:
    (check,) = [one for one in checks_of(conformance_spec()) if one.id == "attend_kv/bf16.full.paged/planar/ragged"]
    ops = JaxBackend().create(check.plan)
    with pytest.raises(jaxtyping.TypeCheckError):
        ops.select(jnp.zeros(3, jnp.float32), 2)
    with pytest.raises(jaxtyping.TypeCheckError):
        ops.join(jnp.zeros((3, 4)), jnp.zeros((3, 5)))
    with pytest.raises(jaxtyping.TypeCheckError):
        ops.reset_slots(ops.allocate(), jnp.zeros(2, jnp.float32))
    assert np.asarray(ops.join(jnp.zeros((3, 4)), jnp.zeros((3, 4)))).shape == (3, 8)
