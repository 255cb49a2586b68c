"""A spec, a backend and a plan for it become a cache."""

from kvcore.cache.cache import Cache
from kvcore.cache.canary import sample_of
from kvcore.ops.fused import created
from kvcore.plan import plan_cache
from kvcore.plugins import Needs, choose_backend
from kvcore.requests.prefix import Policy, check_policy
from kvcore.spec import CacheSpec


def create_cache(
    spec: CacheSpec,
    *,
    backend: str = "auto",
    device: str | None = None,
    max_requests: int,
    max_tokens: int | None = None,
    budget_bytes: int | None = None,
    max_draft_tokens: int = 0,
    prefix: Policy = "off",
    layout: str = "auto",
    check: bool = False,
    max_request_tokens: int | None = None,
    canary: bool | int = False,
) -> Cache:
    """Plan, allocate and return a cache.

    Args:
        spec: what each layer holds; see ``kvcore.spec``.
        backend: a backend's name, or ``auto``: the best one that runs here (never the reference).
        device: where the pools live, in the backend's words; None for its default.
        max_requests: requests that can be live at once.
        max_tokens: tokens that the paged pools hold over all requests.
        budget_bytes: bytes for all pools, and for what decode steps keep beside them (``plan.undo_bytes``), instead of
            ``max_tokens``.
        max_draft_tokens: tokens that ``truncate`` can always undo.
        prefix: prefix reuse: ``off``; ``full`` (every block boundary); ``Periodic(n)`` (multiples of n at which a step
            ends, and semantic points); ``zero`` (blocks only, rings are replayed); ``approximate`` (blocks
            only, and the last window alone is replayed: DeepSeek-V4.1's bounded replay, never exact).
        layout: ``packed``, ``planar``, ``tpu_tile``, ``by_head``, or ``auto`` for the backend's own choice.
        check: refuse non-finite input and unfinished steps, and poison what is freed; slower.
        max_request_tokens: the most tokens that one request can hold, so that no ring, slot or block table is larger
            than such a request needs; a step that would exceed it is refused. None: no bound but the pools.
        canary: hold what steps read against what was written: True for one row in 16, or one in how many. A step that
            meets rows, slots, lengths or blocks that are not as they were raises ``FaultError``; see ``Cache.faults``.

    Raises:
        SpecError: the spec or the figures cannot be planned. BackendError: no backend fits; every candidate's reason.
        OutOfBlocks: the budget is too small.

    Example:
        >>> import kvcore
        >>> spec = kvcore.spec.presets.classic(layers=2, key_heads=1, key_dim=4)
        >>> cache = kvcore.create_cache(spec, backend="reference", max_requests=2, max_tokens=512)
        >>> cache.plan
        CachePlan(classic: 2 blocks × 256 tokens, 2 slots, 0.000 GiB)
        >>> kvcore.create_cache(spec, backend="reference", max_requests=2, budget_bytes=100_000).nbytes
        98304
    """
    policy = check_policy(prefix)
    chosen = choose_backend(backend, device, Needs.of(spec, layout))
    plan = plan_cache(
        spec,
        max_requests=max_requests,
        max_tokens=max_tokens,
        budget_bytes=budget_bytes,
        max_draft_tokens=max_draft_tokens,
        layout=chosen.default_layout(device) if layout == "auto" else layout,
        max_request_tokens=max_request_tokens,
        canary=sample_of(canary),
    )
    return Cache(plan, chosen, created(chosen, plan, device=device), prefix=policy, check=check)
