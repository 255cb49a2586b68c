"""Which class serves a layer of a spec, and what it needs of the model."""

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DummyLayer

from kvcore.errors import SpecError
from kvcore.interop.transformers.latent import CompressedLayer, LatentLayer, MlaLayer, StaticMlaLayer
from kvcore.interop.transformers.layers import KVLayer, Layer, StaticLayer
from kvcore.interop.transformers.owner import Owner
from kvcore.interop.transformers.recurrent import HybridLayer, RecurrentLayer
from kvcore.interop.transformers.spec import decoder_of
from kvcore.interop.transformers.ways import most_absorbed
from kvcore.spec import CacheSpec, LayerSpec

SHAPES = {
    ("kv",): "classic",
    ("kv_tail", "kv"): "classic, coded in groups of tokens",
    ("entries",): "latent attention",
    ("entries", "index_keys"): "latent attention with an indexer",
    ("window",): "a window of latent rows",
    ("window", "tail", "entries"): "a window and compressed entries",
    ("window", "tail", "entries", "index_tail", "index_keys"): "a window, compressed entries and an indexer",
    ("conv",): "a short convolution",
    ("state", "conv"): "a recurrent state",
    ("kv", "state", "conv"): "attention and a recurrent state",
    ("kv", "conv"): "attention and a short convolution",
}
"""The components that a model of transformers can fill -> what such a layer is called."""


class OfModel(NamedTuple):
    """What layers need to know of the model beyond their spec.

    Attributes:
        dtype: of its keys and values.
        rank: channels of latent attention's rows that are its latent; the others are its rotary key.
        most_absorbed: new tokens of a row up to which latents are attended to with fewer multiplications as they are.
        biases: layer -> positional biases of its compressors, by transformers' names for them.
        heads: of queries; None where the configuration does not say.
    """

    dtype: torch.dtype
    rank: int | None
    most_absorbed: int | None
    biases: dict[int, dict[str, torch.Tensor]]
    heads: int | None


def of_model(model: Any, spec: CacheSpec) -> OfModel:
    """What the layers of ``spec`` need to know of the model.

    Raises:
        SpecError: the spec has tails where the model has no compressor.
    """
    tails = {number: layer for number, layer in enumerate(spec.layers) if layer.tail is not None}
    biases = {number: _biases(model, layer, number) for number, layer in tails.items()}
    config = decoder_of(model.config)
    rank, heads = (getattr(config, name, None) for name in ("kv_lora_rank", "num_attention_heads"))
    return OfModel(model.dtype, rank, most_absorbed(config), biases, heads)


def _biases(model: Any, layer: LayerSpec, number: int) -> dict[str, torch.Tensor]:
    try:
        compressor = model.get_decoder().layers[number].self_attn.compressor
        found = {"compressor": compressor.position_bias}
        if layer.index_tail is not None:
            found["indexer"] = compressor.indexer.position_bias
    except (AttributeError, IndexError) as error:
        raise SpecError(
            got=f"a tail, but the model has no compressor ({error})",
            where=f"layers[{number}].tail",
            allowed="tails in layers that the model compresses",
        ) from None
    return found


def layer_of(owner: Owner, number: int, of: OfModel) -> Layer | RecurrentLayer | DummyLayer:
    """The layer of a cache as its model calls it.

    Raises:
        SpecError: models of transformers do not fill such a layer, or not with fixed shapes.
    """
    spec, path = owner.kv.spec.layers[number], owner.kv.spec.path(number)
    if not spec.roles:
        return DummyLayer()
    if spec.roles not in SHAPES:
        allowed = "; ".join(", ".join(roles) for roles in SHAPES)
        raise SpecError(got=", ".join(spec.roles), where=path, allowed=allowed)
    if spec.conv is not None and owner.static:
        raise SpecError(
            got="static=True",
            where=path,
            allowed="layers that are not recurrent with it",
            hint="A recurrent layer's state is handed out as a copy, which compiled code would keep.",
        )
    if spec.conv is not None:
        return (RecurrentLayer if spec.kv is None else HybridLayer)(owner, number, spec)
    if spec.kv_tail is not None and owner.static:
        raise SpecError(
            got="static=True",
            where=path,
            allowed="formats over channels with it",
            hint="Rows of the open group lie elsewhere than those of closed ones, and how many there are changes.",
        )
    if spec.kv is not None:
        return (StaticLayer if owner.static else KVLayer)(owner, number, spec.kv)
    if spec.entries is not None and spec.entries.share is not None:
        raise SpecError(got=spec.entries.share, where=f"{path}.entries.share", allowed="entries of the layer's own")
    if spec.entries is not None and spec.window is None:
        if spec.entries.ratio != 1:
            raise SpecError(got=spec.entries.ratio, where=f"{path}.entries.ratio", allowed="1 without a window")
        if owner.static and spec.index_keys is not None:
            raise SpecError(
                got="static=True",
                where=path,
                allowed="layers without an indexer with it",
                hint="An indexer stores its keys in a second call, whose order compiled code does not keep.",
            )
        return (StaticMlaLayer if owner.static else MlaLayer)(owner, number, spec, of.rank)
    if owner.static:
        raise SpecError(
            got="static=True",
            where=path,
            allowed="classic layers and latent attention with it",
            hint="How many entries there are, and so the shapes, depends on the number of tokens.",
        )
    if spec.tail is None:
        assert spec.window is not None
        return LatentLayer(owner, number, spec.window)
    return CompressedLayer(owner, number, spec, of.biases[number])
