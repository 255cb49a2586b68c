"""The torch backend: the verbs bound to a plan and a device, in place."""

from contextlib import nullcontext
from functools import wraps
from typing import Any

import numpy as np
import torch

from kvcore.arrays import BITS_OF
from kvcore.backends.torch_triton import (
    attention,
    cpu_views,
    encoding,
    entries,
    indexer,
    kv,
    lifecycle,
    recurrent,
    rows,
    tail,
    window,
)
from kvcore.backends.torch_triton.device_index import DeviceIndex, laid_out, on_device
from kvcore.backends.torch_triton.layer import Layer
from kvcore.errors import ShapeError
from kvcore.ops import Ops, StepIndex, facade
from kvcore.ops.choices import Decided, Decision, refused, strict
from kvcore.plan import CachePlan
from kvcore.pools import allocate
from kvcore.spec.layout import FOREIGN

WITHOUT_KERNEL = ("compress", "gather_rows", "store_rows")
"""Verbs that are torch operations on every device."""


NO_MODE = nullcontext()

OF_VIEWS = ("append_kv", "gather_kv", "kv_view", "append_kv_view", "attend_kv")
"""Verbs that read, on the CPU, rows where they lie if they can."""


def recording_nothing(function: Any) -> Any:
    """A cache is no part of a model's gradient: verbs record nothing, whatever they are given."""

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():  # a decode step, in which the context would be a tenth of a verb's time
            return function(*arguments, **options)
        with torch.no_grad():
            return function(*arguments, **options)

    return run


def verb(function: Any, name: str = "", **fixed: Any) -> Any:
    """``kvcore.ops.facade.verb``, recording nothing."""
    return recording_nothing(facade.verb(function, name, **fixed))


def codec(function: Any) -> Any:
    """A verb of a format and an array, which may be NumPy's."""
    _, array = facade.parameters_of(function).names[:2]

    def run(self: Any, format: Any, *given: Any, **options: Any) -> Any:
        if given:
            return function(format, self.asarray(given[0]), *given[1:], **options)
        return function(format, **{**options, array: self.asarray(options[array])})

    return recording_nothing(facade.as_verb(run, function))


class TorchOps(Decided, Ops):
    """Every verb of ``kvcore.ops.Ops`` on torch tensors of one device."""

    in_place = True

    def __init__(self, plan: CachePlan, device: str = "cpu") -> None:
        self.plan = plan
        self.layers = [Layer(plan, number, self) for number in range(len(plan.layers))]
        self.device = device
        memory = cpu_views.Memory()
        self.host = memory.of
        self.spare = cpu_views.Spare()
        # Region (its address) -> ``cpu_views.Kept``, its pool's rows as one array: every layer asks in every step.
        self.lines: dict[int, Any] = {}
        # What layers alike have of them: see ``cpu_views.lines_alike``.
        self.lines_alike: dict[Any, Any] = {}
        # The same of ``cpu_coded.Side``.
        self.sides: dict[int, Any] = {}
        # What others' kernels keep between calls, made once.
        self.wrappers: dict[Any, Any] = {}
        self.torch_device = torch.device(device)
        self._index = DeviceIndex(device, memory.forget)
        self.strict = strict()

    @property
    def how(self):
        """The device, with the GPU's name where it is one."""
        device = torch.device(self.device)
        return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else self.device

    def state_view(self, pools: Any, layer: int, slot: int, count: int, row: int) -> Any:
        """States of requests that follow each other as the pool's own memory, [count, ...]; None: only as a copy."""
        return recurrent.state_view(self.layers[layer], pools, slot, count, row)

    def append_in_turn(self, pools: Any, layer: int, index: Any, k: Any, v: Any, *, columns: int) -> Any:
        """What layers alike may call in place of ``append_kv_view``, which ``layer`` has called; None: nothing else."""
        return None if self.layers[layer].over_tokens else cpu_views.in_turn(self, pools, layer, index, k, v, columns)

    def forget_pools(self) -> None:
        """Let go of pools that calls were given: their cache is gone, and its memory is wanted."""
        self.lines.clear()
        self.lines_alike.clear()
        self.sides.clear()
        self.spare = cpu_views.Spare()

    def decide(self, layer: int | None, verb: str) -> Decision:
        """Torch operations; on a GPU that is because Triton is missing."""
        if self.torch_device.type == "cuda":
            return Decision("torch", "triton is not installed", slower=verb not in WITHOUT_KERNEL)
        if verb in OF_VIEWS:
            return cpu_views.decide(self, layer, verb)
        return Decision("torch", "on the CPU the verbs are torch operations")

    def check_if_strict(self) -> None:
        """``check_strict`` where KVCORE_STRICT=1 was set as the verbs were made."""
        if self.strict:
            self.check_strict()

    def fall_back(self, layer: int | None, verb: str, reason: str, to: str = "torch") -> None:
        """Called before a call's arguments make it run torch operations where other arguments run a kernel.

        Args:
            to: what it runs, where that is not torch's operations but not what was asked for either.

        Raises:
            BackendError: KVCORE_STRICT=1.
        """
        if self.strict:
            raise refused(verb, layer, to, reason)

    encode = codec(encoding.encode)
    decode = codec(encoding.decode)
    pack_page = codec(encoding.pack_page)
    unpack_page = codec(encoding.unpack_page)
    join = verb(tail.join)
    append_window = verb(window.append_window)
    rotated_rows = verb(window.rotated_rows)
    append_rotated_window = verb(window.append_rotated_window)
    append_tail = verb(tail.append_tail, role="tail")
    append_index_tail = verb(tail.append_tail, "append_index_tail", role="index_tail")
    gather_window = verb(window.gather_window)
    compress = verb(tail.compress)
    flush = facade.of_streams(verb(tail.flush))
    store_entries = verb(entries.store_entries)
    store_role = verb(entries.store_role)
    closed = verb(entries.closed)
    gather_entries = verb(entries.gather_entries)
    gather_all_entries = verb(entries.gather_all_entries)
    index_scores = verb(indexer.index_scores)
    select = verb(indexer.select)
    attend = verb(attention.attend)
    append_kv = verb(kv.append_kv)
    gather_kv = verb(kv.gather_kv)
    mask = verb(kv.mask)
    visible_rows = verb(kv.visible_rows)
    from_batch = verb(kv.from_batch)
    to_batch = verb(kv.to_batch)
    kv_view = verb(kv.kv_view)
    append_kv_view = facade.verb(kv.append_kv_view)  # which looks at the mode by itself
    attend_kv = verb(kv.attend_kv)
    append_state = verb(recurrent.append_state)
    write_state = verb(recurrent.write_state)
    select_state = verb(recurrent.select_state)
    read_state = verb(recurrent.read_state)
    append_conv = verb(recurrent.append_conv)
    gather_conv = verb(recurrent.gather_conv)
    reset_slots = recording_nothing(facade.reset_in_place(lifecycle.reset_slots))
    poison = recording_nothing(facade.poison_in_place(lifecycle.poison))
    copy_slots = recording_nothing(facade.copy_in_place(lifecycle.copy_units, "slot"))
    copy_blocks = recording_nothing(facade.copy_in_place(lifecycle.copy_units, "block"))
    gather_rows = verb(lifecycle.gather_rows)
    store_rows = verb(lifecycle.store_rows)
    read_ring = verb(lifecycle.read_ring)
    restore_ring = verb(lifecycle.restore_ring)
    digest_rows = verb(lifecycle.digest_rows)
    encode_rows = staticmethod(rows.encode_rows)
    decode_rows = staticmethod(rows.decode_rows)

    def allocate(self):
        """Fresh pools for the plan."""

        def make(units, size, fresh, region, buffer):
            pool = torch.zeros((units, size), dtype=torch.uint8, device=self.device)
            if fresh is not None:
                pool[:] = self.bytes_of(fresh)
            return pool

        # An inference tensor could not be written to outside inference mode; an ordinary one can be in both.
        with torch.inference_mode(False):
            return allocate(self.plan, make)

    def asarray(self, array):
        """A NumPy array as a tensor of its own on the device, bf16 included; a tensor on the device as it is, detached.

        NumPy arrays are copied: rows may wait for the commit, and the caller may change its array before.
        """
        if isinstance(array, torch.Tensor):
            if array.device != self.torch_device:
                raise ShapeError(
                    got=f"a tensor on {array.device}",
                    where="device",
                    allowed=f"tensors on {self.device}, where the cache is, or NumPy arrays",
                    hint=f"Move it with .to({self.device!r}).",
                )
            array = array.detach() if array.requires_grad else array
            # A kernel reads what lies there; a tensor may say that it is the negative of that.
            return array.resolve_neg() if array.is_neg() else array
        host = np.array(array, order="C")
        name = host.dtype.name
        bits = BITS_OF.get(name)
        # Like the pools: an array made in inference mode may become a pool that is written to outside it.
        with torch.inference_mode(False):
            try:
                tensor = torch.from_numpy(host.view(bits) if bits else host)
            except TypeError:
                raise ShapeError(got=f"dtype {host.dtype}", where="array", allowed="a dtype that torch has") from None
            return (tensor.view(getattr(torch, name)) if bits else tensor).to(self.device)

    def index(self, host):
        """The step index on the device, moved there as one buffer, without waiting for the device."""
        pieces, flat = laid_out(host)
        # Tensors of inference mode don't say whether they were written to.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else NO_MODE:
            if self.device == "cpu":
                arrays: list[Any] = [
                    torch.from_numpy(flat[piece.start : piece.end].reshape(piece.shape)) for piece in pieces
                ]
                return StepIndex(*arrays)
            # Memory that torch keeps for this: it is not used again before the copy was made.
            pinned = torch.empty(len(flat), dtype=torch.int32, pin_memory=True)
            pinned.numpy()[:] = flat
            moved = pinned.to(self.torch_device, non_blocking=True)
        return on_device(moved, pieces)

    def padded_index(self, host):
        """A padded step's index: one copy into buffers that persist, so that a captured graph sees the next step's."""
        return self._index.put(host)

    def kept_index(self, numbers, shape, tables):
        """The same of a step whose block tables are kept on the host: what changed of them goes along."""
        return self._index.send(numbers, shape, tables)

    def repeated_index(self, numbers, shape, tables):
        """The same of a step that is not padded, in memory that the next one of its shape writes."""
        return self._index.repeat(numbers, shape, tables)

    def new_index(self, numbers, shape, tables):
        """The same of a step that is not padded, in memory of its own."""
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else NO_MODE:
            return self._index.new(numbers, shape, tables)

    def component(self, layer, role):
        """The layer's component of that role, or None."""
        return self.plan.layers[layer].component(role)

    def global_scale(self, layer, role):
        """The component's global scale, 1 where it has none."""
        return self.plan.layers[layer].global_scale(role)

    def bytes_of(self, data):
        """Host bytes as a uint8 tensor on the device."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)


class ForeignOps(TorchOps):
    """Verbs on rows at steps that somebody else chose: torch operations, which take any."""

    def decide(self, layer: int | None, verb: str) -> Decision:
        """Torch operations; kernels take units as the library lays them out."""
        if self.torch_device.type == "cuda":
            return Decision("torch", f"layout {FOREIGN}: rows lie where their owner put them", slower=True)
        return super().decide(layer, verb)
