"""The launch that writes the tail of a long prefill."""

from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import TAILS, options, registered
from kvcore.kernels.triton.last_rows import ROWS, append_last_kernel
from kvcore.kernels.triton.record import ceil_div, power_of_two


@registered(("buffers",))
def append_last_rows(
    kv: Tensor, score: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor, buffers: list[Tensor], record: int
) -> None:
    """Store what a ring keeps of kv and score [tokens, width], contiguous, which come request by request."""
    bound = TAILS[record]
    tail = bound.record
    columns = power_of_two(tail.width)
    append_last_kernel[(len(slots) * ceil_div(tail.rows, ROWS),)](
        kv,
        score,
        *bound.given(buffers),
        slots,
        starts,
        lengths,
        tail,
        ROWS,
        columns,
        num_warps=max(1, min(8, ROWS * columns // 256)),
        **options(kv.device),
    )
