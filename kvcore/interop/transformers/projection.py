"""What a module of latent attention multiplies latents with, to be multiplied with queries and outputs instead."""

from typing import Any, NamedTuple

import torch

from kvcore.interop.transformers.seam import SEAM

DIMS = ("num_heads", "qk_nope_head_dim", "v_head_dim")


class Projection(NamedTuple):
    """What a module multiplies latents with.

    Attributes:
        keys: [H, dim, rank], of a key's part that is not rotary.
        values: [H, value dim, rank].
    """

    keys: torch.Tensor
    values: torch.Tensor


PROBED: dict[tuple[Any, ...], bool] = {}
"""An ``expand_kv`` and the sizes it works with -> whether it does what ``projection_of`` reads from the module."""


def projection_of(module: Any, query: torch.Tensor, rank: int) -> Projection | str:
    """What a module multiplies latents with; else why that is not known."""
    linear, heads = module.kv_b_proj, query.shape[1]
    own = vars(linear)
    # A hook is called with what was multiplied, which is nothing here.
    hooked = own.get("_forward_hooks") or own.get("_forward_pre_hooks")
    if type(linear) is not torch.nn.Linear or linear.bias is not None or "forward" in own or hooked:
        return "a key and value projection that is no plain linear layer, or has hooks"
    weight = linear.weight
    if type(weight) is not torch.nn.Parameter or weight.dtype != query.dtype or weight.device != query.device:
        return f"a key and value projection in {weight.dtype} on {weight.device}"
    count, dim, value_dim = (getattr(module, name, None) for name in DIMS)
    if count != heads or dim is None or value_dim is None or tuple(weight.shape) != (heads * (dim + value_dim), rank):
        return "a key and value projection of other heads or dims"
    key = getattr(type(module), SEAM), heads, dim, value_dim, query.shape[3]
    if key not in PROBED:
        PROBED[key] = _probe(module, weight, *key[1:])
    if not PROBED[key]:
        return f"{type(module).__name__}.{SEAM} gives other keys and values than its projection's"
    by_head = weight.view(heads, dim + value_dim, rank)
    return Projection(by_head[:, :dim], by_head[:, dim:])


def traced_projection(module: Any, rank: int) -> Projection | None:
    """The same in compiled code, of a module that ``untraceable`` has nothing against; None if it has changed."""
    linear = module.kv_b_proj
    if type(linear) is not torch.nn.Linear or linear.bias is not None:
        return None
    by_head = linear.weight.view(module.num_heads, -1, rank)
    dim = module.qk_nope_head_dim
    return Projection(by_head[:, :dim], by_head[:, dim:])


def untraceable(modules: tuple[Any, ...], rank: int | None) -> str:
    """Why compiled code cannot have modules' projections; "" where it can."""
    for module in modules:
        heads, dim = getattr(module, DIMS[0], 0), getattr(module, DIMS[1], 0)
        weight = module.kv_b_proj.weight
        key_dim = getattr(module, "qk_head_dim", dim)
        found = projection_of(module, weight.new_empty(1, heads, 1, key_dim), rank or 0)
        if isinstance(found, str):
            return found
    return ""


def _probe(module: Any, weight: torch.Tensor, heads: int, dim: int, value_dim: int, key_dim: int) -> bool:
    """Whether the module's own method gives what its projection says, of three rows."""
    count, options = 3, {"dtype": weight.dtype, "device": weight.device}
    latents = torch.linspace(-1, 1, count * weight.shape[1], **options).view(1, 1, count, -1)
    rotary = torch.linspace(-2, 2, count * (key_dim - dim), **options).view(1, 1, count, -1)
    with torch.no_grad():
        keys, values = getattr(type(module), SEAM)(module, latents, rotary)
        rows = torch.nn.functional.linear(latents, weight).view(1, count, heads, dim + value_dim).transpose(1, 2)
    wanted = torch.cat([rows[..., :dim], rotary.expand(-1, heads, -1, -1)], dim=-1), rows[..., dim:]
    return torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])


def absorbed(query: torch.Tensor, projection: Projection) -> torch.Tensor:
    """Queries [B, H, S, dim] as those of latents and rotary keys: [B · S, H, rank + rotary dim], contiguous."""
    (batch, heads, new, _), dim = query.shape, projection.keys.shape[1]
    rows = query.transpose(0, 1).reshape(heads, batch * new, -1)
    rows = torch.cat([torch.bmm(rows[..., :dim], projection.keys), rows[..., dim:]], dim=-1)
    return rows.transpose(0, 1).contiguous()


def valued(latents: torch.Tensor, projection: Projection, batch: int) -> torch.Tensor:
    """Sums of latents [B · S, H, rank] as those of values: [B, S, H, value dim]."""
    tokens, heads, _ = latents.shape
    out = torch.bmm(latents.transpose(0, 1), projection.values.transpose(1, 2))
    return out.view(heads, batch, tokens // batch, -1).permute(1, 2, 0, 3)
