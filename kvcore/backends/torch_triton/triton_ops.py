"""The verbs on CUDA: a table of kernels, bound to a plan once, with plain operations for what they do not cover.

What they don't cover (a layout that splits bytes, a third party's format) runs in the plain operations of ``TorchOps``;
``explain`` and strict mode read the same table. After a step's index is built nothing on the write path allocates, asks
the device for a value or looks at host integers that change from step to step, so a decode step can be captured in a
CUDA graph.
"""

from typing import Any

import torch

from kvcore.backends.torch_triton import (
    cuda,
    cuda_attend,
    cuda_gather,
    cuda_index,
    cuda_units,
    cuda_write,
    flash,
    launch,
)
from kvcore.backends.torch_triton.backend import TorchOps, recording_nothing
from kvcore.backends.torch_triton.canary import Watcher
from kvcore.backends.torch_triton.device_index import laid_out, on_device
from kvcore.backends.torch_triton.replay import Replayed, Seen
from kvcore.backends.torch_triton.rings import Rings, move
from kvcore.backends.torch_triton.whole import whole_layer
from kvcore.backends.torch_triton.workspaces import Workspaces
from kvcore.kernels.triton.device import DeviceProps
from kvcore.ops import Ops, facade
from kvcore.ops.choices import Decision, verbs_of

KERNELS = {
    **cuda_write.KERNELS,
    **cuda_gather.KERNELS,
    **cuda_attend.KERNELS,
    **cuda_index.KERNELS,
    **cuda_units.KERNELS,
}
"""Verb, as ``explain`` names it -> its kernels."""

NO_KERNEL = Decision("torch", "this verb has no kernel")
NO_VIEWS = Decision("none", "there are views on a CPU only")
AS = {"append_kv_view": "append_kv"}
OF_ROLE = {"entries": "", "index_keys": "(index_keys)"}
RINGS = ("read_ring", "restore_ring")
ATTENTION = ("attend", "attend_kv")
FEWEST_VISITS = 8.0


def of_layer(name: str) -> Any:
    """A verb that runs as the table says for the layer."""

    def run(self: Any, pools: Any, layer: int, *given: Any, **options: Any) -> Any:
        way = self.ways[name][layer]
        if way.__class__ is Replayed and torch.compiler.is_compiling():
            way = way.way
        if not torch.is_grad_enabled():
            return way(self, pools, layer, *given, **options)
        with torch.no_grad():
            return way(self, pools, layer, *given, **options)

    return facade.as_verb(run, KERNELS[name].run, name)


def of_role(name: str, kernels: str) -> Any:
    """The same of a verb whose kernels are bound role by role."""

    def gather(self: Any, pools: Any, layer: int, index: Any, *, columns: Any = None, role: str = "entries") -> Any:
        way = self.ways[kernels + OF_ROLE[role]][layer]
        return way(self, pools, layer, index, columns=columns, role=role)

    def store(self: Any, pools: Any, layer: int, role: str, index: Any, values: Any) -> Any:
        return self.ways[kernels + OF_ROLE[role]][layer](self, pools, layer, role, index, values)

    run = store if name in facade.OF_A_ROLE else gather
    return facade.as_verb(recording_nothing(run), KERNELS[kernels].run, name)


def of_none(name: str) -> Any:
    """The same of a verb of no layer."""

    def run(self: Any, *given: Any, **options: Any) -> Any:
        way = self.ways[name][None]
        if torch.compiler.is_compiling():
            # What it launches are operators that a compiler knows; how calls are replayed is not.
            way = getattr(getattr(way, "__self__", None), "way", way)
        if not torch.is_grad_enabled():
            return way(self, *given, **options)
        with torch.no_grad():
            return way(self, *given, **options)

    return facade.as_verb(run, KERNELS[name].run, name)


class TritonOps(TorchOps):
    """Verbs with launches where those cover them.

    Args:
        plan: what the pools are.
        device: torch's name of it.
        props: what is to be known of the device; asked of it unless given.

    Attributes:
        records: (layer, role) -> what launches must know of its parts, or why kernels do not cover them.
        ways: verb -> layer -> what runs it; None is no layer.
        known: layer -> verb -> what runs calls that have passed all checks before, of those that are replayed.
        decisions: likewise what is said of that.
        workspaces, scratch: what calls write beside their outputs.
        fresh: name of a pool -> bytes of a slot that nobody has used, on the device.
        movable: whether launches move rows between pools and pages.
        moves, digests: where strips of pages lie, in the pools too, as launches are told.
        seen: what calls were given last.
    """

    def __init__(self, plan: Any, device: str = "cpu", *, props: DeviceProps | None = None) -> None:
        super().__init__(plan, device)
        self._props = props
        self._fewest_visits = FEWEST_VISITS
        self.workspaces = Workspaces(device)
        self.scratch = cuda_write.Scratch(device)
        self.fresh: dict[str, Any] = {}
        self.moves: dict[Any, Any] = {}
        self.digests: dict[Any, Any] = {}
        self.movable = cuda_units.movable(plan)
        self.seen = Seen(self.torch_device)
        self._rings = Rings(plan, device, Replayed("move_rings", self, None, move, None, ()))
        self._watcher = Watcher(plan, device)
        self._attention = flash.chosen(device, None if props is None else props.capability)
        self.records = cuda.records_of(self)
        self.ways: dict[str, dict[int | None, Any]] = {name: {} for name in KERNELS}
        self.known: dict[int | None, dict[str, Any]] = {layer: {} for layer in (None, *range(len(self.layers)))}
        self.decisions: dict[tuple[int | None, str], Decision] = {}
        for layer, verb in verbs_of(plan.spec, shared=True):
            self._bind(layer, verb)
        for layer in range(len(self.layers)):  # asked of rows in blocks they answer, too
            for verb in RINGS:
                self._bind(layer, verb)
        self._bind(None, "select")

    def _bind(self, layer: int | None, verb: str) -> None:
        """One entry of the table."""
        row = KERNELS.get(verb)
        if row is not None:
            way = cuda.bound(self, layer, verb, row, getattr(TorchOps, PLAIN.get(verb, verb)))
            self.ways[verb][layer], self.decisions[layer, verb] = way
            known = getattr(way.run, "__self__", way.run)
            if isinstance(known, Replayed):
                self.known[layer][verb] = known
            else:
                self.known[layer].pop(verb, None)
            if layer is not None:
                self._bind_whole(layer)

    def _bind_whole(self, layer: int) -> None:
        """A layer's step in one go, of what its verbs are bound to now."""
        self.known[layer].pop("decode", None)
        whole = whole_layer(self.known[layer], self.plan.spec.all_layers[layer].roles)
        if whole is not None:
            self.known[layer]["decode"] = whole

    @property
    def props(self) -> DeviceProps:
        """The device, as kernels are cut for it."""
        if self._props is None:
            self._props = launch.props_of(self.torch_device)
        return self._props

    @property
    def attention_kernels(self) -> str:
        """Whose attention it is where the shape fits.

        ``triton``, ``flash_mla`` (of latent layers; classic ones are then Triton's), ``flashinfer`` or ``torch``.
        """
        return self._attention

    @attention_kernels.setter
    def attention_kernels(self, wanted: str) -> None:
        self._attention = wanted
        self._bind_attention()

    @property
    def fewest_visits(self) -> float:
        """Entries that a step's queries read as often as this are decoded once for all of them."""
        return self._fewest_visits

    @fewest_visits.setter
    def fewest_visits(self, wanted: float) -> None:
        self._fewest_visits = wanted
        self._bind_attention()

    def _bind_attention(self) -> None:
        """Bind attention to what was chosen anew; nothing that was worked out before is true of it."""
        self.seen.programs.clear()
        for layer, verb in verbs_of(self.plan.spec):
            if verb in ATTENTION:
                self._bind(layer, verb)

    def forget_pools(self) -> None:
        """As of ``TorchOps``."""
        super().forget_pools()
        self.seen.forget()

    def decide(self, layer: int | None, verb: str) -> Decision:
        """Kernels where they cover the layer, else torch operations and why."""
        verb = AS.get(verb, verb)
        return NO_VIEWS if verb == "kv_view" else self.decisions.get((layer, verb), NO_KERNEL)

    @property
    def how(self) -> str:
        """The GPU; or that kernels are interpreted, which is never taken for hardware."""
        return f"{self.device}, Triton interpreter" if launch.INTERPRETED else super().how

    def index(self, host: Any) -> Any:
        """As of ``TorchOps``; under the interpreter, to which an address is a name, in one storage."""
        if self.device != "cpu":
            return super().index(host)
        pieces, flat = laid_out(host)
        return on_device(torch.from_numpy(flat), pieces)

    def new_index(self, numbers: Any, shape: Any, tables: Any) -> Any:
        """As of ``TorchOps``; where its arrays lie need not be asked of each."""
        index = super().new_index(numbers, shape, tables)
        self.seen.expect(index, shape)
        return index

    append_window = of_layer("append_window")
    append_rotated_window = of_layer("append_rotated_window")
    append_tail = of_layer("append_tail")
    append_index_tail = of_layer("append_index_tail")
    gather_window = of_layer("gather_window")
    flush = of_layer("flush")
    append_flush = of_layer("append_flush")
    store_role = of_role("store_role", "store_entries")
    gather_entries = of_layer("gather_entries")
    gather_all_entries = of_role("gather_all_entries", "gather_all_entries")
    index_scores = of_layer("index_scores")
    select = of_none("select")
    index_select = of_layer("index_select")
    attend = of_layer("attend")
    append_kv = of_layer("append_kv")
    append_kv_view = Ops.append_kv_view
    gather_kv = of_layer("gather_kv")
    attend_kv = of_layer("attend_kv")
    append_state = of_layer("append_state")
    write_state = of_layer("write_state")
    select_state = of_layer("select_state")
    read_state = of_layer("read_state")
    append_conv = of_layer("append_conv")
    gather_conv = of_layer("gather_conv")
    reset_slots = of_none("reset_slots")
    poison = of_none("poison")
    copy_slots = of_none("copy_slots")
    copy_blocks = of_none("copy_blocks")
    read_ring = of_layer("read_ring")
    restore_ring = of_layer("restore_ring")
    digest_rows = of_none("digest_rows")
    move_strips = of_none("move_strips")
    digest_strips = of_none("digest_strips")

    @recording_nothing
    def through_device(self, pools: Any, pages: Any, strips: Any, units: Any, **how: Any) -> Any:
        """``move_strips`` of pages in the host's memory, and what ``digest_strips`` gives of ``digested`` in them."""
        return cuda_units.through_device(self, pools, pages, strips, units, **how)

    @recording_nothing
    def begin_pages(self, pages: Any) -> Any:
        """Pages of the host on their way, for ``through_device`` to go on with; None where those do not go that way."""
        return cuda_units.begin_pages(self, pages)

    @recording_nothing
    def component_lanes(self, pools: Any, strips: Any, units: Any) -> Any:
        """What ``digest_rows`` gives of every strip of a request, where its rows lie; None where it cannot."""
        return cuda_units.component_lanes(self, pools, strips, units)

    @recording_nothing
    def read_rings(self, pools: Any, rings: Any, index: Any) -> Any:
        """What ``read_ring`` reads of many rings (layer, role), in one launch; for ``restore_rings``."""
        return self._rings.read(pools, rings, index)

    @recording_nothing
    def watch(self, pools: Any, index: Any, asked: Any) -> Any:
        """Compare sampled rows of all layers with their check words, and give new ones theirs, in one launch."""
        return self._watcher.watch(pools, index, asked)

    @recording_nothing
    def restore_rings(self, pools: Any, rings: Any, index: Any, saved: Any) -> Any:
        """Put back what ``read_rings`` read."""
        self._rings.restore(pools, rings, index, saved)
        return pools


PLAIN = {
    "store_entries": "store_role",
    "store_entries(index_keys)": "store_role",
    "gather_all_entries(index_keys)": "gather_all_entries",
}
"""The plain verb behind a row of another name."""
