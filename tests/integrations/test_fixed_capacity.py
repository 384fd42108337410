"""Decoding under torch.compile: the text of the eager cache, one graph, constant bytes."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch

from centroidkv import Budget, Compressor, presets
from centroidkv.errors import BackendError, BudgetError, CacheError
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.integrations.transformers.release import STOCK_TAKES_BIAS
from centroidkv.preserve import Recent, Sinks

transformers = pytest.importorskip("transformers")
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),
    pytest.mark.skipif(
        not STOCK_TAKES_BIAS or RELEASE < (5, 24), reason="fixed capacity needs the keyword arguments of 5.24"
    ),
]

SMALL = Compressor.builder().preserve(Sinks(4), Recent(16)).budget(Budget.tokens(64)).build()
INTERVAL = 32


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


def fixed(**options):
    return CentroidCache(SMALL, INTERVAL, capacity="fixed", **options)


def generate(model, ids, cache, new=200, mask=None, backend=None, **options):
    """Greedy text; with a back end, decoding steps compiled by generate itself as one graph each (fullgraph)."""
    if backend is not None:
        options["compile_config"] = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True)
        options["compile_config"]._compile_all_devices = True  # generate compiles on GPUs only, unless told
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, do_sample=False, **options
    )
    return out[:, ids.shape[1] :]


class NoRecompilation(transformers.LogitsProcessor):
    """From the third step on a recompilation is an error; notes the cache's bytes on the way."""

    def __init__(self, cache):
        self.cache, self.calls, self.bytes = cache, 0, set()

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls > 2:  # the prompt's logits, those of the first step, ...
            torch._dynamo.config.error_on_recompile = True
        self.bytes.add(sum(layer.growing.nbytes for layer in self.cache.layers))
        return scores


def compiled_text(model, ids, cache, backend, **options):
    watch = NoRecompilation(cache)
    text = generate(model, ids, cache, backend=backend, logits_processor=[watch], **options)
    assert watch.calls == text.shape[1]
    assert len(watch.bytes) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    return text


@pytest.mark.parametrize(
    ("attention", "enabled", "backend"),
    [
        ("sdpa", True, "eager"),
        pytest.param("sdpa", False, "eager", marks=pytest.mark.slow),
        pytest.param("eager", True, "eager", marks=pytest.mark.slow),
        pytest.param("sdpa", True, "aot_eager", marks=pytest.mark.slow),
        pytest.param("sdpa", False, "aot_eager", marks=pytest.mark.slow),
        pytest.param(
            *("sdpa", True, "inductor"),
            marks=[pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a compiler")],
        ),
    ],
)
def test_compiled_generate_writes_the_text_of_the_eager_cache(llama, prompt, attention, enabled, backend):
    model, ids = llama(attention), prompt(150)
    with enable(model) if enabled else contextlib.nullcontext():
        expected = generate(model, ids, growing := CentroidCache(SMALL, INTERVAL))
        text = compiled_text(model, ids, cache := fixed(), backend)
    assert torch.equal(text, expected)
    a, b = cache.stats(), growing.stats()
    assert b.events >= 3
    assert (a.events, a.rounds, a.logical, a.physical, a.merged) == (
        *(b.events, b.rounds, b.logical, b.physical, b.merged),
    )


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_left_padded_batch_is_compiled_too(llama, prompt, attention):
    model, ids = llama(attention), prompt(150, 2)
    mask = torch.ones_like(ids)
    mask[1, :90] = 0
    with enable(model):
        expected = generate(model, ids, CentroidCache(SMALL, INTERVAL), mask=mask)
        assert torch.equal(compiled_text(model, ids, fixed(), "eager", mask=mask), expected)
        alone = generate(model, ids[1:, 90:], fixed())
    assert torch.equal(alone, expected[1:])


@pytest.mark.parametrize(
    "length", [pytest.param(1, marks=pytest.mark.slow), 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 65))]
)
def test_short_prompts_fill_the_buffers_first(llama, prompt, length):
    model, ids = llama(), prompt(length)
    with enable(model):
        expected = generate(model, ids, CentroidCache(SMALL, INTERVAL))
        assert torch.equal(generate(model, ids, fixed()), expected)
        assert torch.equal(compiled_text(model, ids, fixed(), "eager"), expected)


@pytest.mark.parametrize("preset", ["distinctive", "streaming_llm", "knorm", "keydiff"])
def test_presets_without_the_compiler(llama, prompt, preset):
    model, ids, small = llama(), prompt(150), presets.ALL[preset](Budget.tokens(96))
    expected = generate(model, ids, CentroidCache(small, 16), new=100)
    assert torch.equal(generate(model, ids, CentroidCache(small, 16, capacity="fixed"), new=100), expected)


def test_a_second_turn_and_a_second_sequence_use_the_same_graph(llama, prompt):
    model, ids, more = llama(), prompt(150), prompt(40)
    growing, cache = CentroidCache(SMALL, INTERVAL), fixed()
    with enable(model):
        for each, backend in ((growing, None), (cache, "eager")):
            first = generate(model, ids, each, new=50, backend=backend)
            whole = torch.cat((ids, first, more), 1)
            each.second = generate(model, whole, each, new=50, backend=backend)
        assert torch.equal(cache.second, growing.second)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", [None, pytest.param("eager", marks=pytest.mark.slow)])
def test_beam_search(llama, prompt, backend):
    model, ids = llama(), prompt(150)
    with enable(model):
        expected = generate(model, ids, CentroidCache(SMALL, INTERVAL), new=80, num_beams=3)
        assert torch.equal(generate(model, ids, fixed(), new=80, num_beams=3, backend=backend), expected)


@pytest.mark.parametrize("enabled", [True, pytest.param(False, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_loop_compiled_by_hand_breaks_its_graph_but_does_not_recompile(llama, prompt, enabled):
    model, ids, new = llama(), prompt(150), 110
    with enable(model) if enabled else contextlib.nullcontext():
        expected = generate(model, ids, CentroidCache(SMALL, INTERVAL), new=new)
        cache, compiled, text = fixed(), torch.compile(model.forward, backend="eager"), []
        logits = model(ids, past_key_values=cache).logits
        for step in range(new):
            text.append(logits[:, -1:].argmax(-1))
            torch._dynamo.config.error_on_recompile = step >= 2
            logits = compiled(text[-1], past_key_values=cache).logits
    assert torch.equal(torch.cat(text, -1), expected)
    assert cache.stats().events >= 3


@torch.no_grad()
def test_a_compiled_step_that_hides_from_the_cache_is_refused(llama, prompt):
    model, ids = llama(), prompt(150)
    with enable(model):
        cache, compiled = fixed(), torch.compile(model.forward, backend="eager")
        model(ids, past_key_values=cache)
        mask = torch.ones(1, 1, 1, 64 + INTERVAL, dtype=torch.bool)

        def step(number):
            position = torch.tensor([[150 + number]])
            compiled(ids[:, :1], past_key_values=cache, attention_mask=mask, position_ids=position)

        for number in range(INTERVAL):
            step(number)
        with pytest.raises(RuntimeError, match="all 96 slots are taken"):
            step(INTERVAL)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_prompt_is_processed_outside_the_graph(llama, prompt):
    model, ids = llama(), prompt(100)
    with enable(model):
        plain = model(ids, past_key_values=fixed()).logits
        compiled = torch.compile(model.forward, backend="eager")
        assert torch.allclose(compiled(ids, past_key_values=fixed()).logits, plain, atol=1e-5)


def test_what_is_refused_says_so(llama, prompt):
    model, ids = llama(), prompt(100, 2)
    with pytest.raises(BudgetError, match=r"Budget\.ratio"):
        CentroidCache(presets.centroidkv(0.25), capacity="fixed")
    with pytest.raises(CacheError, match=r"equally large.*MiddleLayers"):
        CentroidCache(presets.balanced(Budget.tokens(256)), capacity="fixed")
    with pytest.raises(CacheError, match="'growing' or 'fixed'"):
        CentroidCache(SMALL, capacity="static")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with pytest.raises(BackendError, match=r"padded.*enable"):
        generate(model, ids, fixed(), mask=mask)
    with pytest.raises(BackendError, match=r"'eager'.*enable"):
        generate(llama("eager"), ids, fixed())
    hybrid = transformers.Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(CacheError, match="sliding window"):
        fixed(config=hybrid)


def test_generate_does_not_compile_a_growing_cache(llama, prompt):
    model, ids = llama(), prompt(150)
    assert not CentroidCache(SMALL).is_compileable
    with enable(model):
        expected = generate(model, ids, CentroidCache(SMALL, INTERVAL), new=4)
        text = generate(model, ids, CentroidCache(SMALL, INTERVAL), new=4, backend="eager")
    assert torch.equal(text, expected)
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("use", [True, False], ids=["enable", "stock"])
def test_a_single_token_with_a_mask_of_its_own_is_refused_and_nothing_is_lost(llama, prompt, use):
    """Slots answer to their degrees alone in such a step, so what a mask hides would be seen all the same."""
    model, cache, ids = llama(), fixed(), prompt(100)
    with torch.no_grad(), enable(model) if use else contextlib.nullcontext():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        before = cache.stats()
        for changed in (0, 50, -1):
            mask = torch.ones(1, 102, dtype=torch.long)
            mask[:, changed] = 0
            with pytest.raises(CacheError, match="mask hides"):
                model(ids[:, :1], attention_mask=mask, past_key_values=cache)
            by_slot = torch.ones(1, 1, 1, cache.layers[0].growing.capacity, dtype=torch.bool)
            by_slot[..., min(changed, 40) if changed >= 0 else cache.layers[0].growing.physical] = False
            for own in (mask.bool()[:, None, None], by_slot):
                with pytest.raises(CacheError, match="4-D attention mask"):
                    model(ids[:, :1], attention_mask=own, position_ids=torch.tensor([[101]]), past_key_values=cache)
        assert cache.stats() == before
        model(ids[:, :1], attention_mask=torch.ones(1, 102, dtype=torch.long), past_key_values=cache)
        assert cache.stats().logical == 102
