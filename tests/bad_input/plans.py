"""Misuse of plans and of the creation of caches: nothing exists yet that could change."""

import msgspec

import kvcore
from kvcore.errors import BackendError, OutOfBlocks, SpecError
from kvcore.plan import logical_bytes, plan_cache
from kvcore.spec import CacheSpec, to_json
from tests.bad_input.world import SPEC, Case
from tests.support import scene


def plan(**sizes: object) -> object:
    """A plan of the misused spec."""
    return plan_cache(SPEC, **{"max_requests": 2, "max_tokens": 64, **sizes})


PLANS = {
    "no requests": (SpecError, lambda: plan(max_requests=0)),
    "a boolean of requests": (SpecError, lambda: plan(max_requests=True)),
    "a fraction of requests": (SpecError, lambda: plan(max_requests=1.5)),
    "requests as text": (SpecError, lambda: plan(max_requests="2")),
    "no tokens": (SpecError, lambda: plan(max_tokens=0)),
    "tokens as a float": (SpecError, lambda: plan(max_tokens=64.0)),
    "neither tokens nor a budget": (SpecError, lambda: plan(max_tokens=None)),
    "tokens and a budget": (SpecError, lambda: plan(budget_bytes=10**6)),
    "a budget as text": (SpecError, lambda: plan(max_tokens=None, budget_bytes="1 GiB")),
    "a budget of nothing": (SpecError, lambda: plan(max_tokens=None, budget_bytes=0)),
    "a budget too small for one block": (OutOfBlocks, lambda: plan(max_tokens=None, budget_bytes=1000)),
    "requests of no tokens": (SpecError, lambda: plan(max_request_tokens=0)),
    "requests of a boolean of tokens": (SpecError, lambda: plan(max_request_tokens=True)),
    "requests of half a token": (SpecError, lambda: plan(max_request_tokens=0.5)),
    "only the tokens of a request where layers are paged": (
        SpecError,
        lambda: plan(max_tokens=None, max_request_tokens=8),
    ),
    "negative drafts": (SpecError, lambda: plan(max_draft_tokens=-1)),
    "drafts as a float": (SpecError, lambda: plan(max_draft_tokens=1.0)),
    "more drafts than a ring's rows allow": (
        SpecError,
        lambda: plan_cache(CacheSpec(layers=[scene.ring(4, rows=6)]), max_requests=1, max_draft_tokens=3),
    ),
    "an unknown layout": (SpecError, lambda: plan(layout="columns")),
    "a preset's name instead of a spec": (SpecError, lambda: plan_cache("deepseek_v4_flash", max_requests=1)),
    "the bytes of minus one token": (SpecError, lambda: logical_bytes(SPEC, -1)),
    "the bytes of half a token": (SpecError, lambda: logical_bytes(SPEC, 0.5)),
}


def create(**options: object) -> object:
    """A cache of the misused spec."""
    return kvcore.create_cache(SPEC, **{"backend": "reference", "max_requests": 2, "max_tokens": 64, **options})


CREATIONS = {
    "an unknown backend": (BackendError, lambda: create(backend="abacus")),
    "a backend that is a number": (BackendError, lambda: create(backend=3)),
    "no backend": (BackendError, lambda: create(backend=None)),
    "a device that the reference does not have": (BackendError, lambda: create(device="cuda")),
    "a device that torch does not have": (BackendError, lambda: create(backend="torch_triton", device="abacus")),
    "a device that is a number": (BackendError, lambda: create(backend="torch_triton", device=3)),
    "a device of no automatic backend": (BackendError, lambda: create(backend="auto", device="abacus")),
    "an unknown layout": (SpecError, lambda: create(layout="columns")),
    "no requests": (SpecError, lambda: create(max_requests=0)),
    "neither tokens nor a budget": (SpecError, lambda: create(max_tokens=None)),
    "a dictionary instead of a spec": (
        SpecError,
        lambda: kvcore.create_cache(msgspec.json.decode(to_json(SPEC)), backend="reference", max_requests=1),
    ),
}

CASES = [
    *[Case(f"plan: {name}", error, call) for name, (error, call) in PLANS.items()],
    *[Case(f"create_cache: {name}", error, call) for name, (error, call) in CREATIONS.items()],
]
