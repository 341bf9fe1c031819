"""Do replayed decoding steps sample the tokens of launched ones, recorded once a size in all rollouts?

`recording.ListRecorder` stands in for CUDA graphs. A token could differ honestly where its draw lies within rounding of
the border of two tokens. `clear` asserts that in these conversations none does: the nearest draw is many times as far
from a border as rounding moves it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recording import ListRecorder
from test_row_attention import paged
from test_sampler import PAD, PROMPTS, REPLIES, STOP, VOCABULARY, build, conversation, serve
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from posttrain.models import row_attention
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.rollout import engine as engines
from posttrain.rollout.engines import graphs
from posttrain.rollout.engines.graphs import GraphSampler
from posttrain.rollout.engines.sampling import uniforms
from posttrain.rollout.engines.slots import SlotSampler, Writing
from posttrain.types import Completion, SamplingParams

STOPS = [STOP, 7, 19, 33, 41, 55]  # so that turns differ in length
NEAR = 5e-6  # rounding moves a draw by less than 1e-6
LONGEST = 200


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions in steps of 16 instead of 256, so that short conversations come through several of them."""
    monkeypatch.setattr(graphs, "POSITIONS", 16)
    monkeypatch.setattr(graphs, "FEWEST_ROWS", 2)


def one_layer(kind: type[ConvGPTForCausalLM] | type[Qwen3ForCausalLM]) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCABULARY, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=16, initializer_range=0.3, pad_token_id=PAD, bos_token_id=1, eos_token_id=STOP,
    )  # fmt: skip
    if kind is ConvGPTForCausalLM:
        return kind(ConvGPTConfig(hidden_size=64, conv_kernel_h_w=5, **sizes)).eval()
    return kind(Qwen3Config(hidden_size=16, **sizes)).eval()


@torch.no_grad()
def clear(model: PreTrainedModel, rows: list[list[int]], answers: list[list[Completion]], temperature: float) -> None:
    """No draw of these conversations is within rounding of another token; greedily, no best one of the second best."""
    for row, (prompt, turns) in enumerate(zip(rows, answers, strict=True)):
        ids = list(prompt)
        for turn, completion in enumerate(turns):
            start, length = len(ids), len(completion.ids)
            ids += completion.ids
            logits_NV = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].double()
            if temperature == 0:
                best_N2 = logits_NV.topk(2).values
                assert (best_N2[:, 0] - best_N2[:, 1]).min() > 1e-3
            else:
                borders_NV = (logits_NV / temperature).softmax(-1).cumsum(-1)
                drawn_1N = uniforms(torch.tensor([[1000 * row + turn]]), torch.arange(length))
                assert (borders_NV - drawn_1N.T).abs().min() > NEAR
            ids += REPLIES[row % len(REPLIES)]


def equal(ours: list[list[Completion]], plain: list[list[Completion]]) -> None:
    assert [[each.ids for each in row] for row in ours] == [[each.ids for each in row] for row in plain]
    for row, other in zip(ours, plain, strict=True):
        for a, b in zip(row, other, strict=True):
            assert a.finished == b.finished and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def replaying(
    model: PreTrainedModel, recorder: ListRecorder | None = None, conversations: int | None = None
) -> GraphSampler:
    return GraphSampler(model, STOPS, PAD, LONGEST, recorder or ListRecorder(), conversations=conversations)


def sizes(sampler: GraphSampler) -> list[tuple[int, int]]:
    """The numbers of rows and positions that have a graph."""
    return [size for static in sampler._static.values() for size in static.graphs]


def play(model: PreTrainedModel, sampler: SlotSampler, params: SamplingParams, places: int, most: int = 4) -> None:
    """Fourteen conversations of one to `most` turns, the shared prompts of some read once, so many places at a time."""
    rows = [PROMPTS[n % 5] for n in range(14)]
    turns = [1 + n % most for n in range(14)]
    plain, rounds = serve(SlotSampler(model, STOPS, PAD), params, places, rows, turns)
    clear(model, rows, plain, params.temperature)
    ours, _ = serve(sampler, params, places, rows, turns)
    equal(ours, plain)
    assert min(map(len, rounds)) < places, "no turn waits for the slowest"


def test_a_step_is_recorded_once_a_size_and_follows_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    model = one_layer(ConvGPTForCausalLM)
    recorder = ListRecorder()
    sampler, params = replaying(model, recorder), SamplingParams(max_new_tokens=14)
    play(model, sampler, params, 6)
    made = recorder.steps
    assert made == len(sizes(sampler)) == sampler.recorded
    assert len({rows for rows, _ in sizes(sampler)}) > 1 and len({end for _, end in sizes(sampler)}) > 2
    assert f"({made} in all)" in capsys.readouterr().err
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.2)
    play(model, sampler, params, 6)
    assert recorder.steps == len(sizes(sampler)), "no size is recorded twice"
    made = recorder.steps
    play(model, sampler, params, 6)
    assert recorder.steps == made, "the third rollout replays what the others have recorded"

    play(model, sampler, SamplingParams(max_new_tokens=14, temperature=0.0), 6)
    assert recorder.steps > made, "another way to draw is another step"
    made = recorder.steps
    play(model, sampler, params, 6)
    assert recorder.steps == made
    play(model, sampler, params, 9)
    assert recorder.steps > made, "more conversations than before move the cache of a sampler that was told no number"


def test_a_sampler_that_is_told_its_conversations_records_no_step_twice() -> None:
    """As in phase 3, which evaluates on few levels before its first rollout."""
    model, recorder = one_layer(ConvGPTForCausalLM), ListRecorder()
    sampler, params = replaying(model, recorder, 9), SamplingParams(max_new_tokens=14)
    room = set[tuple[int, int]]()
    for places in (3, 9, 6, 9):
        for temperature in (1.0, 0.0):
            play(model, sampler, SamplingParams(max_new_tokens=14, temperature=temperature), places)
            room.add(sampler._sizes())
    assert recorder.steps == len(sizes(sampler)) and room == {(graphs.whole_rows(9), 256)}
    play(model, sampler, params, 14)
    assert sampler._sizes()[0] == graphs.whole_rows(14), "more than it was told have room, too"


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("kind", ["llama", "convgpt", "convgpt-tied"])
def test_every_model_and_temperature(kind: str, temperature: float) -> None:
    model = build(kind)
    play(model, replaying(model), SamplingParams(max_new_tokens=14, temperature=temperature), 6)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=10, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=10, temperature=0.7, top_k=9, top_p=0.8),
    ],
)
def test_settings_of_a_chat(params: SamplingParams) -> None:
    model = build("llama")
    plain, plain_spans = conversation(SlotSampler(model, STOPS, PAD), params)
    ours, spans = conversation(replaying(model), params)
    assert ours == plain
    for row, other in zip(spans, plain_spans, strict=True):
        equal([[each for _, each in row]], [[each for _, each in other]])


@pytest.mark.parametrize("kind", ["llama", "convgpt"])
def test_the_copies_that_autocast_would_make_follow_the_weights(kind: str) -> None:
    """Also where a rollout without autocast comes between."""
    model = build(kind)
    sampler, params = replaying(model), SamplingParams(max_new_tokens=8)
    for factor, half in ((1.0, True), (1.5, True), (1.0, False), (1.0, True)):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            for weight in model.parameters():
                weight.mul_(factor)
            handles = sampler.open(PROMPTS)
            for prompt, completion in zip(PROMPTS, sampler.sample(handles, params, [7] * len(PROMPTS)), strict=True):
                ids, start = prompt + completion.ids, len(prompt) - 1
                logprobs = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
                expected = [logprobs[start + n, token].item() for n, token in enumerate(completion.ids)]
                assert completion.logprobs == pytest.approx(expected, abs=0.3 if half else 1e-4)
            sampler.close(handles)


@pytest.mark.parametrize("kind", ["llama", "convgpt", "convgpt-tied"])
def test_a_recorded_step_converts_no_matrix_of_weights(kind: str) -> None:
    """Autocast keeps no copy in a recorded step: each conversion would be made again at every token."""
    model = build(kind)
    weights = {weight.data_ptr() for weight in model.parameters() if weight.ndim > 1}
    converted = list[tuple[int, ...]]()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in weights:
                converted.append(tuple(args[0].shape))
            return func(*args, **kwargs or {})

    class Watched(ListRecorder):
        def record(self, step: Callable[[], object]) -> Callable[[], object]:
            with Watching():
                return super().record(step)

    sampler = replaying(model, Watched())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sampler.sample(sampler.open(PROMPTS), SamplingParams(max_new_tokens=4), [7] * len(PROMPTS))
    assert sampler.recorded > 0 and not converted


def test_a_model_of_another_precision_gets_another_cache() -> None:
    model, params = build("llama"), SamplingParams(max_new_tokens=8)
    sampler = replaying(model)
    for _ in range(2):
        expected, _ = conversation(SlotSampler(model, STOPS, PAD, LONGEST), params)
        assert conversation(sampler, params)[0] == expected
        model.double()


def test_adapters_that_change_are_recorded_once_and_without_them_again() -> None:
    torch.manual_seed(1)
    adapted: Any = get_peft_model(build("llama"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model, recorder = adapted.base_model.model, ListRecorder()
    sampler, params = replaying(model, recorder), SamplingParams(max_new_tokens=14)
    play(model, sampler, params, 6)
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    model(input_ids=torch.tensor([PROMPTS[1]])).logits.square().mean().backward()
    optimizer.step()
    play(model, sampler, params, 6)
    made = recorder.steps
    assert made == len(sizes(sampler)), "no size is recorded twice"
    with adapted.disable_adapter():
        play(model, sampler, params, 6)
    assert recorder.steps > made
    play(model, sampler, params, 6)


def test_requests_of_all_kinds_share_graphs_where_they_can_and_hold_a_few() -> None:
    """A server's requests choose how many tokens they get and how these are drawn."""
    model, recorder = one_layer(Qwen3ForCausalLM), ListRecorder()
    sampler = replaying(model, recorder)
    for tokens in (14, 9, 3, 14):
        play(model, sampler, SamplingParams(max_new_tokens=tokens), 6)
    assert recorder.steps == len(sizes(sampler))
    for n in range(12):
        params = SamplingParams(max_new_tokens=3, temperature=1 + n / 10)
        assert conversation(sampler, params)[0] == conversation(SlotSampler(model, STOPS, PAD), params)[0]
    assert len(sampler._static) == graphs.MOST_KINDS


def test_an_interrupted_rollout_leaves_nothing_behind() -> None:
    model = one_layer(Qwen3ForCausalLM)
    sampler, params = replaying(model), SamplingParams(max_new_tokens=14)

    def interrupt(finished: list[tuple[int, Completion]]) -> Any:
        raise KeyboardInterrupt

    handles = sampler.open(PROMPTS)
    with pytest.raises(KeyboardInterrupt):
        sampler.converse([(handle, 5) for handle in handles], params, interrupt)
    sampler.close(handles)
    play(model, sampler, params, 6)


def test_conversations_that_begin_with_one_token_make_their_cache_first() -> None:
    model = one_layer(Qwen3ForCausalLM)
    params = SamplingParams(max_new_tokens=1)
    found = []
    for sampler in (SlotSampler(model, STOPS, PAD), replaying(model)):
        assert sampler.open([[9]]) == [0]
        found.append([sampler.sample([0], params, [5])])
    equal(found[1], found[0])


class Refusing(ListRecorder):
    def record(self, step: Callable[[], object]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_step_that_cannot_be_recorded_is_said_in_a_line_and_launched(capsys: pytest.CaptureFixture[str]) -> None:
    model = one_layer(Qwen3ForCausalLM)
    sampler = replaying(model, Refusing())
    assert sampler.replays
    for _ in range(2):
        play(model, sampler, SamplingParams(max_new_tokens=14), 6)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and sampler.recorded == 0 and not sampler.replays
    assert "without CUDA graphs: a step of Qwen3ForCausalLM cannot be recorded (RuntimeError: operation not" in lines[0]


class Cuda:
    """What a recorder asks of torch.cuda, as a driver answers: its errors in a step spoil the end of a capture.

    Those of Python alone do not. As before torch 2.13, the random numbers are in a capture until one has ended well.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams, self.pools, self.left, self.wrong = ["default"], list[Any](), list[Any](), ""
        self.random_in_capture = False
        cuda, zeros = self, torch.zeros

        class Graph:
            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                cuda.pools.append(pool)
                cuda.random_in_capture = True

            def capture_end(self) -> None:
                if cuda.wrong:
                    cuda.wrong = ""
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.random_in_capture = False

            def replay(self) -> None:
                if cuda.random_in_capture:
                    raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

        @contextmanager
        def stream(which: Any) -> Iterator[None]:
            self.streams.append(which)
            try:
                yield
            finally:
                self.streams.pop()

        handles = count(1)
        for name, replaced in {
            "CUDAGraph": Graph, "stream": stream, "Stream": lambda: SimpleNamespace(device_index=0),
            "graph_pool_handle": lambda: next(handles), "synchronize": lambda: None, "empty_cache": lambda: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, replaced)
        monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **named: zeros(*sizes, **named))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: self.left.append(args), raising=False)

    def step(self) -> None:
        assert self.streams[-1] != "default"
        if self.wrong:
            raise RuntimeError(self.wrong)


def test_a_failed_capture_says_its_cause_and_leaves_stream_and_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    recorder = graphs.CudaRecorder()
    kept = recorder.record(cuda.step)
    cuda.wrong = "operation not permitted when stream is capturing"
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorder.record(cuda.step)
    assert cuda.streams == ["default"] and cuda.left == [(0, cuda.pools[0])]
    kept()
    cuda.wrong = "any"
    with pytest.raises(RuntimeError, match="due to a previous error"):  # where nothing but the end fails
        recorder.record(lambda: None)
    assert cuda.streams == ["default"] and cuda.left == [(0, cuda.pools[0])] * 2
    kept()


@pytest.mark.parametrize("spoiled", [False, True], ids=["the end succeeds", "the end fails"])
def test_the_cause_is_the_error_of_the_step(monkeypatch: pytest.MonkeyPatch, spoiled: bool) -> None:
    """Not one that the model has handled before it, and not that of the end."""
    cuda = Cuda(monkeypatch)
    recorder = graphs.CudaRecorder()
    kept = recorder.record(cuda.step)

    def without_cache() -> None:
        cuda.wrong = "any" if spoiled else ""
        raise ValueError("this layer does not work while a stream is capturing")

    def step() -> None:
        try:
            raise KeyError("cos_cache")
        except KeyError:
            without_cache()

    with pytest.raises(ValueError, match="does not work while"):
        recorder.record(step)
    assert cuda.streams == ["default"] and not cuda.random_in_capture
    kept()
    recorder.record(cuda.step)()


def test_graphs_share_a_pool_while_one_of_them_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    recorder = graphs.CudaRecorder()
    replays = [recorder.record(cuda.step) for _ in range(3)]
    assert len(set(cuda.pools)) == 1
    replays.clear()
    replays.append(recorder.record(cuda.step))
    assert cuda.pools[-1] != cuda.pools[0], "torch does not take up a pool that no graph uses"


def test_a_step_has_the_same_rows_whatever_was_played_before() -> None:
    """Another number of rows may be rounded in another way, and a resumed run has played less."""
    model, params, rows = one_layer(Qwen3ForCausalLM), SamplingParams(max_new_tokens=14), [PROMPTS[0]] * 5
    seen = []
    for before in (0, 11):
        sampler = replaying(model)
        if before:
            serve(sampler, params, before, [PROMPTS[0]] * before, [1] * before)
        for static in sampler._static.values():
            static.graphs.clear()
        serve(sampler, params, 5, rows, [2] * 5)
        seen.append({count for count, _ in sizes(sampler)})
    assert seen[0] == seen[1]
    assert [graphs.whole_rows(count) for count in (1, 5, 16, 17, 31, 100)] == [2, 6, 16, 20, 32, 112]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "convgpt", "convgpt-tied"])
def test_each_row_is_read_up_to_its_own_length(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    calls: list[int] = []

    def counted(*args: Any, **named: Any) -> torch.Tensor:
        calls.append(1)
        return paged(*args, **named)

    for module, name in ((graphs, "POSITIONS"), (row_attention, "PAGE")):
        monkeypatch.setattr(module, name, 48)  # the cache has a multiple of 64 otherwise
    monkeypatch.setattr(row_attention, "varlen_attn", counted)
    monkeypatch.setattr(row_attention, "has_kernel", lambda model, dtype: True)
    model, params = build(kind), SamplingParams(max_new_tokens=14)
    play(model, replaying(model), params, 6)
    assert not calls, "by default all rows are read up to the longest one"
    sampler = GraphSampler(model, STOPS, PAD, LONGEST, ListRecorder(), by_length=True)
    play(model, sampler, params, 6)
    assert sampler.recorded and len(calls) == 2 * sampler.recorded * model.config.num_hidden_layers


@pytest.mark.parametrize("kind", ["llama", "convgpt"])
def test_a_kernel_that_fails_is_said_in_a_line_and_not_called_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    def failing(*args: Any, **named: Any) -> torch.Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setattr(row_attention, "varlen_attn", failing)
    monkeypatch.setattr(row_attention, "has_kernel", lambda model, dtype: True)
    model = build(kind)
    sampler = GraphSampler(model, STOPS, PAD, LONGEST, ListRecorder(), by_length=True)
    play(model, sampler, SamplingParams(max_new_tokens=14), 6)
    lines = [line for line in capsys.readouterr().err.splitlines() if "longest one" in line]
    assert len(lines) == 1 and "fails (RuntimeError: FlashAttention only" in lines[0] and sampler.recorded


def test_graphs_are_used_on_a_gpu_where_their_self_test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer(Qwen3ForCausalLM)
    assert type(engines.open_engine(model, [STOP], PAD)) is SlotSampler

    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(graphs, "CudaRecorder", ListRecorder)
    found: dict[type, str | None] = {SlotSampler: None, GraphSampler: None}
    monkeypatch.setattr(engines, "why_unfit", lambda model, stop_ids, pad_id, engine=SlotSampler: found[engine])
    opened = engines.open_engine(model, [STOP], PAD, conversations=5)
    assert type(opened) is GraphSampler and opened.conversations == 5
    assert type(engines.open_engine(model, [STOP], PAD, graphs=False)) is SlotSampler
    found[GraphSampler] = "its self-test raised an error"
    with pytest.warns(UserWarning, match="Qwen3ForCausalLM is decoded without CUDA graphs: its self-test raised"):
        assert type(engines.open_engine(model, [STOP], PAD)) is SlotSampler


def test_the_self_test_takes_replayed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = ListRecorder()
    monkeypatch.setattr(graphs, "CudaRecorder", lambda: recorder)
    model = one_layer(Qwen3ForCausalLM)
    assert engines.why_unfit(model, [STOP], PAD, GraphSampler) is None
    assert recorder.steps > 0
    monkeypatch.setattr(graphs, "CudaRecorder", Refusing)
    wrong = engines.why_unfit(model, [STOP], PAD, GraphSampler)
    assert wrong is not None and "a step of Qwen3ForCausalLM cannot be recorded (RuntimeError: operation not" in wrong


@pytest.mark.thorough
def test_most_rows_of_a_step_write_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of about 13 tokens where 64 are allowed, in episodes of 1 to 5 turns."""
    rng, sizes, went, turns = random.Random(0), [0, 0], dict[int, int](), dict[int, int]()
    sampler = GraphSampler(one_layer(Qwen3ForCausalLM), [VOCABULARY], PAD, 700, ListRecorder())
    begin, advance = Writing.begin, GraphSampler._advance

    def short_turns(writing: Writing, slots: Sequence[int], ids: Any, seeds: Sequence[int]) -> None:
        begin(writing, slots, ids, seeds)
        writing.rows.most_B[list(slots)] = torch.tensor([max(4, round(rng.gauss(13, 4))) for _ in slots])

    def counted(engine: GraphSampler, static: Any, rows: int, end: int) -> None:
        sizes[0] += rows
        sizes[1] += int((~static.done_S[:rows]).sum())
        advance(engine, static, rows, end)

    def then(finished: list[tuple[int, Completion]]) -> list[tuple[int, int]]:
        for handle, _ in finished:
            went[handle] = went.get(handle, 0) + 1
        over = [handle for handle, _ in finished if went[handle] == turns[handle]]
        sampler.close(over)
        going = [handle for handle, _ in finished if handle not in over]
        for handle in going:
            sampler.append(handle, [5] * 20)
        return [(handle, went[handle]) for handle in going]

    monkeypatch.setattr(graphs, "FEWEST_ROWS", 8)
    monkeypatch.setattr(Writing, "begin", short_turns)
    monkeypatch.setattr(GraphSampler, "_advance", counted)
    handles = sampler.open([[3 + n % 50] * 40 for n in range(64)])
    turns.update({handle: 1 + handle % 5 for handle in handles})
    sampler.converse([(handle, 0) for handle in handles], SamplingParams(64), then)
    assert went == turns and sizes[1] > 0.72 * sizes[0]
