"""How large a cache will be, before anything is allocated.  Run it:  python examples/plan_a_cache.py"""

from kvcore.plan import bytes_per_token, logical_bytes, plan_cache
from kvcore.spec import presets

spec = presets.deepseek_v4_flash(draft=False)
print(f"{float(bytes_per_token(spec)):.2f} bytes for every token of history")
for tokens in (4_096, 131_072, 1_048_576):
    total = sum(logical_bytes(spec, tokens).values())
    print(f"{tokens:>9} tokens of one request: {total / 2**20:10.2f} MiB live")

plan = plan_cache(spec, max_requests=32, budget_bytes=40 * 2**30)
print(plan)
print(f"a block of {spec.block_tokens} tokens takes {plan.block_bytes} bytes, a slot {plan.slot_bytes}")

smaller = presets.deepseek_v4_flash(draft=False, formats={"entries": "mxfp4_368"})
gain = plan_cache(smaller, max_requests=32, budget_bytes=40 * 2**30).blocks / plan.blocks
print(f"entries in mxfp4_368 hold {gain:.2f} times the history in the same budget")
