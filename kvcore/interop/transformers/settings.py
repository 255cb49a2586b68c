"""What a cache is made with: the plan's figures and what its layers need of the model, so that a copy is made alike."""

from typing import Any, Literal, NamedTuple

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from kvcore import Cache, create_cache
from kvcore.counts import check_count
from kvcore.errors import SpecError
from kvcore.interop.transformers.attention import Hooks, hooks_of
from kvcore.interop.transformers.given import check_given
from kvcore.interop.transformers.kinds import OfModel, of_model
from kvcore.interop.transformers.reuse import check_reusable
from kvcore.interop.transformers.seam import expanding
from kvcore.interop.transformers.spec import Formats, cache_spec, decoder_of
from kvcore.interop.transformers.tensors import DTYPES
from kvcore.interop.transformers.ways import Asked, check_asked, decoder_module, layers_asking, reason_against
from kvcore.requests.prefix import Policy, check_policy
from kvcore.spec import CacheSpec


class Settings(NamedTuple):
    """Arguments of ``KVCache``, checked and filled in; see there.

    Attributes:
        rows: most rows of a batch, beams counted.
        spare: each row has a block more than ``max_length`` needs.
        place: where the pools live.
        device: where the model is.
        kinds: transformers' names of the layers.
        asked: who is to attend.
        against: why the cache does not in any layer; "" where it may.
        hooks: what tells the cache of the model's forwards, if it attends itself.
        expanding: modules of the model that expand latents to keys and values, if it attends itself.
        asking: with static shapes, layers that look their attention function up: see ``layers_asking``.
        prefix: what is kept of prompts for later ones.
        prefix_tokens: of earlier prompts that there is room for beside the rows.
    """

    spec: CacheSpec
    of: OfModel
    rows: int
    max_length: int
    spare: bool
    backend: str
    place: str
    device: torch.device
    max_draft_tokens: int
    static: bool
    zero_copy: bool
    check: bool
    kinds: tuple[str, ...]
    asked: Asked
    against: str
    hooks: Hooks | None
    expanding: tuple[torch.nn.Module, ...]
    asking: frozenset[int]
    prefix: Policy
    prefix_tokens: int

    def new_cache(self) -> Cache:
        """A kvcore cache with room for all rows."""
        spec = self.spec
        blocks = -(-self.max_length // spec.block_tokens) + self.spare
        kept = -(-self.prefix_tokens // spec.block_tokens)
        paged = any(component.growth == "block" for _, _, component in spec.components())
        classic = all(layer.kv is not None for layer in spec.layers)
        return create_cache(
            spec,
            backend=self.backend,
            device=self.place,
            max_requests=self.rows,
            # Blocks are planned for all rows together, contiguous rows for each slot.
            max_tokens=(blocks * self.rows + kept if paged else blocks) * spec.block_tokens,
            prefix=self.prefix,
            max_request_tokens=self.max_length,
            max_draft_tokens=self.max_draft_tokens,
            # A head's rows side by side are what attention on a CPU reads.
            layout="by_head" if self.backend == "torch_triton" and self.place == "cpu" and classic else "auto",
            check=self.check,
        )


def settings_of(
    model: Any,
    *,
    batch: int,
    max_length: int,
    beams: int,
    formats: Formats | None,
    backend: str,
    device: str | None,
    block_tokens: int | None,
    max_draft_tokens: int,
    static: bool,
    storage: Literal["paged", "slot"] | None,
    zero_copy: bool,
    check: bool,
    spec: CacheSpec | None,
    attention: Asked,
    prefix: Policy,
    prefix_tokens: int,
) -> Settings:
    """The arguments of ``KVCache``, checked."""
    missing = [name for name in ("config", "dtype", "device") if not hasattr(model, name)]
    if missing:
        raise SpecError(
            got=f"{type(model).__name__} without {', '.join(missing)}",
            where="model",
            allowed="a model of transformers, which has config, dtype and device",
        )
    if model.dtype not in DTYPES:
        raise SpecError(got=str(model.dtype), where="model.dtype", allowed=", ".join(map(str, DTYPES)))
    _check_served(model, static=static)
    if prefix != "off":
        check_reusable(check_policy(prefix), static=static, storage=storage, spec=spec)
    batch, beams = (check_count(SpecError, *given, 1) for given in (("batch", batch), ("beams", beams)))
    if spec is None:
        # Rows of full attention that others may take over lie in blocks.
        spec = _derived(model, formats, block_tokens, storage or (None if prefix == "off" else "paged"), static, beams)
    else:
        for name, value in (("formats", formats), ("block_tokens", block_tokens), ("storage", storage)):
            if value is not None:
                raise SpecError(got=value, where=name, allowed="None beside spec, which says it")
        spec = check_given(spec, model)
    asked = check_asked(attention)
    against = reason_against(model, asked, static=static)
    return Settings(
        spec=spec,
        of=of_model(model, spec),
        rows=batch * beams,
        max_length=check_count(SpecError, "max_length", max_length, 1),
        spare=beams > 1,
        backend=backend,
        place=device or str(model.device),
        device=model.device,
        max_draft_tokens=max_draft_tokens,
        static=static,
        zero_copy=zero_copy,
        check=check,
        asked=asked,
        against=against,
        kinds=tuple(get_layer_types_and_kwargs(decoder_of(model.config))[0]),
        hooks=None if against else hooks_of(decoder_module(model)),
        expanding=() if against else expanding(decoder_module(model)),
        asking=frozenset() if against or not static else layers_asking(decoder_module(model), len(spec.layers)),
        prefix=prefix,
        prefix_tokens=check_count(SpecError, "prefix_tokens", prefix_tokens, 0),
    )


UNSERVED = {"mpt": "generate hands over every token again at each step, to whichever cache it is given"}
"""Model type -> why no cache gives its tokens in transformers 5.24."""


def _check_served(model: Any, *, static: bool) -> None:
    """Refuse a model that does not use what it is given as caches are used."""
    kind = getattr(model.config, "model_type", None)
    if kind in UNSERVED:
        raise SpecError(got=f"{kind}: {UNSERVED[kind]}", where="model.config.model_type", allowed="other models")
    # The class's own word, which transformers asks for before it compiles: some cut masks by how many keys they see.
    if static and not getattr(model, "_can_compile_fullgraph", True):
        raise SpecError(
            got="static=True",
            where="KVCache",
            allowed=f"a model that is for fixed shapes: {type(model).__name__} says that it is not",
            hint="Leave static out; the cache then grows with the tokens, as the model's own does.",
        )


def _derived(
    model: Any,
    formats: Formats | None,
    block_tokens: int | None,
    storage: Literal["paged", "slot"] | None,
    static: bool,
    beams: int,
) -> CacheSpec:
    """The spec that the model's configuration gives."""
    options: dict[str, Any] = {"default": DTYPES[model.dtype], "block_tokens": block_tokens}
    try:
        spec = cache_spec(model.config, formats, **options)
    except SpecError as error:
        if not error.where.endswith("model_type"):
            raise
        hint = "Compose a CacheSpec from LayerSpec and components, and give it as KVCache(model, ..., spec=...)."
        raise SpecError(got=error.got, where=error.where, allowed=error.allowed, hint=hint) from None
    classic = all(layer.kv is not None for layer in spec.layers)
    if storage == "slot" or (storage is None and classic and beams == 1):
        spec = cache_spec(model.config, formats, **options, storage="slot", rings=storage is None or static)
    return spec
