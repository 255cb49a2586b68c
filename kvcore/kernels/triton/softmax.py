"""A running softmax over tiles of keys, and what a sink leaves of it; exponentials are to the base 2."""

import triton
import triton.language as tl


@triton.jit
def weigh(logit, largest, total):
    """Take logits [r, n] into a running softmax: (largest, total, weights, what sums keep)."""
    above = tl.maximum(largest, tl.max(logit, axis=1))
    finite = tl.where(above == float("-inf"), 0.0, above)
    weight = tl.exp2(logit - finite[:, None])
    kept = tl.exp2(largest - finite)
    return above, total * kept + tl.sum(weight, axis=1), weight, kept


@triton.jit
def beside_sink(sink_ptr, head, inside, lse):
    """Share of the weight that is left beside the sink, for base-2 ``lse``; a query without keys keeps its zeros."""
    sink = tl.load(sink_ptr + head, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp2(sink * 1.4426950408889634 - lse))
    return tl.where(lse == float("-inf"), 0.0, share)
