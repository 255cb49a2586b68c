"""Ready-made specs: DeepSeek-V4 and V4.1, a tiny twin of each, classic decoders and hybrids.

The figures are the published configurations' (section 4.2.1 of the DeepSeek-V4 and V4.1 papers, and the released
config files). Only this file, the format table and tests may know them.
"""

from collections.abc import Mapping, Sequence

from kvcore.errors import SpecError
from kvcore.spec.components import Entries, IndexKeys, Tail, Window
from kvcore.spec.kv import KV
from kvcore.spec.model import CacheSpec, LayerSpec
from kvcore.spec.recurrent import Conv, State

V4_FORMATS = {"window": "v4_584", "entries": "v4_584", "index_keys": "index_fp4_68_h"}
V41_FORMATS = {"window": "v41_528", "entries": "v41_fp4_288", "index_keys": "index_fp4_68"}


def v4_layer(
    ratio: int,
    *,
    overlap: bool,
    formats: Mapping[str, str],
    dim: int = 512,
    window: int = 128,
    index_dim: int = 128,
    index_heads: int = 64,
    index_topk: int = 512,
) -> LayerSpec:
    """One DeepSeek-V4 layer: ratio 0 is window only, ``overlap`` is CSA (with an indexer), otherwise HCA."""
    ring = Window(dim=dim, window=window, format=formats["window"])
    if ratio == 0:
        return LayerSpec(window=ring)
    tail = Tail(dim=dim, ratio=ratio, overlap=overlap)
    entries = Entries(dim=dim, ratio=ratio, format=formats["entries"])
    if not overlap:
        return LayerSpec(window=ring, tail=tail, entries=entries)
    return LayerSpec(
        window=ring,
        tail=tail,
        entries=entries,
        index_tail=Tail(dim=index_dim, ratio=ratio, overlap=True),
        index_keys=IndexKeys(
            dim=index_dim, ratio=ratio, heads=index_heads, topk=index_topk, format=formats["index_keys"]
        ),
    )


def v41_layer(
    ratio: int,
    number: int,
    sources: Sequence[int],
    *,
    formats: Mapping[str, str],
    dim: int = 512,
    window: int = 128,
    index_dim: int = 128,
    index_heads: int = 32,
    index_topk: int = 512,
) -> LayerSpec:
    """One DeepSeek-V4.1 layer: ratio 0 is window only; others read the pools of the closest source up to them."""
    ring = Window(dim=dim, window=window, format=formats["window"])
    if ratio == 0:
        return LayerSpec(window=ring)
    source = max(each for each in sources if each <= number)
    share = None if number == source else source
    return LayerSpec(
        window=ring,
        # Ratio 1 compresses nothing: entries are stored by the caller and no token ever waits.
        tail=Tail(dim=dim, ratio=ratio, overlap=False) if share is None and ratio > 1 else None,
        entries=Entries(dim=dim, ratio=ratio, format=formats["entries"], share=share),
        index_keys=IndexKeys(
            dim=index_dim,
            ratio=ratio,
            heads=index_heads,
            topk=index_topk,
            format=formats["index_keys"],
            share=share,
        ),
    )


def deepseek_v4_flash(
    *, formats: Mapping[str, str] | None = None, block_tokens: int = 256, draft: bool = True
) -> CacheSpec:
    """V4-Flash: 43 layers (2 window, 21 CSA, 20 HCA) and one draft layer."""
    ratios = [0, 0, *[4, 128] * 20, 4]
    return _v4("deepseek_v4_flash", ratios, formats, block_tokens, draft, index_topk=512)


def deepseek_v4_pro(
    *, formats: Mapping[str, str] | None = None, block_tokens: int = 256, draft: bool = True
) -> CacheSpec:
    """V4-Pro: 61 layers (30 CSA, 31 HCA) and one draft layer."""
    ratios = [128, 128, *[4, 128] * 29, 4]
    return _v4("deepseek_v4_pro", ratios, formats, block_tokens, draft, index_topk=1024)


def deepseek_v4_flash_tiny(
    *, formats: Mapping[str, str] | None = None, block_tokens: int = 32, draft: bool = True
) -> CacheSpec:
    """Five layers of every kind V4-Flash has, true row sizes, windows and ratios small enough to follow by hand."""
    return _v4("deepseek_v4_flash_tiny", [0, 4, 8, 4, 8], formats, block_tokens, draft, **_TINY)


def deepseek_v4_pro_tiny(
    *, formats: Mapping[str, str] | None = None, block_tokens: int = 32, draft: bool = True
) -> CacheSpec:
    """Five layers in V4-Pro's order: HCA, HCA, CSA, HCA, CSA."""
    return _v4("deepseek_v4_pro_tiny", [8, 8, 4, 8, 4], formats, block_tokens, draft, **_TINY)


def deepseek_v4_1_flash(
    *, formats: Mapping[str, str] | None = None, block_tokens: int = 256, draft: bool = True
) -> CacheSpec:
    """V4.1-Flash: 40 layers over four shared compressed pools (sources 2, 8, 14, 20) and three draft layers."""
    ratios = [0, 0, *[2] * 18, *[1] * 20]
    return _v41("deepseek_v4_1_flash", ratios, (2, 8, 14, 20), formats, block_tokens, 3 if draft else 0)


def deepseek_v4_1_flash_tiny(
    *, formats: Mapping[str, str] | None = None, block_tokens: int = 32, draft: bool = True
) -> CacheSpec:
    """Six layers: one window, two sharing a ratio-2 pool, three sharing a ratio-1 pool; one draft layer."""
    ratios = [0, 2, 2, 1, 1, 1]
    return _v41("deepseek_v4_1_flash_tiny", ratios, (1, 3), formats, block_tokens, 1 if draft else 0, **_TINY)


def classic(
    *,
    layers: int,
    key_heads: int,
    key_dim: int,
    value_heads: int | None = None,
    value_dim: int | None = None,
    window: int | None = None,
    full_every: int | None = None,
    key_format: str = "bf16",
    value_format: str | None = None,
    block_tokens: int = 256,
    name: str = "classic",
) -> CacheSpec:
    """A dense decoder: full attention, or sliding layers with every ``full_every``-th one full (Gemma, Mistral)."""
    full = KV(
        key_heads=key_heads,
        key_dim=key_dim,
        value_heads=value_heads,
        value_dim=value_dim,
        key_format=key_format,
        value_format=value_format,
    )
    if window is None:
        return CacheSpec(layers=(LayerSpec(kv=full),) * layers, block_tokens=block_tokens, name=name)
    sliding = KV(
        key_heads=key_heads,
        key_dim=key_dim,
        value_heads=value_heads,
        value_dim=value_dim,
        storage="ring",
        window=window,
        key_format=key_format,
        value_format=value_format,
    )
    kinds = [full if full_every and (number + 1) % full_every == 0 else sliding for number in range(layers)]
    return CacheSpec(layers=tuple(LayerSpec(kv=kind) for kind in kinds), block_tokens=block_tokens, name=name)


def llama_3_8b(*, key_format: str = "bf16", value_format: str | None = None, block_tokens: int = 256) -> CacheSpec:
    """Llama-3-8B: 32 full layers, 8 K-V heads of 128."""
    return classic(
        layers=32,
        key_heads=8,
        key_dim=128,
        key_format=key_format,
        value_format=value_format,
        block_tokens=block_tokens,
        name="llama_3_8b",
    )


def mistral_7b(*, key_format: str = "bf16", value_format: str | None = None, block_tokens: int = 256) -> CacheSpec:
    """Mistral-7B-v0.1: 32 sliding layers, window 4096, 8 K-V heads of 128."""
    return classic(
        layers=32,
        key_heads=8,
        key_dim=128,
        window=4096,
        key_format=key_format,
        value_format=value_format,
        block_tokens=block_tokens,
        name="mistral_7b",
    )


def gemma_3_1b(*, key_format: str = "bf16", value_format: str | None = None, block_tokens: int = 256) -> CacheSpec:
    """Gemma-3-1B: 26 layers, five sliding (window 512) to one full, one K-V head of 256."""
    return classic(
        layers=26,
        key_heads=1,
        key_dim=256,
        window=512,
        full_every=6,
        key_format=key_format,
        value_format=value_format,
        block_tokens=block_tokens,
        name="gemma_3_1b",
    )


def deepseek_v3_2(*, format: str = "v32_656", block_tokens: int = 64) -> CacheSpec:
    """DeepSeek-V3.2: 61 layers, one latent row a token (512 + 64 rotary channels) and an FP8 indexer key."""
    layer = LayerSpec(
        entries=Entries(dim=576, ratio=1, format=format),
        index_keys=IndexKeys(dim=128, ratio=1, heads=64, topk=2048, format="index_fp8_132_fp32scale"),
    )
    return CacheSpec(layers=(layer,) * 61, block_tokens=block_tokens, name="deepseek_v3_2")


def qwen3_next_80b(*, key_format: str = "bf16", state_format: str = "fp32", block_tokens: int = 256) -> CacheSpec:
    """Qwen3-Next-80B-A3B: 48 layers, three of gated delta nets (32 states of 128 × 128) to one with 2 heads of 256."""
    attends = LayerSpec(kv=KV(key_heads=2, key_dim=256, key_format=key_format))
    recurrent = LayerSpec(
        state=State(heads=32, key_dim=128, value_dim=128, format=state_format), conv=Conv(dim=8192, width=4)
    )
    layers = (recurrent, recurrent, recurrent, attends) * 12
    return CacheSpec(layers=layers, block_tokens=block_tokens, name="qwen3_next_80b")


def kimi_linear_48b(*, format: str = "bf16", state_format: str = "fp32", block_tokens: int = 256) -> CacheSpec:
    """Kimi-Linear-48B-A3B: 27 layers, 20 of delta attention (32 states of 128 × 128) and 7 with a latent row of 576."""
    attends = LayerSpec(entries=Entries(dim=576, ratio=1, format=format))
    recurrent = LayerSpec(
        state=State(heads=32, key_dim=128, value_dim=128, format=state_format), conv=Conv(dim=12288, width=4)
    )
    layers = tuple(attends if number in (3, 7, 11, 15, 19, 23, 26) else recurrent for number in range(27))
    return CacheSpec(layers=layers, block_tokens=block_tokens, name="kimi_linear_48b")


def jamba_v0_1(*, key_format: str = "bf16", state_format: str = "fp32", block_tokens: int = 256) -> CacheSpec:
    """Jamba-v0.1: 32 layers, seven of Mamba (8,192 states of 16) to one with 8 heads of 128."""
    attends = LayerSpec(kv=KV(key_heads=8, key_dim=128, key_format=key_format))
    recurrent = LayerSpec(state=State(heads=8192, key_dim=16, format=state_format), conv=Conv(dim=8192, width=4))
    layers = tuple(attends if number % 8 == 4 else recurrent for number in range(32))
    return CacheSpec(layers=layers, block_tokens=block_tokens, name="jamba_v0_1")


def nemotron_h_8b(*, key_format: str = "bf16", state_format: str = "fp32", block_tokens: int = 256) -> CacheSpec:
    """Nemotron-H-8B: 52 layers, 24 of Mamba-2 (128 states of 64 × 128), 4 with 8 heads of 128; 24 MLPs keep nothing."""
    kinds = {
        "*": LayerSpec(kv=KV(key_heads=8, key_dim=128, key_format=key_format)),
        "M": LayerSpec(
            state=State(heads=128, key_dim=64, value_dim=128, format=state_format), conv=Conv(dim=10240, width=4)
        ),
        "-": LayerSpec(),
    }
    pattern = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
    return CacheSpec(layers=tuple(kinds[letter] for letter in pattern), block_tokens=block_tokens, name="nemotron_h_8b")


def falcon_h1_7b(*, key_format: str = "bf16", state_format: str = "fp32", block_tokens: int = 256) -> CacheSpec:
    """Falcon-H1-7B: 44 layers, each with 24 states of 128 × 256 beside 2 heads of 128."""
    layer = LayerSpec(
        kv=KV(key_heads=2, key_dim=128, key_format=key_format),
        state=State(heads=24, key_dim=128, value_dim=256, format=state_format),
        conv=Conv(dim=3584, width=4),
    )
    return CacheSpec(layers=(layer,) * 44, block_tokens=block_tokens, name="falcon_h1_7b")


def lfm2_1_2b(*, key_format: str = "bf16", block_tokens: int = 256) -> CacheSpec:
    """LFM2-1.2B: 16 layers, 10 of a short convolution over three tokens and 6 with 8 heads of 64."""
    attends = LayerSpec(kv=KV(key_heads=8, key_dim=64, key_format=key_format))
    recurrent = LayerSpec(conv=Conv(dim=2048, width=3))
    layers = tuple(attends if number in (2, 5, 8, 10, 12, 14) else recurrent for number in range(16))
    return CacheSpec(layers=layers, block_tokens=block_tokens, name="lfm2_1_2b")


def qwen3_5_35b(*, key_format: str = "bf16", state_format: str = "fp32", block_tokens: int = 256) -> CacheSpec:
    """Qwen3.5-35B-A3B: 40 layers of Qwen3-Next's kinds and sizes."""
    layers = qwen3_next_80b(key_format=key_format, state_format=state_format).layers[:40]
    return CacheSpec(layers=layers, block_tokens=block_tokens, name="qwen3_5_35b")


PRESETS = {
    preset.__name__: preset
    for preset in (
        deepseek_v4_flash,
        deepseek_v4_flash_tiny,
        deepseek_v4_pro,
        deepseek_v4_pro_tiny,
        deepseek_v4_1_flash,
        deepseek_v4_1_flash_tiny,
        deepseek_v3_2,
        llama_3_8b,
        mistral_7b,
        gemma_3_1b,
        qwen3_next_80b,
        kimi_linear_48b,
        jamba_v0_1,
        nemotron_h_8b,
        falcon_h1_7b,
        lfm2_1_2b,
        qwen3_5_35b,
    )
}
"""Presets that need no arguments, by name: what the command line offers."""

_TINY = {"window": 8, "index_heads": 4, "index_topk": 4}


def _v4(
    name: str, ratios: list[int], formats: Mapping[str, str] | None, block_tokens: int, draft: bool, **sizes: int
) -> CacheSpec:
    chosen = _formats(formats, V4_FORMATS)
    # The smallest ratio of a V4 schedule is the overlapping, indexed one (CSA); larger ones are HCA.
    overlapping = min(ratio for ratio in ratios if ratio)
    layers = tuple(v4_layer(ratio, overlap=ratio == overlapping, formats=chosen, **sizes) for ratio in ratios)
    drafts = (v4_layer(0, overlap=False, formats=chosen, **sizes),) if draft else ()
    return CacheSpec(layers=layers, draft_layers=drafts, block_tokens=block_tokens, name=name)


def _v41(
    name: str,
    ratios: list[int],
    sources: tuple[int, ...],
    formats: Mapping[str, str] | None,
    block_tokens: int,
    drafts: int,
    **sizes: int,
) -> CacheSpec:
    chosen = _formats(formats, V41_FORMATS)
    layers = [
        v41_layer(ratio, number, sources, formats=chosen, **sizes)
        for number, ratio in enumerate([*ratios, *[0] * drafts])
    ]
    count = len(ratios)
    return CacheSpec(
        layers=tuple(layers[:count]), draft_layers=tuple(layers[count:]), block_tokens=block_tokens, name=name
    )


def _formats(given: Mapping[str, str] | None, defaults: dict[str, str]) -> dict[str, str]:
    for role in given or {}:
        if role not in defaults:
            raise SpecError(got=role, where="formats", allowed=", ".join(defaults))
    return {**defaults, **(given or {})}
