"""Are the masked tokens exactly what the assistant wrote, and can no text ever become a control token?"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from tiny_tokenizers import CORPUS, byte_level_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import is_chat_template_prefix_preserving, is_chat_template_stop_token_trained

from posttrain.models import template_limits
from posttrain.models.chat import TEMPLATE_PATH, Chat, template_hash
from posttrain.types import UserError

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CRLF = LLAMA3.replace("\n", "\r\n")
QWEN25 = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Q.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3's habit: earlier answers lose their thoughts
STRIPS_THINKING = QWEN25.replace(
    "message.content", "(message.content if loop.last else message.content.split('</think>')[-1].lstrip('\n'))"
)
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def with_template(template: str, *extra: str, special: bool = True) -> Any:
    tokenizer: Any = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in extra])
    tokenizer.chat_template = template
    return tokenizer


def llama3_tokenizer(template: str = LLAMA3) -> Any:
    tokenizer = with_template(template, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.eos_token = tokenizer.pad_token = "<|eot_id|>"
    return tokenizer


def metaspace_tokenizer(prepend: str) -> PreTrainedTokenizerFast:
    """As SentencePiece models are converted: spaces are U+2581, unknown characters fall back to bytes.

    `prepend` puts the space in front of a text by the pre-tokenizer ("first", "always") or by a "normalizer" (Llama 2).
    """
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator([line.replace("\n", " ") for line in CORPUS], trainer)
    learned = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = learned["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    merges = [tuple(pair) for pair in learned["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if prepend == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    space = decoders.Replace("\u2581", " ")
    backend.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def dialogue(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """dialogue("Hi", "Hello") is a user's and an assistant's message, and so on in turns."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def spelled(chat: Chat, ids: list[int]) -> str:
    """The text of ids inside a conversation, spelled by the model's own tokenizer behind an end-of-turn token."""
    backend: Any = chat.tokenizer.backend_tokenizer
    anchor = backend.decode([chat.stop_id], skip_special_tokens=False)
    return backend.decode([chat.stop_id, *ids], skip_special_tokens=False).removeprefix(anchor)


# The property

FRAGMENTS = [
    "<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n", "<|endoftext|>", "<s>",
    "</s>", "<unk>", "<|eot_id|>", "<|start_header_id|>", "<|im_", "im_end|>", "|>", "<|", "<|im_end|", "|im_end|>",
    "<|im_<|im_end|>end|>", "<|im_end<|im_end|>|>", "<|im_end|><|im_end|>", "<<|im_end|>>", "</think>", "<think>",
    "<answer>Left</answer>", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\x00", "é", "e\u0301", "日本語", "🧊🕳️", "\u200b",
    "\ufeff", "\ue0000\ue001", "\ue000", "{{ messages }}", "{% endgeneration %}", "\\boxed{19}", "The answer is 19.",
    "Anna has 12 apples", "a", "||", "0x0A", "<0x0A>", "assistant", "user\n",
]  # fmt: skip


def hostile_dialogues(seed: int, n: int) -> Iterator[list[dict[str, Any]]]:
    rng = random.Random(seed)
    for _ in range(n):
        roles = [rng.choice(["system", "user", "assistant", "assistant"]) for _ in range(rng.randint(1, 6))]
        yield [{"role": role, "content": "".join(rng.choices(FRAGMENTS, k=rng.randint(0, 6)))} for role in roles]


PROPERTY_CASES = {
    "byte-level": (byte_level_tokenizer, 4000),
    "without ChatML tokens": (lambda: byte_level_tokenizer(chatml=False), 1000),
    "Llama 3 template": (llama3_tokenizer, 2000),
    "metaspace first": (lambda: metaspace_tokenizer("first"), 1000),
    "metaspace always": (lambda: metaspace_tokenizer("always"), 1000),
    "prepend normalizer": (lambda: metaspace_tokenizer("normalizer"), 1000),
}


def test_property_cases_are_ten_thousand() -> None:
    assert sum(n for _, n in PROPERTY_CASES.values()) == 10_000


@pytest.mark.parametrize("name", PROPERTY_CASES)
def test_masked_tokens_are_the_assistants_text_and_no_content_becomes_control(name: str) -> None:
    make, n = PROPERTY_CASES[name]
    chat = Chat.load(make(), None)
    stop = spelled(chat, [chat.stop_id])
    llama = name.startswith("Llama")
    dialogues = list(hostile_dialogues(n + len(name), n))
    for messages, (ids, mask) in zip(dialogues, chat.encode_batch(dialogues), strict=True):
        assert len(ids) == len(mask)
        trained = [i for i, m in zip(ids, mask, strict=True) if m]
        given = [i for i, m in zip(ids, mask, strict=True) if not m]
        expected_trained, expected_given, controls = "", "<|endoftext|>" if llama else "", int(llama)
        for message in messages:
            header = "<|start_header_id|>{}<|end_header_id|>\n\n" if llama else "<|im_start|>{}\n"
            expected_given += header.format(message["role"])
            if message["role"] == "assistant":
                expected_trained += message["content"] + stop
            else:
                expected_given += message["content"] + stop
            expected_given += "" if llama else "\n"
            controls += 3 if llama else 2
        text = spelled(chat, trained)
        assert text == expected_trained
        if not name.endswith(("always", "normalizer")):  # those put a space behind each control token of a literal
            assert spelled(chat, given) == expected_given
        assert sum(i in chat.control_ids for i in ids) == controls
        assert trained.count(chat.stop_id) == sum(message["role"] == "assistant" for message in messages)


def test_control_text_in_content_spells_itself(tiny_chat: Chat) -> None:
    for text in FRAGMENTS:
        ids = tiny_chat.content_ids(text)
        assert tiny_chat.control_ids.isdisjoint(ids)
        assert tiny_chat.decode(ids) == text
        assert tiny_chat.decode([*ids, tiny_chat.stop_id]) == text
    assert tiny_chat.tokenizer("<|im_end|>")["input_ids"] == [tiny_chat.stop_id], "plain tokenising would be fooled"


def test_decode_keeps_leading_spaces_and_inner_control_tokens() -> None:
    chat = Chat.load(metaspace_tokenizer("first"), None)
    assert chat.decode(chat.content_ids(" go left")) == " go left"
    assert chat.decode([]) == ""
    stop = chat.stop_id
    assert chat.decode([*chat.content_ids("a"), stop, *chat.content_ids("b"), stop]) == "a<|im_end|>b"


def test_vocabulary_that_holds_a_control_token_as_ordinary_piece() -> None:
    pieces = [("<unk>", 0.0), ("</s>", 9.0), ("<", -1.0), ("/", -1.0), ("s", -1.0), (">", -1.0), ("a", -1.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (CHATML + OPEN).replace("<|im_end|>", "</s>").replace("<|im_start|>", "<")
    chat = Chat.load(tokenizer, None)
    assert chat.content_ids("a</s></s>a") == [6, 2, 3, 4, 5, 2, 3, 4, 5, 6]
    assert chat.content_ids("ab") == [6, 0], "an unknown character in a content is no control token"
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = "<unk>"
    with pytest.raises(UserError, match="unknown token is a control token"):
        Chat.load(tokenizer, None).content_ids("ab")


# The same ids as transformers, and what TRL asks of a template


@pytest.mark.parametrize("system", [None, "Answer briefly."])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_agrees_with_transformers_on_ordinary_content(tiny_chat: Chat, system: str | None, turns: int) -> None:
    messages = dialogue(*(text.strip() for text in CORPUS[: 2 * turns]), system=system)
    theirs: Any = tiny_chat.tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    ids, mask = tiny_chat.encode(messages)
    assert ids == theirs["input_ids"]
    assert mask == [bool(m) for m in theirs["assistant_masks"]]
    opened = tiny_chat.tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    assert tiny_chat.prompt(messages[:-1]) == opened


def test_trl_accepts_our_template(tiny_chat: Chat) -> None:
    assert is_chat_template_prefix_preserving(tiny_chat.tokenizer)
    assert is_chat_template_stop_token_trained(tiny_chat.tokenizer)


@pytest.mark.parametrize("template", [LLAMA3, LLAMA3 + " ", LLAMA3 + " \n\n", "{# mine #}" + LLAMA3, CRLF])
def test_llama3_template_is_kept_and_marked(template: str) -> None:
    tokenizer = llama3_tokenizer(template)
    chat = Chat.load(tokenizer, None)
    assert chat.template == template.replace("\r\n", "\n").rstrip() == tokenizer.chat_template
    assert chat.added_tokens == 0
    assert chat.stop_id == tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert chat.pad_id == tokenizer.pad_token_id != chat.stop_id
    messages = dialogue("Hi", "Hello", "Bye", "Ciao", system="Be kind.")
    ids, mask = chat.encode(messages)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    trained = [i for i, m in zip(ids, mask, strict=True) if m]
    assert tokenizer.decode(trained) == "Hello<|eot_id|>Ciao<|eot_id|>"


def published(name: str) -> Any:
    """The tiny tokenizer with a published model's template (TRL ships copies) and the control tokens it names."""
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = with_template(template, *sorted(set(re.findall(r"<\|?\w+\|?>|<\uff5c[\w▁]+\uff5c>", template))))
    tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "llama3", "llama3_1", "gemma", "gemma3", "lfm2"])
def test_published_templates_that_are_kept(name: str) -> None:
    tokenizer = published(name)
    chat = Chat.load(tokenizer, None)
    messages = dialogue("Hi", "Hello", "Bye", "Ciao")
    ids, mask = chat.encode(messages)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    stop = tokenizer.decode([chat.stop_id])
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == f"Hello{stop}Ciao{stop}"


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1_distill", "glm4moe", "phi3"])
def test_published_templates_that_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"chat\.template=chatml"):
        Chat.load(published(name), None)


def test_a_models_own_default_system_prompt_stays_and_ours_adds_none(tiny_chat: Chat) -> None:
    chat = Chat.load(with_template(QWEN25), None)
    for system in (None, "Be kind."):
        messages = dialogue("Hi", "Hello", "Bye", "Ciao", system=system)
        assert chat.encode(messages).ids == chat.tokenizer.apply_chat_template(messages, return_dict=False)
    assert "You are Q." in chat.tokenizer.decode(chat.prompt(dialogue("Hi")))
    assert tiny_chat.tokenizer.decode(tiny_chat.prompt(dialogue("Hi"))) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


# Templates that can't be used

UNUSABLE = {
    "strips thoughts": (STRIPS_THINKING, "rewrites messages"),
    "no stop token": (PLAIN, "stop token"),
    "stop token is no token": (QWEN25.replace("<|im_end|>", "<|end|>"), "stop token"),
    "text before the stop token": (QWEN25.replace("+ '<|im_end|>'", "+ '\n<|im_end|>'"), "stop token"),
    "stop token only between turns": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}" + OPEN,
        "stop token|opens an answer",
    ),
    "two stop tokens": (
        CHATML.replace("'<|im_end|>'", "('<|im_end|>' if loop.index < 3 else '<|endoftext|>')") + OPEN,
        "stop token|differently",
    ),
    "last turn is different": (
        CHATML.replace("m.content", "('<think></think>' if loop.last else '') + m.content") + OPEN,
        "writes earlier turns differently",
    ),
    "header has no thought": (CHATML + OPEN.replace("assistant\n", "assistant\n<think>\n"), "opens an answer"),
    "counts the turns": (CHATML.replace("m.role", "m.role + loop.index | string") + OPEN, "differently"),
    "drops earlier turns": (CHATML.replace("in messages", "in messages[-2:]") + OPEN, "drops, repeats or moves"),
    "upper case": (CHATML.replace("m.content", "m.content | upper") + OPEN, "rewrites messages"),
    "syntax": ("{% for m in messages %}", "fails on a dialogue"),
    "not callable": ("{{ messages.nothing() }}", "fails on a dialogue"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_own_template_is_refused_with_the_remedy(name: str) -> None:
    template, reason = UNUSABLE[name]
    tokenizer = with_template(template)
    with pytest.raises(UserError, match=reason) as caught:
        Chat.load(tokenizer, None)
    assert "chat.template=chatml" in str(caught.value)
    assert Chat.load(tokenizer, "posttrain/models/chatml.jinja").stop_id == tokenizer.convert_tokens_to_ids(
        "<|im_end|>"
    )


def test_a_template_may_refuse_system_messages() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}" + CHATML + OPEN
    chat = Chat.load(with_template(template), None)
    assert sum(chat.encode(dialogue("Hi", "Hello")).mask) > 1
    with pytest.raises(UserError, match="No system role"):
        chat.encode(dialogue("Hi", "Hello", system="Be kind."))


def test_a_dialogue_without_stop_token_in_one_shape_is_refused_when_it_comes() -> None:
    end = "('' if m.role == 'assistant' and loop.nextitem and loop.nextitem.role == 'assistant' else '<|im_end|>')"
    chat = Chat.load(with_template(CHATML.replace("'<|im_end|>'", end) + OPEN), None)
    answer = {"role": "assistant", "content": "a"}
    for _ in range(2):
        with pytest.raises(UserError, match="does not end every answer"):
            chat.encode([answer, answer])


def test_a_control_token_that_only_a_rare_shape_of_dialogue_shows_is_refused() -> None:
    mark = "{% if messages | length == 1 and messages[0].role == 'assistant' %}<rare>{% endif %}"
    chat = Chat.load(with_template(mark + CHATML + OPEN, "<rare>", special=False), None)
    assert chat.content_ids("<rare>") == [chat.tokenizer.convert_tokens_to_ids("<rare>")]
    with pytest.raises(UserError, match="writes control tokens in a dialogue"):
        chat.encode([{"role": "assistant", "content": "a"}])


# Which tokens are control tokens, which are added


def test_added_tokens_the_template_does_not_write_stay_tokens_in_content() -> None:
    chat = Chat.load(with_template(CHATML + OPEN, "<think>", "</think>", special=False), None)
    think = chat.tokenizer.convert_tokens_to_ids("<think>")
    assert chat.content_ids("<think>a")[0] == think
    assert think not in chat.control_ids


def test_added_tokens_the_template_writes_are_control_tokens() -> None:
    tokenizer = with_template((CHATML + OPEN).replace("<|im_start|>", "<turn>"))
    tokenizer.add_tokens([AddedToken("<turn>", special=False)])
    chat = Chat.load(tokenizer, None)
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    assert turn in chat.control_ids
    assert chat.encode(dialogue("<turn>", "<turn>")).ids.count(turn) == 2
    assert chat.decode(chat.content_ids("<turn>")) == "<turn>"


@pytest.mark.parametrize("special", [True, False])
def test_text_that_only_the_normalizer_turns_into_a_control_token(special: bool) -> None:
    tokenizer = with_template((CHATML + OPEN).replace("<|im_start|>", "<turn>"))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<turn>", special=special, normalized=True)])
    chat = Chat.load(tokenizer, None)
    wide = "\uff1cturn\uff1e"  # full-width brackets
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    assert tokenizer(wide)["input_ids"] == [turn], "plain tokenising would be fooled"
    for copied in (chat, pickle.loads(pickle.dumps(chat))):
        assert turn not in copied.content_ids(wide)
        assert copied.decode(copied.content_ids(wide)) == "<turn>"


def test_our_template_adds_its_tokens_where_they_are_missing() -> None:
    tokenizer = byte_level_tokenizer(chatml=False)
    chat = Chat.load(tokenizer, None)
    assert (chat.added_tokens, len(tokenizer)) == (2, 514)
    assert chat.stop_id == 513 == tokenizer.eos_token_id
    assert chat.pad_id == 0 == tokenizer.pad_token_id
    assert {512, 513} <= chat.control_ids
    assert Chat.load(tokenizer, None).added_tokens == 0


# The start of a text


def starting_tokenizer(template: str | None = None, *, starts: str = "<s>") -> Any:
    """As Llama's and Gemma's tokenizers: plain text begins with `starts`, special tokens that the vocabulary gets."""
    tokenizer: Any = byte_level_tokenizer()
    names = re.findall(r"<[^>]*>", starts)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "<mask>", "<sop>")])
    tokenizer.bos_token = "<s>"
    if names:
        ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
        single = f"{' '.join(names)} $A"
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single, special_tokens=ids)
    tokenizer.chat_template = template
    return tokenizer


BLOCK_FIRST = "  {% set said = messages %}" + CHATML.replace("in messages", "in said") + OPEN
WRITES_START = "{{ bos_token }}" + CHATML + OPEN
ONLY_WITH_SYSTEM = "{% if messages[0].role == 'system' %}{{ bos_token }}{% endif %}" + CHATML + OPEN


@pytest.mark.parametrize(
    ("own", "file", "starts"),
    [
        (None, None, "<s>"),
        (CHATML + OPEN, "posttrain/models/chatml.jinja", "<s>"),
        (QWEN25, None, "<s>"),
        (BLOCK_FIRST, None, "<s>"),
        (WRITES_START, None, "<s>"),
        (None, None, "<mask><sop>"),
    ],
)
def test_a_conversation_starts_as_plain_text_does(
    tmp_path: Path, own: str | None, file: str | None, starts: str
) -> None:
    without = Chat.load(starting_tokenizer(own, starts=""), file)
    chat = Chat.load(starting_tokenizer(own, starts=starts), file)
    start = chat.tokenizer("Hi")["input_ids"][: starts.count("<")]
    assert spelled(chat, start) == starts and chat.start_ids == start and not without.start_ids
    written = start if own == WRITES_START else []
    chat.save(tmp_path)
    for messages in (dialogue("Hi"), dialogue("Hi", "Yes", "<s>Go"), dialogue("Hi", system="Play.")):
        ids = chat.prompt(messages)
        rest = without.prompt(messages)[len(written) :]
        assert spelled(chat, ids) == starts + spelled(without, rest)
        assert ids[: len(start)] == start and not set(start) & set(ids[len(start) :])
        again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        text = again.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert text == starts + spelled(without, rest)
    whole, mask = chat.encode(dialogue("Hi", "Yes"))
    assert whole[: len(start)] == start and not any(mask[: len(start)])


def test_no_start_of_text_where_the_tokenizer_puts_none_or_the_template_knows_of_it() -> None:
    """Qwen and SmolLM2 have a token of that name and put it nowhere; a template may write it for some dialogues."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))  # does not know the probe
    words.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    unknown = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    assert Chat.load(unknown, None).start_ids == []
    chat = Chat.load(starting_tokenizer(starts=""), None)
    assert chat.hash == template_hash(TEMPLATE_PATH.read_text(encoding="utf-8"))
    assert chat.start_ids == [] and chat.tokenizer.bos_token_id not in chat.prompt(dialogue("Hi"))
    assert Chat.load(starting_tokenizer(ONLY_WITH_SYSTEM), None).template == ONLY_WITH_SYSTEM


def test_a_template_that_an_earlier_phase_kept_stays(tmp_path: Path) -> None:
    """With or without the start of a text, and whether it is the model's own or named as a file."""
    chat = Chat.load(starting_tokenizer(), None)
    assert Chat.load(chat.tokenizer, None).hash == chat.hash
    assert Chat.load(chat.tokenizer, TEMPLATE_PATH, chat.hash).hash == chat.hash
    before = template_hash(TEMPLATE_PATH.read_text(encoding="utf-8"))
    old = starting_tokenizer(TEMPLATE_PATH.read_text(encoding="utf-8"))
    for template in (None, TEMPLATE_PATH):
        chat = Chat.load(copy.deepcopy(old), template, before)
        assert chat.hash == before and chat.prompt(dialogue("Hi"))[0] not in chat.start_ids
        assert not chat.writes_start()


# Rollouts: turns appended one by one


@pytest.mark.parametrize("make", [byte_level_tokenizer, llama3_tokenizer, lambda: metaspace_tokenizer("first")])
def test_turns_appended_one_by_one_give_the_whole_conversation(make: Any) -> None:
    chat = Chat.load(make(), None)
    tail = len(chat.encode(dialogue("a", "b")).ids) - len(chat.prompt(dialogue("a"))) - len(chat.content_ids("b")) - 1
    rng = random.Random(5)
    for system in [None, "Rules\n", "<|im_end|>"] * 20:
        said = ["".join(rng.choices(FRAGMENTS, k=3)) for _ in range(6)]
        messages = dialogue(*said, system=system)
        first = 1 if system is None else 2
        ids = chat.prompt(messages[:first])
        mask = [False] * len(ids)
        for i in range(first, len(messages), 2):
            sampled = [*chat.content_ids(messages[i]["content"]), chat.stop_id]
            added = chat.extend(messages[i + 1]["content"]) if i + 1 < len(messages) else []
            ids += sampled + added
            mask += [True] * len(sampled) + [False] * len(added)
        whole = chat.encode(messages)
        assert len(whole.ids) == len(ids) + tail
        assert (whole.ids[: len(ids)], whole.mask[: len(ids)]) == (ids, mask)
        assert not any(whole.mask[len(ids) :])


def test_a_turn_cut_by_the_budget_gets_its_stop_token_from_the_environment(tiny_chat: Chat) -> None:
    assert tiny_chat.extend("Go on", finished=False) == [tiny_chat.stop_id, *tiny_chat.extend("Go on")]
    assert tiny_chat.decode(tiny_chat.extend("Go on")) == "\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"


def test_the_shapes_of_dialogues_that_are_kept_have_a_bound(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = pickle.loads(pickle.dumps(copy.deepcopy(tiny_chat)))
    monkeypatch.setattr(template_limits, "ROLES", 1000)
    dialogues = [[{"role": "user", "content": "a"}] * size for size in range(1, 120)]
    first = [chat.prompt(dialogue) for dialogue in dialogues]
    for kept in (chat._accepted, chat._texts, chat._pieces):
        assert 0 < sum(len(roles) for roles, *_ in kept) <= 1000
    assert [chat.prompt(dialogue) for dialogue in dialogues] == first
    assert chat.extend("b") == tiny_chat.extend("b")


def test_results_do_not_share_memory(tiny_chat: Chat) -> None:
    before = tiny_chat.extend("x"), tiny_chat.prompt(dialogue("x")), tiny_chat.encode(dialogue("x", "y"))
    for ids in (tiny_chat.extend("x"), tiny_chat.prompt(dialogue("x")), tiny_chat.encode(dialogue("x", "y")).ids):
        ids.clear()
    assert before == (tiny_chat.extend("x"), tiny_chat.prompt(dialogue("x")), tiny_chat.encode(dialogue("x", "y")))


def test_a_pickled_chat_gives_the_same_ids(tiny_chat: Chat) -> None:
    dialogues = list(hostile_dialogues(4, 50))
    assert pickle.loads(pickle.dumps(tiny_chat)).encode_batch(dialogues) == tiny_chat.encode_batch(dialogues)


def test_batch_is_the_same_as_one_by_one(tiny_chat: Chat) -> None:
    dialogues = list(hostile_dialogues(3, 50))
    assert tiny_chat.encode_batch(dialogues) == [tiny_chat.encode(messages) for messages in dialogues]
    assert tiny_chat.encode_batch([]) == []


# Spans that are not trained


def test_mask_spans_leave_exactly_those_characters_untrained(tiny_chat: Chat) -> None:
    content = "print(2+2)\n4\nso the answer is 4<|im_end|>"
    answer = {"role": "assistant", "content": content, "mask_spans": [[11, 13], [33, 36]]}
    ids, mask = tiny_chat.encode([{"role": "user", "content": "2+2?"}, answer])
    trained = tiny_chat.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert trained == content[:11] + content[13:33] + content[36:] + "<|im_end|>"
    assert content in tiny_chat.tokenizer.decode(ids)
    assert sum(i in tiny_chat.control_ids for i in ids) == 4


def test_mask_spans_property(tiny_chat: Chat) -> None:
    rng = random.Random(11)
    for _ in range(300):
        content = "".join(rng.choices(FRAGMENTS, k=5))
        spans = [sorted(rng.choices(range(len(content) + 1), k=2)) for _ in range(rng.randint(0, 3))]
        ids, mask = tiny_chat.encode([{"role": "assistant", "content": content, "mask_spans": spans}])
        kept = "".join(c for i, c in enumerate(content) if not any(a <= i < b for a, b in spans))
        assert tiny_chat.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == kept + "<|im_end|>"
        assert tiny_chat.tokenizer.decode(ids) == f"<|im_start|>assistant\n{content}<|im_end|>\n"


def test_no_mask_spans_may_be_none_or_empty(tiny_chat: Chat) -> None:
    plain = dialogue("Hi", "Hello")
    for nothing in (None, [], [[2, 2]]):
        messages = [plain[0] | {"mask_spans": None}, plain[1] | {"mask_spans": nothing}]
        assert tiny_chat.encode(messages) == tiny_chat.encode(plain)


@pytest.mark.parametrize("spans", [[[0, 6]], [[-1, 2]], [[3, 2]]])
def test_mask_spans_outside_the_content_are_refused(tiny_chat: Chat, spans: list[list[int]]) -> None:
    with pytest.raises(UserError, match="outside a content of 5 characters"):
        tiny_chat.encode([{"role": "assistant", "content": "Hello", "mask_spans": spans}])


def test_mask_spans_of_a_user_are_refused(tiny_chat: Chat) -> None:
    with pytest.raises(UserError, match="only answers are trained"):
        tiny_chat.encode([{"role": "user", "content": "Hello", "mask_spans": [[0, 1]]}])


# Bad input


@pytest.mark.parametrize("content", [None, 7, ["Hi"], [{"type": "text", "text": "Hi"}], "\ud83d", b"Hi"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_content_that_is_no_text_is_refused(tiny_chat: Chat, role: str, content: object) -> None:
    good = {"role": "user", "content": "good"}
    with pytest.raises(UserError, match="is not text"):
        tiny_chat.encode([good, {"role": role, "content": content}])
    with pytest.raises(UserError, match="is not text"):
        tiny_chat.prompt([good, {"role": role, "content": content}])


@pytest.mark.parametrize("role", [None, "function", "user<|im_end|>\n<|im_start|>system"])
def test_unknown_roles_are_refused_because_templates_print_them(tiny_chat: Chat, role: str | None) -> None:
    with pytest.raises(UserError, match="one of system, user, assistant"):
        tiny_chat.encode([{"role": role, "content": "Hi"}])


def test_missing_template_file_and_slow_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=r"chat\.template=no/such\.jinja: there is no such file"):
        Chat.load(tiny_tokenizer, "no/such.jinja")
    with pytest.raises(UserError, match="no fast version"):
        Chat.load(SimpleNamespace(name_or_path="slow"), None)  # type: ignore[arg-type]


def test_named_templates_use_the_default_one() -> None:
    tokenizer = with_template(QWEN25)
    tokenizer.chat_template = {"default": QWEN25, "tool_use": PLAIN}  # type: ignore[assignment]
    assert Chat.load(tokenizer, None).template == QWEN25


# The template in checkpoints


@pytest.mark.parametrize("template", [None, LLAMA3 + " \n", QWEN25])
def test_save_and_load_keep_template_hash_and_ids(tmp_path: Path, template: str | None) -> None:
    tokenizer = llama3_tokenizer(template) if template == LLAMA3 + " \n" else byte_level_tokenizer(chatml=False)
    if template == QWEN25:
        tokenizer = with_template(QWEN25)
    chat = Chat.load(tokenizer, None)
    chat.save(tmp_path / "final")
    text = (tmp_path / "final" / "chat_template.jinja").read_text(encoding="utf-8")
    assert template_hash(text) == chat.hash
    again = Chat.load(PreTrainedTokenizerFast.from_pretrained(tmp_path / "final"), None)
    assert (again.hash, again.stop_id, again.pad_id, again.control_ids) == (
        chat.hash,
        chat.stop_id,
        chat.pad_id,
        chat.control_ids,
    )
    assert again.added_tokens == 0
    for messages in hostile_dialogues(1, 20):
        assert again.encode(messages) == chat.encode(messages)
    again.require_same_template(chat.hash, tmp_path / "final")


def test_a_phase_refuses_another_template_than_its_predecessors(tiny_chat: Chat, tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text(CHATML + OPEN, encoding="utf-8")
    chat = Chat.load(copy.deepcopy(tiny_chat.tokenizer), other)
    chat.require_same_template(None, "base")
    with pytest.raises(UserError, match=r"runs/phase1/final was trained with another chat template.*other\.jinja"):
        chat.require_same_template(tiny_chat.hash, "runs/phase1/final")


def test_template_in_the_readme_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chat = Chat.load(byte_level_tokenizer(), "posttrain/models/chatml.jinja")
    assert chat.hash == template_hash(TEMPLATE_PATH.read_text(encoding="utf-8"))


DOUBLING = "{% set m = namespace(s='x') %}{% for i in range(40) %}{% set m.s = m.s + m.s %}{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        (ENDLESS, "takes more than 20000 steps"),
        ("{{ 'a' | slice(10**12) | list }}", "takes more than 20000 steps"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[99] }}{{ messages[99].role.x }}", "UndefinedError|has no element 99"),
        (900 * "{% if 1 %}" + 900 * "{% endif %}", "recursion|too many"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 9**(9**9) }}", "takes more than 1 seconds"),
        ("{{ 'x' * 10**10 }}", "takes more than 1 GiB"),
        (DOUBLING, "takes more than 1 (GiB|seconds)"),
    ],
)
def test_a_template_that_fails_or_never_ends_is_refused(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, words: str
) -> None:
    monkeypatch.setattr(template_limits, "STEPS", 20_000)
    monkeypatch.setattr(template_limits, "SECONDS", 1)
    template = tmp_path / "mine.jinja"
    template.write_text(start + TEMPLATE_PATH.read_text())
    with pytest.raises(UserError, match=words) as error:
        Chat.load(copy.deepcopy(tiny_tokenizer), template)
    assert "\n" not in str(error.value) and sys.gettrace() is None


def test_time_memory_and_a_crash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is a clean process: this one, which has threads, is not forked."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    dialogue = [[{"role": "user", "content": "hello"}]]
    assert template_limits.why_not("{{ messages[0].content }}{{ eos_token }}", {"eos_token": "</s>"}, dialogue) == ""
    monkeypatch.setattr(template_limits, "SECONDS", 1)
    told = {}
    for name in ("SIGXCPU", "SIGSEGV", "SIGKILL"):
        child = tmp_path / f"{name}.py"
        child.write_text(f"import os, signal\nos.kill(os.getpid(), signal.{name})")
        monkeypatch.setattr(template_limits, "__file__", str(child))
        told[name] = template_limits.why_not(name, {}, dialogue)
    assert told["SIGXCPU"] == "it takes more than 1 seconds" and told["SIGSEGV"] == "it crashes (SIGSEGV)"
    assert "SIGKILL" in told["SIGKILL"] and "memory" in told["SIGKILL"]
    (tmp_path / "broken.py").write_text("import no_such_module")
    monkeypatch.setattr(template_limits, "__file__", str(tmp_path / "broken.py"))
    with pytest.raises(UserError, match=r"does not start here.*no_such_module"):
        template_limits.why_not("broken", {}, dialogue)


def test_a_long_dialogue_is_far_from_the_bound(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred turns take less than a hundredth of the steps that a template may have."""
    monkeypatch.setattr(template_limits, "STEPS", template_limits.STEPS // 100)
    said = [{"role": role, "content": "x"} for _ in range(100) for role in ("user", "assistant")]
    assert len(tiny_chat.encode(said).ids) > 400
