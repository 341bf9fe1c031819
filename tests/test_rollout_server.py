"""Do servers write what the engine here writes, with the weights they were sent, and end as they should?"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from test_sampler import conversation, serve
from tiny_runs import python
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from envs.web import BadStatus, ask
from posttrain import rollout_engine, rollout_server
from posttrain.models.chat import Chat
from posttrain.rollout.engines import slot_server as client
from posttrain.rollout.engines.remote import Lost, Policy, RemoteSampler, Work, chunks
from posttrain.rollout.engines.slot_server import SlotServer, SlotServers
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.runtime.compat import merged_weights
from posttrain.serving.serve import listen
from posttrain.types import SamplingParams, UserError

PARAMS = SamplingParams(max_new_tokens=12)


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


class Running:
    """A server in this process."""

    def __init__(self, model: PreTrainedModel, chat: Chat, token: str = "", port: int = 0) -> None:
        self.engine = rollout_engine.Engine(SlotSampler(model, [chat.stop_id], chat.pad_id), chat, "tiny")
        self.server = rollout_server.Server(listen("127.0.0.1", port), self.engine, token)
        self.engine.start(self.server.shutdown)
        self.port = self.server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def kill(self) -> None:
        """As if the process had died: nothing is answered any more."""
        self.engine.failure = "killed"
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def running(chat: Chat, count: int = 1, **options: Any) -> Iterator[list[Running]]:
    servers = [Running(llama(seed=9), chat, **options) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()


def connected(chat: Chat, model: PreTrainedModel, servers: list[Running]) -> RemoteSampler:
    policy = Policy(model, chat.tokenizer, [chat.stop_id], chat.pad_id, 512)
    pool = SlotServers([SlotServer(server.url) for server in servers], policy)
    pool.init_weight_transfer()
    return RemoteSampler(pool)


def local(chat: Chat, model: PreTrainedModel) -> SlotSampler:
    return SlotSampler(model, [chat.stop_id], chat.pad_id, longest=512)


ROWS = [[5 + n % 3, 6, 7, 30 + n % 2] for n in range(14)]
TURNS = [1 + n % 4 for n in range(14)]


def same(ours: Any, theirs: Any, within: float = 0.0) -> None:
    """The same tokens, and log-probs that differ by this much at most."""
    assert [[c.ids for c in row] for row in ours] == [[c.ids for c in row] for row in theirs]
    assert [[c.finished for c in row] for row in ours] == [[c.finished for c in row] for row in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert [x for c in a for x in c.logprobs] == pytest.approx(
            [x for c in b for x in c.logprobs], rel=0, abs=within
        )


def test_one_server_writes_to_the_bit_what_the_engine_here_writes(tiny_chat: Chat) -> None:
    model = llama()
    with running(tiny_chat) as servers:
        sampler = connected(tiny_chat, model, servers)
        for params in (PARAMS, SamplingParams(9, temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.3)):
            ours, spans = conversation(sampler, params)
            expected, others = conversation(local(tiny_chat, model), params)
            assert ours == expected
            same([[c for _, c in row] for row in spans], [[c for _, c in row] for row in others])
        said, heard = serve(sampler, PARAMS, 5, ROWS, TURNS)
        expected, known = serve(local(tiny_chat, model), PARAMS, 5, ROWS, TURNS)
        same(said, expected)
        assert heard == known, "they were told in the same order"
        assert not servers[0].engine._known and not servers[0].engine.sampler._slot, "nothing is left there"


def test_two_servers_write_the_same_tokens_and_share_the_work(tiny_chat: Chat) -> None:
    model = llama()
    with running(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers)
        handles = sampler.open(ROWS[:5])
        sampler.sample(handles, PARAMS, [0] * 5)
        assert sorted(len(server.engine._known) for server in servers) == [2, 3]
        sampler.close(handles)
        same(serve(sampler, PARAMS, 8, ROWS, TURNS)[0], serve(local(tiny_chat, model), PARAMS, 8, ROWS, TURNS)[0], 1e-5)


@torch.no_grad()
def change(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


def test_it_writes_with_todays_weights_and_sends_them_only_when_they_change(
    tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.rollout.engines.remote.CHUNK", 4096)  # so that there are several
    model, sent, honest = llama(), [], SlotServer.update_weights
    monkeypatch.setattr(SlotServer, "update_weights", lambda self, body: (sent.append(len(body)), honest(self, body)))
    with running(tiny_chat) as servers:
        sampler = connected(tiny_chat, model, servers)
        for version in (1, 2):
            sent.clear()
            for _ in range(2):
                _, spans = conversation(sampler, PARAMS)
                _, others = conversation(local(tiny_chat, model), PARAMS)
                same([[c for _, c in row] for row in spans], [[c for _, c in row] for row in others])
                assert {c.version for row in spans for _, c in row} == {version} == {servers[0].engine.version}
            assert len(sent) > 2 and len(sent) <= len(list(model.parameters()))
            change(model)


def test_weights_that_come_between_turns_count_from_the_next_turn_on(tiny_chat: Chat) -> None:
    """Each turn's log-probs are those of one version, over the whole conversation."""
    model, old = llama(), llama()
    with running(tiny_chat) as servers:
        sampler = connected(tiny_chat, model, servers)
        sampler.servers.renew()
        ahead = RemoteSampler(sampler.servers, ahead=True)
        ids, spans = [*ROWS[0]], []

        def then(finished: list[tuple[int, Any]]) -> list[tuple[int, int]]:
            ((handle, said),) = finished
            spans.append((len(ids), said))
            ids.extend([*said.ids, 20, 21])
            ahead.append(handle, [20, 21])
            if len(spans) == 2:
                change(model)
                ahead.servers.renew()
            return [(handle, len(spans))] if len(spans) < 4 else []

        ahead.converse([(*ahead.open([ROWS[0]]), 0)], PARAMS, then)
        assert [said.version for _, said in spans] == [1, 1, 2, 2]
        for start, said in spans:
            by = old if said.version == 1 else model
            logprobs = by(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            for n, (token, logprob) in enumerate(zip(said.ids, said.logprobs, strict=True)):
                assert logprobs[start + n - 1, token].item() == pytest.approx(logprob, abs=1e-4)


def test_a_server_that_dies_costs_nothing_but_reading_its_conversations_again(
    tiny_chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama()
    expected = serve(local(tiny_chat, model), PARAMS, 8, ROWS, TURNS)[0]
    with running(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers)
        honest, told = sampler._begin, []

        def begin(turns: Any) -> None:
            told.append(len(turns))
            if len(told) == 3:
                servers[0].kill()
            honest(turns)

        sampler._begin = begin
        same(serve(sampler, PARAMS, 8, ROWS, TURNS)[0], expected, 1e-5)
        assert [server.url for server in sampler.servers.live] == [servers[1].url]
        assert f"The rollout server at {servers[0].url} is lost" in capsys.readouterr().err

        back = Running(llama(seed=3), tiny_chat, port=servers[0].port)
        change(model)
        same(serve(sampler, PARAMS, 8, ROWS, TURNS)[0], serve(local(tiny_chat, model), PARAMS, 8, ROWS, TURNS)[0], 1e-5)
        assert len(sampler.servers.live) == 2 and back.engine.version == 2, "it is back, with the new weights"
        for server in (back, servers[1]):
            server.kill()
        with pytest.raises(UserError, match=r"No rollout server is left .*--resume"):
            serve(sampler, PARAMS, 8, ROWS, TURNS)


def test_a_server_that_hangs_costs_its_turns_alone(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a SIGSTOP: it takes requests and answers none. The other one hears of the run meanwhile."""
    monkeypatch.setattr(SlotServer._ask, "__defaults__", (1.5,))
    monkeypatch.setattr("posttrain.rollout.engines.remote.HEARTBEAT", 0.1)
    monkeypatch.setattr(rollout_engine, "LEASE", 1.0)
    monkeypatch.setattr(rollout_engine, "LOOK", 0.05)
    model, goes_on = llama(), threading.Event()
    expected = serve(local(tiny_chat, model), PARAMS, 8, ROWS, TURNS)[0]
    with running(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers)
        for name in ("converse", "renew"):
            monkeypatch.setattr(servers[0].engine, name, lambda *_: goes_on.wait())
        begun, long = sampler._begin, []

        def begin(turns: Any) -> None:
            if not long:
                long.append(time.sleep(1.5))  # an environment that takes longer than the lease
            begun(turns)

        sampler._begin = begin
        same(serve(sampler, PARAMS, 8, ROWS, TURNS)[0], expected, 1e-5)
        assert [server.url for server in sampler.servers.live] == [servers[1].url]
        goes_on.set()


def test_a_server_that_hangs_while_it_takes_up_weights_is_lost_soon(
    tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait half an hour for a turn to end, but shows a sign of life meanwhile."""
    monkeypatch.setattr("posttrain.rollout.engines.remote.HEARTBEAT", 0.1)
    monkeypatch.setattr("posttrain.rollout.engines.remote.SILENCE", 1.0)
    monkeypatch.setattr("posttrain.rollout.engines.slot_server.BRIEF", 0.3)
    model, goes_on = llama(), threading.Event()
    with running(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers)
        for name in ("finish_weight_update", "renew"):
            monkeypatch.setattr(servers[0].engine, name, lambda *_: goes_on.wait())
        honest = servers[1].engine.finish_weight_update
        slow = lambda *given: (time.sleep(2.0), honest(*given))[1]  # noqa: E731
        monkeypatch.setattr(servers[1].engine, "finish_weight_update", slow)
        sampler.servers.renew()
        assert [server.url for server in sampler.servers.live] == [servers[1].url], "slow is not lost"
        assert servers[1].engine.version == 1
        goes_on.set()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_run_that_was_paused_for_long_goes_on(
    tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ahead: bool
) -> None:
    """As after a laptop's sleep: both servers have forgotten the run in the middle of a rollout."""
    monkeypatch.setattr(rollout_engine, "LOOK", 0.05)
    model = llama()
    expected = serve(local(tiny_chat, model), PARAMS, 8, ROWS, TURNS)[0]
    with running(tiny_chat, 2) as servers:
        sampler = connected(tiny_chat, model, servers)
        sampler.ahead = ahead
        sampler.servers.renew()
        begun, told, over = sampler._begin, [], threading.Event()

        def begin(turns: Any) -> None:
            told.append(len(turns))
            if len(told) == 3:
                for server in servers:
                    server.engine.end_session(server.engine._session)
            begun(turns)

        def rescue() -> None:  # as the thread does that learns
            while ahead and not over.wait(0.05):
                sampler.servers.rescue()

        sampler._begin = begin
        learner = threading.Thread(target=rescue)
        learner.start()
        same(serve(sampler, PARAMS, 8, ROWS, TURNS)[0], expected, 1e-5)
        over.set()
        learner.join()
        assert len(sampler.servers.live) == 2 and capsys.readouterr().err.count("is back") == 2
        assert [server.engine.version for server in servers] == [1, 1], "with the weights of the run"


def test_a_run_that_falls_silent_leaves_nothing_behind(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_engine, "LOOK", 0.05)
    monkeypatch.setattr("posttrain.rollout.engines.remote.HEARTBEAT", 1e9)
    with running(tiny_chat) as servers:
        sampler = connected(tiny_chat, llama(), servers)
        sampler.sample(sampler.open(ROWS), PARAMS, [0] * len(ROWS))
        engine = servers[0].engine
        assert len(engine._known) == len(ROWS)
        monkeypatch.setattr(rollout_engine, "IDLE", 0.0)
        until(lambda: not engine._known and not engine.sampler._slot)
        assert engine._session, "conversations that nobody goes on with are dropped, the run is not"
        monkeypatch.setattr(rollout_engine, "LEASE", 0.0)
        until(lambda: not engine._session)
        monkeypatch.setattr(rollout_engine, "LEASE", 30.0)
        with pytest.raises(Lost, match="does not know this run"):
            sampler.servers.live[0].still_here()


def until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_plays_for_one_run_until_that_has_ended(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LEASE", -5.0)  # the second run does not wait for the end of the first
    with running(tiny_chat) as servers:
        first = connected(tiny_chat, llama(), servers)
        with pytest.raises(UserError, match="another run has this server"):
            connected(tiny_chat, llama(), servers)
        first.servers.destroy()
        same(
            serve(connected(tiny_chat, llama(), servers), PARAMS, 8, ROWS, TURNS)[0],
            serve(local(tiny_chat, llama()), PARAMS, 8, ROWS, TURNS)[0],
        )


def test_of_two_runs_that_wait_for_a_free_server_one_gets_it(tiny_chat: Chat) -> None:
    model = llama()
    engine = rollout_engine.Engine(SlotSampler(model, [tiny_chat.stop_id], tiny_chat.pad_id), tiny_chat, "tiny")
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    wanted = {
        "architecture": client.architecture(model), "shapes": shapes, "stop_ids": [tiny_chat.stop_id],
        "pad_id": tiny_chat.pad_id, "longest": 64,
    }  # fmt: skip
    outcomes: list[str] = []

    def begin(session: str) -> None:
        try:
            outcomes.append(engine.begin_session(wanted, session)["session"])
        except rollout_engine.Refused as error:
            outcomes.append(str(error))

    engine._writing = {0}  # the last turn of a run before them
    both = [threading.Thread(target=begin, args=(session,)) for session in ("a", "b")]
    for run in both:
        run.start()
    until(lambda: len(engine._changed._waiters) == 2)  # type: ignore[attr-defined]
    with engine._changed:
        engine._writing.clear()
        engine._changed.notify_all()
    for run in both:
        run.join()
    assert engine._session == outcomes[0] and "another run has this server" in outcomes[1]


def test_what_does_not_fit_is_said_before_anything_is_played(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tiny_chat, token="open sesame") as servers:
        with pytest.raises(UserError, match="asks for its token: set the environment variable ROLLOUT_SERVER_TOKEN"):
            connected(tiny_chat, llama(), servers)
        monkeypatch.setenv(client.TOKEN, "open sesame")
        with pytest.raises(UserError, match=r"has other weights \(model.embed_tokens.weight, lm_head.weight\)"):
            connected(tiny_chat, llama(vocabulary=600), servers)
        otherwise = llama()
        otherwise.config.rms_norm_eps = 0.1
        with pytest.raises(UserError, match=r"cannot play for this run: .*another config.json \(rms_norm_eps\)"):
            connected(tiny_chat, otherwise, servers)
        other = copy.copy(tiny_chat)
        other.tokenizer = copy.deepcopy(tiny_chat.tokenizer)
        other.tokenizer.add_tokens(["new"])
        with pytest.raises(UserError, match=r"has another vocabulary: it serves tiny\. Start it with --model"):
            connected(other, llama(), servers)
        monkeypatch.setattr(rollout_engine, "PROTOCOL", 7)
        with pytest.raises(UserError, match=r"another version of this program \(it speaks protocol 7, this run 2\)"):
            connected(tiny_chat, llama(), servers)
        monkeypatch.setattr(rollout_engine.Engine, "about", lambda self: {"hello": 1})
        with pytest.raises(UserError, match="is no rollout server of this project"):
            connected(tiny_chat, llama(), servers)
    with pytest.raises(UserError, match=f"There is no rollout server at {servers[0].url} .ConnectionRefused"):
        connected(tiny_chat, llama(), servers)


GOOD = {"close": [], "open": [[0, [5, 6]]], "append": [], "turns": [[0, 1]], "params": vars(PARAMS), "in_step": True}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"open": [[0, []]]}, "cannot be opened"),
    ({"open": [[0, [5]], [0, [5]]]}, "cannot be opened"),
    ({"open": [[0, [512]]]}, "below 512"),
    ({"open": [[0, [True]]]}, "below 512"),
    ({"open": [[-1, [5]]]}, "no number"),
    ({"open": [[0, [5] * 505]]}, "becomes too long"),
    ({"open": []}, "conversation 0 is not open"),
    ({"append": [[1, [5]]]}, "conversation 1 is not open"),
    ({"close": [3]}, "that is to be closed"),
    ({"turns": [[0, 1], [0, 2]]}, "two turns"),
    ({"turns": [[0, 1 << 63]]}, "no number"),
    ({"params": None}, "the request is none"),
    ({"params": {**vars(PARAMS), "max_new_tokens": 1.5}}, "max_new_tokens is 1.5"),
    ({"params": {**vars(PARAMS), "temperature": float("nan")}}, "beyond their limits"),
    ({"params": {**vars(PARAMS), "more": 1}}, "the request is none"),
]


def test_a_server_that_comes_back_with_another_token_is_lost(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(client.TOKEN, "first")
    with running(tiny_chat, token="first") as servers:
        server = connected(tiny_chat, llama(), servers).servers.live[0]
        servers[0].server.token = "second"
        with pytest.raises(Lost, match="token is missing or another one"):
            server.still_here()
        with pytest.raises(UserError, match=f"asks for its token: set the environment variable {client.TOKEN}"):
            connected(tiny_chat, llama(), servers)


@pytest.mark.parametrize("token", ["", "secret"])
def test_no_website_has_it(tiny_chat: Chat, token: str) -> None:
    """Neither a page's own request, nor one to a name of the website that leads to this machine."""
    with running(tiny_chat, token=token) as (server,):
        key = {"Authorization": f"Bearer {token}"}
        assert ask(f"{server.url}/health", None, 10, key) == b'{"status": "ok"}'
        named = [{"Origin": "https://evil.example"}, {"Origin": server.url}]
        for headers in named if token else [*named, {"Host": "evil.example"}]:
            for body in (None, b"{}"):
                with pytest.raises(BadStatus) as refused:
                    ask(f"{server.url}/health", body, 10, key | headers)
                assert refused.value.status == 403


def test_a_request_is_done_as_a_whole_or_refused(tiny_chat: Chat) -> None:
    with running(tiny_chat) as servers:
        server = connected(tiny_chat, llama(), servers).servers.live[0]
        for change_of, words in BAD:
            with pytest.raises(Lost, match=words):
                server._ask("/converse", GOOD | change_of)
            assert not servers[0].engine._known, change_of
        assert len(server._ask("/converse", GOOD)["written"]) == 1
        with pytest.raises(Lost, match="cannot be opened"):
            server._ask("/converse", GOOD)
        with pytest.raises(Lost, match="nothing is at /nowhere"):
            server._ask("/nowhere", {})
        with pytest.raises(Lost, match="no JSON object"):
            server._ask("/converse", [])


def test_weights_arrive_whole_or_not_at_all(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tiny_chat) as servers:
        server = connected(tiny_chat, llama(), servers).servers.live[0]
        before = servers[0].engine.sampler.model.lm_head.weight.clone()
        (whole,) = chunks(merged_weights(llama()))
        with pytest.raises(Lost, match="no weight update has been started"):
            server.update_weights(save(whole))
        server.start_weight_update()
        for tensors, words in [
            ({"x": torch.zeros(2)}, "x is no tensor of this model"),
            ({"lm_head.weight": torch.zeros(2)}, "another shape"),
        ]:
            with pytest.raises(Lost, match=words):
                server.update_weights(save(tensors))
        with pytest.raises(Lost, match="not of safetensors"):
            server.update_weights(b"x" * 100)
        server.update_weights(save({"lm_head.weight": whole["lm_head.weight"]}))
        with pytest.raises(Lost, match="tensors have not been sent"):
            server.finish_weight_update(1)
        monkeypatch.setattr(client, "digest", lambda body: "0")
        with pytest.raises(Lost, match="checksum"):
            server.update_weights(save(whole))
        monkeypatch.setattr(rollout_server, "SPARE", -servers[0].engine.largest)
        with pytest.raises(Lost, match="a request may have 0 bytes"):
            server.update_weights(save(whole))
        assert torch.equal(servers[0].engine.sampler.model.lm_head.weight, before)


def test_a_pause_holds_turns_until_the_server_goes_on(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_engine, "LONG_POLL", 0.2)
    with running(tiny_chat) as servers:
        sampler = connected(tiny_chat, llama(), servers)
        sampler.servers.renew()
        server = sampler.servers.live[0]
        sampler.servers.pause()
        assert server.ask(Work(open={0: [5, 6]}), PARAMS, False) == []
        assert server._ask("/converse", GOOD | {"open": []})["written"] == []
        sampler.servers.resume()
        assert len(server._ask("/converse", {**GOOD, "open": [], "turns": []})["written"]) == 1


def test_an_engine_that_fails_says_so(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error")

    with running(tiny_chat) as servers:
        sampler = connected(tiny_chat, llama(), servers)
        monkeypatch.setattr(servers[0].engine.sampler, "converse", fail)
        with pytest.raises(UserError, match="its engine has failed: RuntimeError: CUDA error"):
            sampler.sample(sampler.open(ROWS), PARAMS, [0] * len(ROWS))


def test_it_has_the_shape_of_trls_weight_transfer(tiny_chat: Chat) -> None:
    for name in ("init_weight_transfer", "pause", "send_weights", "resume", "destroy"):
        assert callable(getattr(SlotServers, name))
    with running(tiny_chat) as servers:
        answers = {path: json.loads(ask(servers[0].url + path, None, 5)) for path in ("/health", "/get_world_size")}
    assert answers["/get_world_size"] == {"world_size": 1}, "as vLLM says it"


def test_the_command_refuses_what_cannot_work(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "tiny")
    with pytest.raises(UserError, match=f"--model {tmp_path} is no model"):
        rollout_server.main(["--model", str(tmp_path)])
    with pytest.raises(UserError, match=r"lets others reach this server.* ROLLOUT_SERVER_TOKEN"):
        rollout_server.main(["--model", str(tmp_path / "tiny"), "--host", "0.0.0.0", "--port", "0"])
    with closing(listen("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = python("-m", "posttrain.rollout_server", "--model", str(tmp_path / "tiny"), "--port", port)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"Nothing can listen at 127.0.0.1, port {port}" in " ".join(result.stderr.split())
