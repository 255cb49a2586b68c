"""A spec that the user gives, held against the model: what would make it forget rows, or never be whole, is refused."""

from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

from kvcore.errors import SpecError
from kvcore.interop.transformers.spec import decoder_of
from kvcore.spec import CacheSpec, LayerSpec

WHOLE = frozenset({"full_attention", "indexed_attention"})
"""transformers' names of layers that attend to every position."""

SLIDING = frozenset({"sliding_attention", "chunked_attention"})
"""Those of layers that attend to a window; chunks of a padded row are shifted, so they need a window as well."""

RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Those of layers that carry a state on, or a convolution's inputs, beside attention in hybrid ones."""

COMPRESSED = frozenset({"heavily_compressed_attention", "compressed_sparse_attention"})


def check_given(spec: CacheSpec, model: Any) -> CacheSpec:
    """The spec, if the model can run on it as far as its configuration says; heads and dims show at the first update.

    Raises:
        SpecError: it is no CacheSpec, has another number of layers than the model or draft layers, or keeps of a layer
            fewer positions than the model attends to.
    """
    if not isinstance(spec, CacheSpec):
        raise SpecError(got=spec, where="spec", allowed="a CacheSpec")
    if spec.draft_layers:
        raise SpecError(
            got=f"{len(spec.draft_layers)} draft layers",
            where="spec.draft_layers",
            allowed="none: models do not run them",
        )
    kinds, options = get_layer_types_and_kwargs(decoder_of(model.config))
    count = _layers_of(model, len(kinds))
    if len(spec.layers) != count:
        raise SpecError(got=f"{len(spec.layers)} layers", where="spec.layers", allowed=f"{count}, as the model has")
    for number, (layer, kind, option) in enumerate(zip(spec.layers, kinds, options, strict=False)):
        _check_layer(layer, spec.path(number), kind, option.get("sliding_window"))
    windows = {_kept(layer) for layer, kind in zip(spec.layers, kinds, strict=False) if kind in SLIDING}
    if len(windows) > 1:
        # The model makes one mask for all of them.
        raise SpecError(
            got=f"sliding layers that keep {', '.join(map(str, sorted(windows, key=str)))} positions",
            where="spec.layers",
            allowed="as many in each: the model masks them alike",
        )
    return spec


def _layers_of(model: Any, configured: int) -> int:
    """Layers that the model has, which can be fewer than its configuration says."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(decoder, "layers", None)
    return configured if layers is None else len(layers)


def _kept(layer: LayerSpec) -> int | None:
    """Positions that the layer hands out, its window; None: all."""
    component = layer.kv or layer.window
    return None if component is None else component.window


def _check_layer(layer: LayerSpec, path: str, kind: str, window: int | None) -> None:
    known = WHOLE | SLIDING | COMPRESSED | RECURRENT | {"dummy"}
    if kind not in known:
        raise SpecError(got=f"a layer of kind {kind}", where=path, allowed=", ".join(sorted(known)))
    if (layer.conv is not None) != (kind in RECURRENT) or (not layer.roles) != (kind == "dummy"):
        raise SpecError(
            got=", ".join(layer.roles) or "nothing",
            where=path,
            allowed=f"what a layer of kind {kind} of the model keeps",
        )
    if layer.kv is not None and layer.kv.chunk is not None:
        raise SpecError(
            got=layer.kv.chunk,
            where=f"{path}.kv.chunk",
            allowed=f"window={layer.kv.chunk}",
            hint="Left padding shifts where chunks begin, and the cache is not told of padding.",
        )
    kept = _kept(layer)
    if kind in WHOLE and kept is not None:
        raise SpecError(got=kept, where=f"{path}: window", allowed="none: the model attends to every position")
    if kind in SLIDING and kept is not None and window is not None and kept < window:
        raise SpecError(got=kept, where=f"{path}: window", allowed=f"{window} or more, the model's window")
