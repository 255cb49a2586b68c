"""Compiled code in which the cache attends: one operator a layer, one graph for all lengths, nothing that waits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, CompileConfig, DynamicCache
from transformers.masking_utils import create_masks_for_generate
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from kvcore.errors import StepError
from kvcore.interop.transformers import KVCache, attention, compiled, masked, ways
from kvcore.interop.transformers.latent import StaticMlaLayer
from kvcore.interop.transformers.layers import StaticLayer
from kvcore.ops import Attention
from tests.interop.test_attention import ROWS, expansions, gemma2
from tests.interop.test_latent_attention import doubled
from tests.interop.test_models import generated, prompts
from tests.support import tiny_models as models

PROMPT, TOKENS = 6, 20
OPERATORS = {"attended", "attended_latents", "stored_keys_and_values"}


class Traced:
    """A model compiled without being optimised, and its graphs."""

    def __init__(self, model):
        self.model, self.graphs = model, []
        self.run = models.traced(model, self.graphs)

    @property
    def operators(self):
        """kvcore's operators in the only graph, those for positions left out."""
        graph, *more = self.graphs
        assert not more
        names = [str(node.target).split(".")[1] for node in graph.graph.nodes if "kvcore." in str(node.target)]
        return [name for name in names if name in OPERATORS]

    def logits(self, cache, mask=None, *, made_outside=False):
        """Of a prompt that runs as it is, then of one token after the other in compiled code.

        ``made_outside``: masks are made outside of it, as ``generate`` does.
        """
        ids, pieces = models.token_ids(ROWS, TOKENS), []
        with torch.no_grad():
            for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, TOKENS))]:
                run = self.run if start else self.model
                # As wide as the cache: of a mask that grows PyTorch makes a graph each.
                seen = {} if mask is None else {"attention_mask": torch.nn.functional.pad(mask, (0, 4), value=1)}
                if made_outside:
                    embedded = self.model.get_input_embeddings()(ids[:, start:end])
                    seen = {"attention_mask": create_masks_for_generate(self.model.config, embedded, mask, cache)}
                pieces.append(run(ids[:, start:end], cache=cache, **seen).logits)
        assert not compiled.NOTED
        assert not compiled.ATTENDING
        return torch.cat(pieces, dim=1)


def static(model, asked="cache", **options):
    return KVCache(model, batch=ROWS, max_length=24, static=True, attention=asked, **options)


def own(model, mask=None):
    with torch.no_grad():
        return model(
            models.token_ids(ROWS, TOKENS), attention_mask=mask, cache=DynamicCache(config=model.config)
        ).logits


# With sliding layers, a mask of padding is made outside of compiled code, as ``generate`` does.
MAKES = [(models.llama, 3), (models.gemma3, 0), (models.deepseek_v3, 3)]


@pytest.mark.parametrize(("make", "left"), MAKES)
def test_one_graph_attends_for_every_length(make, left):
    model, mask = make(), torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[0, :left] = 0
    if make is models.deepseek_v3:
        mask[0, left + 1] = 0  # latents take any mask
    traced, cache, implementation = Traced(model), static(model), model.config._attn_implementation
    found, wanted = traced.logits(cache, mask if left else None), own(model, mask)
    assert torch.allclose(found[mask.bool()], wanted[mask.bool()], atol=3e-5)
    assert traced.operators == ["attended_latents" if make is models.deepseek_v3 else "attended"] * 3
    assert model.config._attn_implementation == implementation
    assert cache.length == TOKENS
    assert {choice.implementation for choice in cache.explain() if "one" in choice.verb} == {"cache"}


@pytest.mark.parametrize(("make", "left"), [*MAKES, (models.gpt_oss, 0)])
def test_a_graph_of_launches_alone(make, left):
    """As on a GPU: what Python does in a step it does before the first layer and after the last."""
    model, mask = make(), torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[0, :left] = 0
    latent = make is models.deepseek_v3
    if latent:
        mask[0, left + 1] = 0
    traced, cache = Traced(model), static(model)
    assert not cache.captures
    cache.captures = True
    found, wanted = traced.logits(cache, mask if left else None), own(model, mask)
    assert torch.allclose(found[mask.bool()], wanted[mask.bool()], atol=3e-5)
    (graph,) = traced.graphs
    names = [str(node.target).split(".")[1] for node in graph.graph.nodes if "kvcore." in str(node.target)]
    seen = [name for name in names if name != "looked"]
    assert seen == ["begun", *["latents_captured" if latent else "attended_captured"] * 3, "ended"]
    # Once for all layers of a window; latents take any mask of True and False.
    assert names.count("looked") == (0 if latent else 2 if make in (models.gemma3, models.gpt_oss) else 1)
    assert cache.length == TOKENS


def test_a_graph_that_fails_leaves_its_step_open(monkeypatch):
    model, ids = models.llama(), models.token_ids(ROWS, TOKENS)
    traced, cache = Traced(model), static(model)
    cache.captures = True
    wanted = traced.logits(cache)
    cache.crop(-1)
    attend = StaticLayer.captured_and_attended

    def fail(self, *given):
        if self.number == 1:
            raise RuntimeError("in between")
        return attend(self, *given)

    with torch.no_grad():
        monkeypatch.setattr(StaticLayer, "captured_and_attended", fail)
        with pytest.raises(RuntimeError, match="in between"):
            traced.run(ids[:, -1:], cache=cache)
        monkeypatch.undo()
        with pytest.raises(StepError, match="while a forward is open"):
            traced.run(ids[:, -1:], cache=cache)
        cache.abort()
        assert cache.length == TOKENS - 1
        assert torch.equal(traced.run(ids[:, -1:], cache=cache).logits, wanted[:, -1:])
    assert cache.length == TOKENS


def test_a_model_that_attends_itself_ends_the_step_as_well():
    model = gemma2()
    traced, cache = Traced(model), static(model)
    cache.captures = True
    assert torch.allclose(traced.logits(cache), own(model), atol=3e-5)
    assert cache.length == TOKENS


@pytest.mark.parametrize("make", [models.gpt_oss, models.deepseek_v3])
def test_generate(make):
    model, (ids, mask) = make(), prompts("greedy")
    traced = Traced(model)
    config = CompileConfig(fullgraph=True, mode=None, backend=models.keeping(traced.graphs))
    config._compile_all_devices = True  # generate compiles by itself on accelerators only
    cache = KVCache(model, batch=len(ids), max_length=40, static=True, attention="cache")
    assert torch.equal(generated(model, ids, mask), generated(model, ids, mask, cache, compile_config=config))
    assert len(traced.operators) == 3


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("make", "attention"),
    [
        *((make, name) for make in (models.llama, models.deepseek_v3, models.gemma3) for name in ("sdpa", "eager")),
        (models.gpt_oss, "eager"),  # it has no sdpa
    ],
)
def test_masks_with_holes(make, attention):
    """Rows that see something else than one run get what the model's own attention gives, and ``explain`` says so."""
    model, mask = make(), torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[0, 2] = 0
    mask[1] = 0  # sees nothing: not even itself
    model.set_attn_implementation(attention)
    found, cache = Traced(model), static(model, "auto")
    logits = found.logits(cache, mask, made_outside=True)
    assert found.operators == ["attended_latents" if make is models.deepseek_v3 else "attended"] * 3
    reasons = {choice.reason for choice in cache.explain() if "last forward" in choice.verb}
    assert reasons == {masked.REASON}
    wanted = Traced(model).logits(static(model, "model"), mask, made_outside=True)
    assert torch.allclose(logits, wanted, atol=3e-5)


def test_explain_is_of_the_last_forward():
    model, mask, ids = models.llama(), torch.ones(ROWS, 24, dtype=torch.int64), models.token_ids(ROWS, 1)
    traced, cache = Traced(model), static(model, "auto")
    with torch.no_grad():
        for hole in (True, False):
            mask[0, 2] = not hole
            traced.logits(cache)
            cache.crop(PROMPT - TOKENS)
            traced.run(ids, cache=cache, attention_mask=mask)
            assert any("last forward" in choice.verb for choice in cache.explain()) == hole
            cache.reset()


def test_masks_that_add_to_scores():
    """Latent rows that a mask of summands shows, with something added to their scores."""
    model, mask = models.deepseek_v3(), torch.zeros(ROWS, 1, 1, 24)
    mask[0, ..., 2] = -1.5
    mask[..., TOKENS + 1 :] = torch.finfo(mask.dtype).min
    found = []
    for asked in ("auto", "model"):
        traced, cache = Traced(model), static(model, asked)
        traced.logits(cache)
        with torch.no_grad():
            found.append(traced.run(models.token_ids(ROWS, 1), cache=cache, attention_mask=mask).logits)
    assert torch.allclose(*found, atol=3e-5)
    assert not torch.allclose(found[0][0], found[0][1])


@pytest.mark.parametrize("make", [models.llama, models.deepseek_v3])
def test_a_graph_refuses_what_it_was_not_made_for(make):
    """As on a GPU: the step's end asks what its beginning has looked at, and the forward leaves no trace."""
    model, ids = make(), models.token_ids(ROWS, TOKENS)
    traced, cache = Traced(model), static(model)
    cache.captures = True
    wanted = traced.logits(cache)
    cache.crop(-1)
    if make is models.llama:
        mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
        mask[0, 2] = 0
    else:
        mask = torch.zeros(ROWS, 1, 1, 24)
        mask[0, ..., 2] = -1.5
        mask[..., TOKENS:] = torch.finfo(mask.dtype).min
    with torch.no_grad():
        with pytest.raises(StepError, match="padding at the left"):
            traced.run(ids[:, -1:], cache=cache, attention_mask=mask)
        assert cache.length == TOKENS - 1
        assert torch.equal(traced.run(ids[:, -1:], cache=cache).logits, wanted[:, -1:])
    assert cache.length == TOKENS


class Unasking(LlamaAttention):
    """An attention module that calls one function, whatever the configuration names."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **_):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, _ = eager_attention_forward(self, query, key, value, attention_mask, self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


@pytest.mark.parametrize("asked", ["auto", "cache"])
def test_a_module_that_asks_no_registry_attends_itself(asked):
    model = models.llama()
    model.set_attn_implementation("eager")
    model.model.layers[1].self_attn.__class__ = Unasking
    traced, cache = Traced(model), static(model, asked)
    assert torch.allclose(traced.logits(cache), own(model), atol=3e-5)
    assert traced.operators == ["attended", "stored_keys_and_values", "attended"]
    (choice,) = [choice for choice in cache.explain() if choice.layer == 1 and "one" in choice.verb]
    assert (choice.implementation, choice.reason) == ("model", ways.NOT_ASKING)


@pytest.mark.parametrize("backend", ["torch_triton", "reference"])
def test_auto_is_by_the_table(backend):
    cache = static(models.llama(), "auto", backend=backend)
    ones = [choice for choice in cache.explain() if "one" in choice.verb]
    assert {choice.implementation for choice in ones} == {"cache" if backend == "torch_triton" else "model"}
    if backend == "torch_triton":
        coded = static(models.llama(), "auto", formats="int8_row").explain()[0]
        assert ones[0].reason.endswith(ways.COMPILED_MEASURED[True])
        assert coded.reason.endswith(ways.COMPILED_MEASURED[False])


def test_what_the_cache_cannot_attend_to_is_the_models():
    model = gemma2()
    traced = Traced(model)
    assert torch.allclose(traced.logits(static(model)), own(model), atol=3e-5)
    assert traced.operators == ["stored_keys_and_values"] * 3


def test_a_projection_of_another_kind_is_the_models():
    model = models.deepseek_v3()
    for module in expansions(model):
        doubled(module)
    traced, cache = Traced(model), static(model)
    assert torch.allclose(traced.logits(cache), own(model), atol=3e-5)
    assert traced.operators == ["stored_keys_and_values"] * 3
    assert {choice.reason for choice in cache.explain() if "one" in choice.verb} == {
        "a key and value projection that is no plain linear layer, or has hooks"
    }


def test_another_attention_function_is_not_handed_the_new_rows_alone():
    model = models.llama()

    def other(module, query, keys, values, _, **options):
        return attention.model_attention(module, "sdpa")(module, query, keys, values, None, **options)

    AttentionInterface.register("kvcore", other)
    try:
        with pytest.raises(Exception, match="another attention function"):
            Traced(model).logits(static(model))
    finally:
        AttentionInterface.register("kvcore", attention.attend)
        torch.compiler.reset()
        compiled.NOTED.clear()
        compiled.ATTENDING.clear()


class Watched(TorchDispatchMode):
    """Whoever asks for a tensor's numbers fails: on a GPU the host would wait, and a graph could not be captured."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.WAITS, name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [models.llama, models.deepseek_v3])
def test_nothing_waits_and_nothing_moves(make, monkeypatch):
    """What is around a backend's verbs reads no number of a tensor, and the pools stay where they are."""
    model = make()
    traced, cache = Traced(model), static(model)
    cache.captures = True  # as on a GPU
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[0, :3] = 0
    traced.logits(cache, mask)
    assert len(traced.graphs) == 1
    places = {name: pool.data_ptr() for name, pool in cache.kv.pools.items()}
    # On the CPU the verbs themselves look at numbers.
    verbs, calls = type(cache.kv._state.ops), []

    def attended(_, pools, layer, __, q, *___, **____):
        calls.append({name: pools[name].data_ptr() for name in pools} == places)
        ((_, component),) = cache.kv.spec.layers[layer].components()
        return Attention(q.new_zeros(*q.shape[:2], component.parts[-1].format.dim), q)

    monkeypatch.setattr(verbs, "attend_kv", attended)
    monkeypatch.setattr(verbs, "attend", attended)
    monkeypatch.setattr(verbs, "append_kv", lambda _, pools, *__, **___: pools)
    monkeypatch.setattr(verbs, "store_entries", lambda _, pools, *__, **___: pools)
    for kind in (StaticLayer, StaticMlaLayer):
        run = kind.captured_and_attended

        def watched(*given, run=run):
            with Watched():
                return run(*given)

        monkeypatch.setattr(kind, "captured_and_attended", watched)
    ids, wide = models.token_ids(ROWS, 3), torch.nn.functional.pad(mask, (0, 4), value=1)
    with torch.no_grad():
        for at in range(3):
            traced.run(ids[:, at : at + 1], attention_mask=wide, cache=cache)
    assert calls == [True] * 9
