"""Gluon's language in NumPy, as far as ``attend_codes``, ``attend_packed`` and ``scores_nibbles`` speak it.

Layouts do nothing, and copies end as they begin. Kernels in Gluon have no interpreter. What they compute does not
depend on layouts, so it can be carried out with arrays; assembly is told by what it does to numbers.
"""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

BF16 = np.dtype(ml_dtypes.bfloat16)


class Pointer:
    """Addresses in an array of bytes, of elements of a dtype."""

    def __init__(self, memory, at, dtype):
        self.memory, self.at, self.type = memory, np.asarray(at, np.int64), np.dtype(dtype)
        self.dtype = SimpleNamespace(element_ty=self.type)

    def __add__(self, number):
        return Pointer(self.memory, self.at + np.asarray(number, np.int64) * self.type.itemsize, self.type)

    def __getitem__(self, key):
        return Pointer(self.memory, self.at[key], self.type)

    def to(self, dtype, bitcast=True):
        assert bitcast
        return Pointer(self.memory, self.at, dtype)

    def addresses(self):
        return self.at[..., None] + np.arange(self.type.itemsize)


class Tensor(np.ndarray):
    """An array with the methods of Gluon's."""

    type = SimpleNamespace(layout=None)

    def __array_wrap__(self, array, context=None, return_scalar=False):
        del context, return_scalar
        return array.view(Tensor)

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)

    def permute(self, order):
        return self.transpose(order)

    def reshape(self, shape):
        return np.ndarray.reshape(self, tuple(shape))


class Shared:
    """An allocation of shared memory, or a part of it; poisoned until it is written."""

    def __init__(self, values):
        self.values = values

    def index(self, number):
        return Shared(self.values[int(number)])

    def permute(self, order):
        return Shared(self.values.transpose(order))

    def load(self, layout):
        del layout
        return tensor(self.values.copy())

    def store(self, values):
        self.values[...] = values

    def reinterpret(self, dtype, shape, layout):
        del layout
        return Shared(self.values.view(dtype).reshape(shape))


def tensor(values):
    return np.asarray(values).view(Tensor)


def load(pointer, mask=True, other=0):
    keep = np.broadcast_to(mask, pointer.at.shape)
    addresses = np.where(keep[..., None], pointer.addresses(), 0)
    assert addresses.min() >= 0
    assert addresses.max() < pointer.memory.size
    values = np.ascontiguousarray(pointer.memory[addresses]).view(pointer.type)[..., 0]
    return tensor(np.where(keep, values, np.array(other).astype(pointer.type)).astype(pointer.type))


def store(pointer, values, mask=True):
    keep = np.broadcast_to(mask, pointer.at.shape)
    held = np.broadcast_to(np.asarray(values).astype(pointer.type), pointer.at.shape)
    pointer.memory[pointer.addresses()[keep]] = np.ascontiguousarray(held)[..., None].view(np.uint8)[keep]


def copy(target, pointer, mask=True):
    target.values[...] = load(pointer, mask, 0)


def product(a, b, sums):
    return tensor(np.asarray(a, np.float32) @ np.asarray(b, np.float32) + np.asarray(sums))


def group_product(a, b, sums, *, use_acc=True, is_async=False):
    """Of two tiles in shared memory."""
    del is_async
    return product(a.values, b.values, sums if use_acc else 0)


def allocate(dtype, shape, _, values=None):
    """Shared memory: poisoned, or what it is given."""
    found = np.full((*shape, np.dtype(dtype).itemsize), 0x7F, np.uint8).view(dtype)[..., 0]
    if values is not None:
        found[...] = values
    return Shared(found)


def where(condition, yes, no):
    return tensor(np.where(condition, yes, no))


def nothing(*_, **__):
    """A layout."""


def language(number, assembly):
    """``gl`` for program ``number``; ``assembly``: text -> what it does to arrays."""

    def inline(text, constraints, given, dtype, is_pure, pack):
        del constraints, is_pure, pack
        found = assembly[getattr(text, "value", text)](*np.broadcast_arrays(*given))
        assert (len(found) == len(dtype)) if isinstance(dtype, tuple) else True
        return tuple(map(tensor, found)) if isinstance(dtype, tuple) else tensor(found)

    layouts = (
        *("NVMMADistributedLayout", "DotOperandLayout", "SwizzledSharedLayout", "SliceLayout", "BlockedLayout"),
        *("DistributedLinearLayout", "NVMMASharedLayout"),
    )
    return SimpleNamespace(
        **dict.fromkeys(layouts, nothing),
        program_id=lambda _: tensor(number),
        int64=np.int64,
        int16=np.dtype(np.int16),
        int32=np.dtype(np.int32),
        bfloat16=BF16,
        float16=np.dtype(np.float16),
        float32=np.dtype(np.float32),
        float8e4nv=np.dtype(ml_dtypes.float8_e4m3fn),
        float8e5=np.dtype(ml_dtypes.float8_e5m2),
        pointer_type=lambda dtype: dtype,
        constexpr=None,
        arange=lambda first, end, *_, **__: tensor(np.arange(first, end)),
        full=lambda shape, value, dtype, _: tensor(np.full(shape, value, dtype)),
        zeros=lambda shape, dtype, _: tensor(np.zeros(shape, dtype)),
        cdiv=lambda a, b: -(-a // b),
        load=load,
        store=store,
        where=where,
        maximum=lambda a, b: tensor(np.fmax(a, b)),
        minimum=lambda a, b: tensor(np.fmin(a, b)),
        max=lambda x, axis: tensor(np.fmax.reduce(x, axis=axis)),
        sum=lambda x, axis: tensor(np.sum(x, axis=axis, dtype=np.float32)),
        exp2=lambda x: tensor(np.exp2(x)),
        log2=lambda x: tensor(np.log2(x)),
        abs=np.abs,
        join=lambda a, b: tensor(np.stack([a, b], axis=-1)),
        split=lambda x: (tensor(x[..., 0]), tensor(x[..., 1])),
        permute=lambda x, order: x.transpose(order),
        reshape=lambda x, shape: np.ascontiguousarray(x).reshape(shape).view(Tensor),
        convert_layout=lambda x, *_, **__: x,
        static_range=range,
        allocate_shared_memory=allocate,
        inline_asm_elementwise=inline,
    )


INSTEAD = {
    "async_copy": SimpleNamespace(commit_group=nothing, wait_group=nothing), "barrier": nothing, "copy": copy,
    "fence_async_shared": nothing, "mma_v2": product, "warpgroup_mma": group_product,
    "warpgroup_mma_wait": lambda _, found: found[0],
}  # fmt: skip


def carried_out(modules, monkeypatch):
    """Let the functions of modules in Gluon be called as they are."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, value.fn)
            elif isinstance(value, gl.constexpr) and not isinstance(value.value, str):
                monkeypatch.setattr(module, name, value.value)
            elif name in INSTEAD or name.endswith("_layout"):
                monkeypatch.setattr(module, name, INSTEAD.get(name, nothing))


def at(array):
    """A pointer to an array without gaps."""
    assert array.flags.c_contiguous
    return Pointer(array.reshape(-1).view(np.uint8), 0, array.dtype)


def memory_of(pools):
    """Pointers to the bytes of pools, by name."""
    return {name: at(np.ascontiguousarray(pool).reshape(-1).view(np.uint8)) for name, pool in pools.items()}
