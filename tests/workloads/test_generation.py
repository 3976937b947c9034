"""Generation over fixed calls: the same tokens as transformers, whatever the batch, the padding and the lengths."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folders import VOCABULARY, causal, eval_text, save
from torchwright.core.errors import WorkloadError
from torchwright.workloads.generation import Generator, Geometry, call, new_cache, sample
from torchwright.workloads.language import LanguageWorkload

CHUNK = 16
NEW = 20
KINDS = {
    "Llama": {},
    "Llama tied, no grouping": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "Llama head_dim": {"head_dim": 12},
    "Mistral": {"sliding_window": 7},
    "Mistral without a window": {"sliding_window": None},
    "Qwen2": {},
    "Qwen2 mixed": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": {"head_dim": 8},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return eval_text(tmp_path_factory.mktemp("text") / "eval.txt")


@pytest.fixture(scope="module")
def make(tmp_path_factory, text):
    """(model of transformers, generator over the same weights), by kind and batch."""
    models = {}

    def make(kind: str, batch: int):
        if kind not in models:
            folder = tmp_path_factory.mktemp("model")
            models[kind] = save(causal(kind.split()[0], **KINDS[kind]), folder)
        folder = models[kind]
        workload = LanguageWorkload(folder, batch=batch, prompt_tokens=CHUNK, new_tokens=44, eval_text=text)
        original = workload.build()
        adapted = workload.adapt(original)
        workload.check_adapted(original, adapted)
        run = lambda case: adapted(*case.args)
        return original, Generator(run, workload.geometry, torch.float32, folder)

    return make


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


def prompt(length: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(5, VOCABULARY, (length,), generator=random).tolist()


def greedy(model, ids: list[int], new: int, eos: tuple[int, ...] = (2,)) -> list[int]:
    """transformers' own greedy continuation of one prompt alone, without the end-of-text token."""
    tensor = torch.tensor([ids])
    output = model.generate(
        tensor,
        attention_mask=torch.ones_like(tensor),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=list(eos),
        pad_token_id=0,
    )
    tokens = output[0, len(ids) :].tolist()
    return tokens[: next((i for i, token in enumerate(tokens) if token in eos), len(tokens))]


@pytest.mark.plain("Llama tied, no grouping", "Qwen2")
@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batches_give_what_transformers_gives_for_each_prompt_alone(kind, make):
    model, generator = make(kind, 3)
    prompts = [prompt(n) for n in (1, 5, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 30, 7)]
    expected = [greedy(model, ids, NEW) for ids in prompts]
    assert len({tuple(tokens) for tokens in expected}) > 3
    assert generator.generate(prompts, max_new_tokens=NEW) == expected


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2 mixed"])
def test_logits_of_whole_sequences(kind, make):
    model, generator = make(kind, 2)
    ids_BT = torch.tensor([prompt(37, seed) for seed in range(3)])
    torch.testing.assert_close(generator(ids_BT), model(ids_BT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.inference_mode()
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    batch=st.integers(1, 4),
)
@settings(max_examples=10, deadline=None)
def test_company_in_the_batch_changes_no_answer(make, lengths, seed, batch):
    _, alone = make("Llama", 1)
    _, together = make("Llama", batch)
    prompts = [prompt(n, seed + i) for i, n in enumerate(lengths)]
    expected = [alone.generate(ids, max_new_tokens=5) for ids in prompts]
    assert together.generate(prompts, max_new_tokens=5) == expected


@torch.inference_mode()
def test_end_of_text_ends_a_row_and_is_left_out(make):
    model, generator = make("Llama", 2)
    free = greedy(model, prompt(5), NEW)
    stop = free[3]
    generator.geometry = dataclasses.replace(generator.geometry, eos=(stop,))
    seen = []
    answers = generator.generate(
        [prompt(5), prompt(9)], max_new_tokens=NEW, on_token=lambda row, token: seen.append((row, token))
    )
    assert answers[0] == free[: free.index(stop)]
    assert answers[1] == greedy(model, prompt(9), NEW, (stop,))
    assert [[token for row, token in seen if row == i] for i in (0, 1)] == answers


@pytest.mark.usefixtures("inference")
class TestForms:
    def test_ids_or_texts_one_or_many(self, make):
        _, generator = make("Llama", 2)
        one = generator.generate(prompt(5), max_new_tokens=3)
        assert generator.generate([prompt(5)], max_new_tokens=3) == [one]
        assert len(one) == 3
        text = generator.generate("once", max_new_tokens=3)
        assert isinstance(text, str)
        assert generator.generate(["once", "upon a time"], max_new_tokens=3)[0] == text

    def test_texts_begin_with_one_begin_token(self, make):
        _, generator = make("Llama", 1)
        ids = generator.encode("ab")
        assert ids.count(1) == 1 == ids[0]
        assert generator.decode(ids) == "ab"

    def test_no_new_tokens(self, make):
        _, generator = make("Llama", 1)
        assert generator.generate(prompt(5), max_new_tokens=0) == []

    def test_a_tensor_of_ids(self, make):
        _, generator = make("Llama", 1)
        assert generator.generate(torch.tensor(prompt(5)), max_new_tokens=3) == generator.generate(
            prompt(5), max_new_tokens=3
        )


@pytest.mark.usefixtures("inference")
class TestSampling:
    def test_a_seed_repeats_and_another_differs(self, make):
        _, generator = make("Llama", 2)
        prompts = [prompt(5), prompt(8)]
        one = generator.generate(prompts, max_new_tokens=12, temperature=5.0, seed=1)
        assert one == generator.generate(prompts, max_new_tokens=12, temperature=5.0, seed=1)
        assert one != generator.generate(prompts, max_new_tokens=12, temperature=5.0, seed=2)

    def test_frequencies_are_the_softmax(self):
        logits_BV = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20_000, 1)
        drawn = sample(logits_BV, 2.0, [torch.Generator().manual_seed(0)] * 20_000)
        expected = torch.softmax(torch.tensor([0.0, 0.5, 1.0]), 0)
        # Four standard errors of 20,000 draws are 1.4%.
        torch.testing.assert_close(torch.bincount(drawn) / 20_000, expected, rtol=0, atol=0.014)

    def test_zero_is_the_most_likely(self):
        assert sample(torch.tensor([[0.0, 3.0, 1.0]]), 0, []).tolist() == [1]

    def test_company_changes_no_draw(self, make):
        _, generator = make("Llama", 2)
        alone = generator.generate(prompt(5), max_new_tokens=12, temperature=3.0)
        assert generator.generate([prompt(5), prompt(20)], max_new_tokens=12, temperature=3.0)[0] == alone


class TestBadInput:
    @pytest.fixture
    def generator(self, make):
        return make("Llama", 2)[1]

    def test_nothing(self, generator):
        with pytest.raises(WorkloadError, match="there is no prompt"):
            generator.generate([])
        with pytest.raises(WorkloadError, match="the prompt is empty"):
            generator.generate([prompt(3), []])

    @pytest.mark.parametrize("token", [-1, VOCABULARY, 10**9])
    def test_ids_out_of_range(self, generator, token):
        with pytest.raises(WorkloadError, match=rf"token id {token} is out of range.*0 to {VOCABULARY - 1}"):
            generator.generate([[5, token]])
        with pytest.raises(WorkloadError, match="out of range"):
            generator(torch.tensor([[5, token]]))

    @pytest.mark.parametrize(("length", "new"), [(65, 1), (10, 49), (49, 1), (48, 17)])
    def test_what_does_not_fit_the_cache(self, generator, length, new):
        assert generator.geometry.slots == 64
        with pytest.raises(WorkloadError, match=r"do not fit.*the cache holds 64.*--prompt-tokens"):
            generator.generate(prompt(length), max_new_tokens=new)

    @torch.inference_mode()
    def test_what_just_fits(self, generator):
        assert len(generator.generate(prompt(48), max_new_tokens=16)) == 16

    def test_a_negative_count_or_temperature(self, generator):
        with pytest.raises(WorkloadError, match="temperature -1"):
            generator.generate(prompt(3), temperature=-1)
        with pytest.raises(WorkloadError, match="max_new_tokens -1"):
            generator.generate(prompt(3), max_new_tokens=-1)
        with pytest.raises(WorkloadError, match="temperature nan"):
            generator.generate(prompt(3), temperature=math.nan)

    @pytest.mark.parametrize("prompts", [5, None, [None], [1.5], ["a", [1]], [[1], "a"], [[1.5]], [[True]]])
    def test_forms_that_are_none(self, generator, prompts):
        with pytest.raises(WorkloadError, match="a text, a list of token ids, or a list of either"):
            generator.generate(prompts)

    def test_a_sequence_of_the_wrong_shape(self, generator):
        with pytest.raises(WorkloadError, match=r"token ids \(B, T\)"):
            generator(torch.tensor([1, 2, 3]))
        with pytest.raises(WorkloadError, match=r"token ids \(B, T\)"):
            generator(torch.zeros(0, 3, dtype=torch.long))

    def test_text_without_a_tokenizer(self, generator, tmp_path):
        bare = Generator(generator._run, generator.geometry, torch.float32, tmp_path)
        with pytest.raises(WorkloadError, match=r"no tokenizer\.json.*token ids instead"):
            bare.generate("text")


GEOMETRY = Geometry(
    layers=1,
    kv_heads=1,
    head_dim=2,
    vocabulary=9,
    batch=2,
    chunk=4,
    slots=12,
    context=12,
    windows=(0, 3),
    eos=(2,),
    bos=1,
)


@given(start=st.integers(0, 8), padding=st.lists(st.integers(0, 12), min_size=2, max_size=2))
def test_masks_against_their_definition(start, padding):
    ids_BT = torch.zeros(2, 4, dtype=torch.long)
    case = call("prefill", GEOMETRY, ids_BT, start, [], padding_B=torch.tensor(padding))
    _, positions_BT, slots_T, keep_K, (full, window), _ = case.args
    assert slots_T.tolist() == [start, start + 1, start + 2, start + 3]
    assert keep_K.tolist() == [3]
    for b in range(2):
        for t in range(4):
            query = start + t
            assert positions_BT[b, t] == max(query - padding[b], 0)
            seen = [key for key in range(12) if key == query or padding[b] <= key <= query]
            assert full[b, 0, t].nonzero().flatten().tolist() == seen
            near = [key for key in seen if query - key < 3]
            assert window[b, 0, t].nonzero().flatten().tolist() == near


def test_geometry_round_trip_through_json():
    import json

    assert Geometry.from_dict(json.loads(json.dumps(GEOMETRY.as_dict()))) == GEOMETRY


def test_cache_layout():
    cache = new_cache(GEOMETRY, torch.bfloat16)
    assert len(cache) == 2
    assert {tensor.shape for tensor in cache} == {(2, 1, 12, 2)}
    assert {tensor.dtype for tensor in cache} == {torch.bfloat16}
    assert cache[0].data_ptr() != cache[1].data_ptr()
