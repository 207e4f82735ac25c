"""What the engine promises: no trace of batch mates, chunks, pages or preemption; bad input leaves it alive."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compress.errors import UserError
from compress.runtime.engine import Completion, Engine, SamplingParams
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Eight prompts of 1 to 60 tokens, greedy and sampled in all ways; some are exact multiples of 16 long."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 16, 17, 32, 60, 5, 48, 31]
    prompts = [torch.randint(2, 256, (n,), generator=generator).tolist() for n in lengths]
    kinds = [
        SamplingParams(max_tokens=20, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=25, temperature=1.0, seed=1, logprobs=2),
        SamplingParams(max_tokens=30, temperature=0.8, top_k=20, seed=2, logprobs=2),
        SamplingParams(max_tokens=20, temperature=1.2, top_p=0.9, min_p=0.02, seed=3, logprobs=2),
    ]
    return prompts, [kinds[i % 4] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[Completion]:
    engine = Engine.load(directory)
    return [engine.generate([p], s)[0] for p, s in zip(*workload(), strict=True)]


def assert_same(ours: list[Completion], expected: list[Completion]) -> None:
    """To the bit: no sum of the compiled kernels depends on the batch."""
    assert ours == expected


def assert_idle(engine: Engine) -> None:
    engine.scheduler.check()
    assert engine.scheduler.pool.used == 0
    assert not engine.scheduler.busy


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("budget", [1, 3, 7, 2048])
def test_together_equals_alone(directory: Path, alone: list[Completion], budget: int, page_size: int) -> None:
    """Rows 22 and 29: chunks of 1, 3, 7 tokens or whole prompts, pages of any size."""
    engine = Engine.load(directory, max_batched_tokens=budget, page_size=page_size, max_tokens_in_cache=1024)
    assert_same(engine.generate(*workload()), alone)
    assert engine.scheduler.preemptions == 0
    assert_idle(engine)


@pytest.mark.parametrize("budget", [7, 2048])
@pytest.mark.parametrize("page_size", [1, 16])
def test_preemption_is_invisible(directory: Path, alone: list[Completion], budget: int, page_size: int) -> None:
    """Row 23: room for one and a half of the largest requests."""
    engine = Engine.load(directory, max_batched_tokens=budget, page_size=page_size, max_tokens_in_cache=128)
    assert_same(engine.generate(*workload()), alone)
    assert engine.scheduler.preemptions > 0
    assert_idle(engine)


def test_eight_equal_requests_in_a_small_pool(directory: Path) -> None:
    """Row 23 as it was reported: 8 × 60 tokens in the room of 1.5 requests."""
    prompts = [[10 + i, 20, 30] for i in range(8)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    small = Engine.load(directory, max_tokens_in_cache=96)
    assert small.generate(prompts, params) == Engine.load(directory).generate(prompts, params)
    assert small.scheduler.preemptions > 0
    assert_idle(small)


def test_order_does_not_matter(directory: Path, alone: list[Completion]) -> None:
    """Row 29: five orders of the same eight requests."""
    engine = Engine.load(directory)
    prompts, params = workload()
    for seed in range(5):
        order = random.Random(seed).sample(range(8), 8)
        completions = engine.generate([prompts[i] for i in order], [params[i] for i in order])
        assert_same(completions, [alone[i] for i in order])


def test_random_traffic_with_aborts(directory: Path) -> None:
    """Arrivals and aborts at random: every page is accounted for at every step, survivors are as if alone."""
    engine, quiet = (Engine.load(directory, max_tokens_in_cache=tokens, page_size=4) for tokens in (80, 512))
    engine.scheduler.max_batched_tokens = 9
    rng = random.Random(5)
    live, done = [], []
    for step in range(170):
        if step < 120 and rng.random() < 0.4:
            prompt = [rng.randrange(2, 256) for _ in range(rng.randint(1, 30))]
            live.append(engine.add(prompt, SamplingParams(max_tokens=rng.randint(1, 20), temperature=1.0, seed=step)))
        if live and rng.random() < 0.1:
            engine.abort(live.pop(rng.randrange(len(live))))
        done += [request for request in engine.step() if request.status == "finished"]
        live = [request for request in live if request.status != "finished"]
        engine.scheduler.check()
    while engine.scheduler.busy:
        done += [request for request in engine.step() if request.status == "finished"]
    assert engine.scheduler.preemptions > 0
    assert len(done) >= 20
    assert_idle(engine)
    for request in done:
        expected = quiet.generate([request.token_ids[: request.prompt_length]], request.params)[0]
        assert request.generated == expected.token_ids


def test_several_answers_to_one_prompt_differ_and_repeat(directory: Path) -> None:
    """Row 29: n = 4 under one seed."""
    engine = Engine.load(directory)

    def answers() -> list[list[int]]:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
        requests = [engine.add([5, 6, 7], params, sample=n) for n in range(4)]
        while engine.scheduler.busy:
            engine.step()
        return [request.generated for request in requests]

    first = answers()
    assert first == answers()
    assert len({tuple(answer) for answer in first}) == 4


def test_stops_on_the_union_of_eos_ids(directory: Path, tmp_path: Path) -> None:
    """Row 26: config.json has one id, generation_config.json a list; stop_token_ids add to them."""
    prompt = [[50, 60, 70]]
    tokens = Engine.load(directory).generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids
    stop = next(token for i, token in enumerate(tokens) if i > 4 and token not in tokens[:i])
    at = tokens.index(stop)
    tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, stop]}))
    engine = Engine.load(tmp_path)
    assert {1, 2, stop} == set(engine.eos_ids)
    ended = engine.generate(prompt, SamplingParams(max_tokens=30))[0]
    assert (ended.token_ids, ended.finish_reason) == (tokens[: at + 1], "stop")
    assert ended.text == engine.tokenizer.decode(tokens[:at])
    plain = Engine.load(directory)
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    assert plain.generate(prompt, params)[0].finish_reason == "stop"
    assert plain.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True))[0].finish_reason == "length"


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1, null]}'])
def test_a_damaged_generation_config_is_named(directory: Path, tmp_path: Path, content: str) -> None:
    source = tmp_path / "model"
    shutil.copytree(directory, source)
    (source / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json: "):
        Engine.load(source)


def test_a_continuation_keeps_its_first_space(directory: Path, tmp_path: Path) -> None:
    """As SentencePiece tokenizers spell it: a word begins with its space, which decoding at a text's start drops."""
    source = tmp_path / "model"
    shutil.copytree(directory, source)
    words = {"<unk>": 0, **{f"\u2581w{i}": i for i in range(1, 256)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(source)
    engine = Engine.load(source)
    done = engine.generate(["w5 w6"], SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert done.prompt_ids == [5, 6]
    assert done.text == "".join(f" w{i}" for i in done.token_ids)


def test_strings_are_encoded_by_the_tokenizer(directory: Path) -> None:
    engine = Engine.load(directory)
    completion = engine.generate(["hello"], SamplingParams(max_tokens=5))[0]
    assert completion.prompt_ids == engine.tokenizer("hello")["input_ids"]
    assert completion == engine.generate([completion.prompt_ids], SamplingParams(max_tokens=5))[0]


BAD: dict[str, tuple[Callable[[Engine], object], str]] = {
    "empty prompt": (lambda e: e.add([], SamplingParams()), "prompt must have at least 1 token"),
    "empty string": (lambda e: e.add("", SamplingParams()), "prompt must have at least 1 token"),
    "id too large": (lambda e: e.add([3, 256], SamplingParams()), "256 is out of range; ids go from 0 to 255"),
    "id negative": (lambda e: e.add([-1], SamplingParams()), "-1 is out of range"),
    "prompt too long": (lambda e: e.add([3] * 513, SamplingParams()), "513 tokens; the model takes at most 512"),
    "max_tokens": (
        lambda e: e.add([3], SamplingParams(max_tokens=0)),
        "max_tokens must be .* at least 1 .0 needs prompt_logprobs., not 0",
    ),
    "temperature": (lambda e: e.add([3], SamplingParams(temperature=-0.1)), "temperature must be .* at least 0"),
    "nan": (lambda e: e.add([3], SamplingParams(temperature=float("nan"))), "temperature must be a number"),
    "top_k": (lambda e: e.add([3], SamplingParams(top_k=-1)), "top_k must be"),
    "top_p": (lambda e: e.add([3], SamplingParams(top_p=0.0)), "top_p must be above 0"),
    "min_p": (lambda e: e.add([3], SamplingParams(min_p=1.5)), "min_p must be between 0 and 1"),
    "stop ids": (lambda e: e.add([3], SamplingParams(stop_token_ids=(256,))), "stop_token_ids must be between 0 and"),
    "score nothing": (lambda e: e.add([3], SamplingParams(max_tokens=-1, prompt_logprobs=1)), "max_tokens .* least 0"),
    "repetition": (
        lambda e: e.add([3], SamplingParams(repetition_penalty=0)),
        "repetition_penalty must be between 0.01",
    ),
    "presence": (lambda e: e.add([3], SamplingParams(presence_penalty=3)), "presence_penalty must be between -2 and 2"),
    "frequency": (lambda e: e.add([3], SamplingParams(frequency_penalty=-3)), "frequency_penalty must be between"),
    "bias id": (lambda e: e.add([3], SamplingParams(logit_bias={256: 1})), "logit_bias: token ids must be .* 255"),
    "bias": (lambda e: e.add([3], SamplingParams(logit_bias={4: 101})), "logit_bias of token 4 must be between"),
    "stop": (lambda e: e.add([3], SamplingParams(stop=("",))), "stop must be strings of at least 1 character"),
    "one stop": (lambda e: e.add([3], SamplingParams(stop="ab")), "stop must be a tuple of strings, not 'ab'"),  # pyright: ignore
    "one prompt": (lambda e: e.generate("ab", SamplingParams()), "prompts: a list of texts"),  # pyright: ignore
    "min_tokens": (lambda e: e.add([3], SamplingParams(min_tokens=65)), "min_tokens must be between 0 and max_tokens"),
    "prompt_logprobs": (lambda e: e.add([3], SamplingParams(prompt_logprobs=-1)), "prompt_logprobs must be between 0"),
    "seed": (lambda e: e.add([3], SamplingParams(seed=2**64)), "seed must be an integer of 64 bits"),
    "n": (lambda e: e.fork([3], SamplingParams(), 0), "n must be at least 1, not 0"),
    "logprobs": (lambda e: e.add([3], SamplingParams(logprobs=257)), "logprobs must be between 0 and 256"),
    "pool": (
        lambda e: e.add([3] * 90, SamplingParams(max_tokens=60)),
        r"prompt of 90 tokens with up to 60 new ones needs 10 cache pages of 16 tokens; the cache has 8 \(128 tokens\)",
    ),
    "params count": (lambda e: e.generate([[3]], []), "params: 0 given for 1 prompts"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_names_the_field_and_leaves_the_engine_alive(directory: Path, name: str) -> None:
    """Row 28: a good request that is running when the bad one arrives is not disturbed."""
    engine = Engine.load(directory, max_tokens_in_cache=128)
    good = engine.add([9, 8, 7], SamplingParams(max_tokens=8))
    engine.step()
    call, message = BAD[name]
    with pytest.raises(UserError, match=message):
        call(engine)
    while engine.scheduler.busy:
        engine.step()
    assert good.generated == engine.generate([[9, 8, 7]], SamplingParams(max_tokens=8))[0].token_ids
    assert_idle(engine)


def test_one_bad_prompt_in_a_batch_stops_the_batch_before_any_work(directory: Path) -> None:
    engine = Engine.load(directory)
    with pytest.raises(UserError, match="999 is out of range"):
        engine.generate([[3], [999]], SamplingParams())
    assert_idle(engine)


@pytest.mark.parametrize(("length", "tokens"), [(511, 2), (512, 1)])
def test_generation_ends_at_the_last_position(directory: Path, length: int, tokens: int) -> None:
    """Row 28: exact boundaries; 513 tokens are refused above."""
    completion = Engine.load(directory).generate([[3] * length], SamplingParams(max_tokens=9, ignore_eos=True))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (tokens, "length")


def test_the_largest_request_that_fits_the_pool_runs(directory: Path) -> None:
    engine = Engine.load(directory, max_tokens_in_cache=32, page_size=16)
    completion = engine.generate([[3] * 23], SamplingParams(max_tokens=10, ignore_eos=True))[0]
    assert len(completion.token_ids) == 10
    with pytest.raises(UserError, match="needs 3 cache pages"):
        engine.generate([[3] * 24], SamplingParams(max_tokens=10))


def test_unusable_devices_and_sizes_are_refused(directory: Path) -> None:
    """Row 36."""
    with pytest.raises(UserError, match="'banana' is not a device"):
        Engine.load(directory, device="banana")
    with pytest.raises(UserError, match="'meta' is not supported; accepted: cpu, cuda"):
        Engine.load(directory, device="meta")
    with pytest.raises(UserError, match="page_size must be at least 1, not 0"):
        Engine.load(directory, page_size=0)
    with pytest.raises(UserError, match=r"a cache of 10000000000000 tokens needs .* GiB; the device has"):
        Engine.load(directory, max_tokens_in_cache=10**13)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="this machine has 0 CUDA devices"):
            Engine.load(directory, device="cuda")


FEW_WORDS: dict[int, float] = dict.fromkeys((70, 71, 72), 40.0)


def test_drafts_from_the_text_save_steps_and_change_nothing(directory: Path) -> None:
    """A model that may say few words repeats itself, which prompt lookup predicts."""
    params = SamplingParams(max_tokens=80, logprobs=2, ignore_eos=True, logit_bias=FEW_WORDS)
    prompts = [[5, 6, 7], [40, 50, 60, 40, 50]]
    plain = Engine.load(directory)
    expected = plain.generate(prompts, params)
    engine = Engine.load(directory, speculate=4)
    assert engine.generate(prompts, params) == expected
    stats = engine.stats
    assert stats.steps < plain.stats.steps
    assert 0 < stats.drafts <= stats.accepted_tokens <= stats.draft_tokens
    assert stats.generated_tokens == 160
    assert_idle(engine)


def test_a_model_that_drafts_for_itself_is_always_right(directory: Path) -> None:
    """Row 24: greedy, and nothing is left of it in either cache."""
    engine = Engine.load(directory, draft=directory, speculate=3)
    params = SamplingParams(max_tokens=41, ignore_eos=True)
    assert engine.generate([[5, 6, 7]], params) == Engine.load(directory).generate([[5, 6, 7]], params)
    stats = engine.stats
    assert stats.accepted_tokens == stats.draft_tokens > 0
    assert stats.steps == 1 + stats.drafts
    assert_idle(engine)


def test_stop_strings_end_a_verified_draft_in_its_middle(directory: Path) -> None:
    """What a step verified after the string that ends the text is no part of the answer."""
    params = SamplingParams(max_tokens=80, ignore_eos=True, logprobs=0, logit_bias=FEW_WORDS)
    whole = Engine.load(directory).generate([[5, 6, 7]], params)[0]
    for at in range(30, 40):
        stop = Engine.load(directory).tokenizer.decode(whole.token_ids[at : at + 1])
        stopping = replace(params, stop=(stop,), min_tokens=at)
        plain = Engine.load(directory).generate([[5, 6, 7]], stopping)[0]
        engine = Engine.load(directory, speculate=5)
        drafted = engine.generate([[5, 6, 7]], stopping)[0]
        assert drafted == plain
        assert engine.stats.accepted_tokens > 0
        assert plain.finish_reason == "stop"
        assert len(plain.token_ids) == len(plain.logprobs or []) < 80


def test_stats_count_what_happened(directory: Path) -> None:
    engine = Engine.load(directory, max_running=1)
    first, second = (engine.add([3] * 20, SamplingParams(max_tokens=5, ignore_eos=True)) for _ in range(2))
    engine.step()
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.pages_used) == (1, 1, 2)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (20, 1, 1)
    engine.abort(second)
    while engine.scheduler.busy:
        engine.step()
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.pages_used, stats.generated_tokens) == (0, 0, 0, 5)
    assert stats.computed_tokens == 20 + 4
    assert stats.pages_cached == 1
    assert (first.finish_reason, second.finish_reason) == ("length", "abort")


def test_a_prompt_is_scored_without_generating(directory: Path) -> None:
    """As lm-eval asks: max_tokens 0, one token alone included."""
    engine = Engine.load(directory)
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=1)
    done = engine.generate([[9], [9, 8, 7]], scoring)
    assert [one.token_ids for one in done] == [[], []]
    assert done[0].prompt_logprobs == [None]
    hidden_SC = engine.hidden_states(torch.tensor([9, 8, 7]))
    expected = torch.log_softmax(engine.logits(hidden_SC), -1)
    scored = done[1].prompt_logprobs
    assert scored is not None
    for position, token in ((1, 8), (2, 7)):
        one = scored[position]
        assert one is not None
        assert abs(one.chosen - float(expected[position - 1, token])) < 3e-5
        assert list(one.top) == [int(expected[position - 1].argmax())]
    assert_idle(engine)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("speculate", [None, 3])
def test_warming_up_leaves_no_trace(
    directory: Path, alone: list[Completion], page_size: int, speculate: int | None
) -> None:
    engine = Engine.load(directory, max_tokens_in_cache=512, page_size=page_size, speculate=speculate)
    before = engine.stats
    engine.warm_up()
    assert engine.stats == before
    assert engine.scheduler.pool.free == engine.scheduler.pool.total
    assert "tokenizer" in vars(engine), "read by now"
    assert engine.executor.replays._kept, "a step is recorded"
    assert engine.scheduler.pool.caching
    assert_idle(engine)
    prompts, params = workload()
    assert engine.generate(prompts[:1], params[:1]) == alone[:1]


def test_warming_up_fits_the_smallest_cache(directory: Path) -> None:
    engine = Engine.load(directory, max_tokens_in_cache=1, page_size=1)
    engine.warm_up()
    assert engine.stats.steps == 0


def test_a_token_that_ends_the_text_has_an_offset_and_is_shown_where_asked(directory: Path) -> None:
    """The second token as a stop id: told as its place in the text, which has it with `include_stop` alone."""
    engine = Engine.load(directory)
    prompt = list(range(40, 60))
    free = engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True, skip_special_tokens=False))
    while free.status != "finished":
        engine.step()
    stop = free.generated[3]
    end = free.generated.index(stop) + 1
    whole = engine.add(prompt, SamplingParams(max_tokens=end, ignore_eos=True, skip_special_tokens=False))
    for include in (False, True):
        params = SamplingParams(
            max_tokens=8, ignore_eos=True, skip_special_tokens=False, stop_token_ids=(stop,), include_stop=include
        )
        request = engine.add(prompt, params)
        while request.status != "finished":
            engine.step()
        assert request.text is not None
        assert whole.text is not None
        assert free.text is not None
        assert request.finish_reason == "stop"
        assert request.generated == free.generated[:end]
        assert request.text.offsets == free.text.offsets[:end]
        if include:
            text = whole.text.take()
            assert text
            assert request.text.take() == text
