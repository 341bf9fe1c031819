"""What works for a model, and what to write for what does not?  Tried with the functions that the scripts use.

    posttrain check-model Qwen/Qwen3-0.6B
    posttrain check-model models/mine --config phase1_sft model.tuning=lora
    posttrain check-model models/mine chat.template=chatml

A line for each subject, with a mark: `ok`, `slower` (it works, at a price that is named), `does not work`. What depends
on settings is checked for those of the config file and of KEY=VALUE; without a file those of the reference run of
phase 3. Exit code 0 if the model can be trained so, 1 if something of it does not work or is damaged, 2 where there is
no such model, or for other bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.config import DPO_KINDS, DPORun, ModelSection, SFTRun, StarPORun, find_config, read_yaml, resolve, run
from posttrain.types import UserError

if TYPE_CHECKING:
    from posttrain.models import Chat

OK, SLOWER, BROKEN = "ok", "slower", "does not work"
OURS = "chatml"


class Line(NamedTuple):
    mark: str
    subject: str
    words: str

    def __str__(self) -> str:
        return f"{self.mark:<{len(BROKEN)}}  {self.subject:<22}  {self.words}"


def check(cfg: Any) -> Iterator[Line]:
    """All lines for the model of a training config; UserError for a model that cannot be examined."""
    from posttrain.models import model_files
    from posttrain.plan import preflight

    section: ModelSection = cfg.model
    model_files.check_source(section)
    preflight.check_hub([section], [])
    try:
        yield _architecture(section)
    except UserError as problem:
        yield Line(BROKEN, "architecture", f"{problem}{_own_code(section)}")
        return
    try:
        template = _usable_template(section, cfg.chat.template)
    except UserError as problem:
        yield Line(BROKEN, "tokenizer, template", str(problem))
        return
    if template.refused:
        yield Line(BROKEN, "chat template", f"{template.refused} The lines below are for {OURS}.")
    loaded = _load(section, cfg.device, template.file)
    yield loaded.line
    if loaded.net is None:
        return
    if not template.refused:
        yield _template(loaded.chat, cfg.chat.template)
    yield _start(loaded.chat)
    yield from _turns(loaded.chat)
    yield from _tokens(section, loaded.chat)
    yield from _computing(cfg, loaded)
    yield _checkpointing(cfg, loaded.net)
    yield _lora(cfg, loaded.net, loaded.chat)
    yield _context(cfg, section)
    yield _memory(section)


# --------------------------------------------------------------------------------------------------- files and template


def _architecture(section: ModelSection) -> Line:
    from posttrain.models import model_files

    config = model_files.load_config(section)
    kind = f"{config.model_type}, in " + ("the code of the repository" if section.trust_remote_code else "transformers")
    if getattr(config, "auto_map", None) and not section.trust_remote_code:
        kind += "; the code that the model brings along is not run"
    return Line(OK, "architecture", kind)


def _own_code(section: ModelSection) -> str:
    """What to write where a model needs code of its own."""
    from transformers import PreTrainedConfig

    try:
        content, _ = PreTrainedConfig.get_config_dict(section.name_or_path, revision=section.revision)
    except (OSError, ValueError):
        return ""
    if "auto_map" not in content or section.trust_remote_code:
        return ""
    return (
        " Its architecture is code of its own: read it, then write model.trust_remote_code=true and"
        " model.revision=<the 40-digit commit that you have read>."
    )


class _Template(NamedTuple):
    file: str | None  # what the lines that follow are for
    refused: str  # why it is not the one that was asked for


def _usable_template(section: ModelSection, asked: str | None) -> _Template:
    from posttrain import models

    try:
        models.load_chat(section, asked)
    except UserError as problem:
        models.load_chat(section, OURS)  # what fails here as well does not depend on the template
        return _Template(OURS, str(problem))
    return _Template(asked, "")


class _Loaded(NamedTuple):
    line: Line
    net: Any = None
    chat: Any = None


def _load(section: ModelSection, device: str, template: str | None) -> _Loaded:
    """The model as the scripts load it; where its attention alone is refused, with another one."""
    from posttrain import models

    try:
        net, chat = models.load(section, device=device, chat_template=template)
    except UserError as problem:
        plain = section.model_copy(update={"attn_implementation": "eager"})
        if "attn_implementation=eager" not in str(problem) or section.attn_implementation == "eager":
            return _Loaded(Line(BROKEN, "weights", str(problem)))
        net, chat = models.load(plain, device=device, chat_template=template)
        return _Loaded(Line(BROKEN, "attention", f"{problem} The lines below are for that."), net, chat)
    count = sum(parameter.numel() for parameter in net.parameters())
    words = f"{type(net).__name__}, {count / 1e6:.2f} M parameters, safetensors, whole and finite, computed with once"
    return _Loaded(Line(OK, "weights", words), net, chat)


def _template(chat: Chat, asked: str | None) -> Line:
    words = f"that of {asked}" if asked else "the model's own"
    if chat.template.rstrip().endswith(_text_of_ours()):
        added = f", whose {chat.added_tokens} tokens are added: phase 1 has to teach them" if chat.added_tokens else ""
        words = f"{'' if asked else 'the model has none, so '}{OURS}{added}"
    if "strftime_now" in chat.template:
        words += "; it writes today's date, so that every day has other prompts (a copy without it as chat.template)"
    return Line(OK, "chat template", words)


def _text_of_ours() -> str:
    from posttrain.models import TEMPLATE_PATH

    return TEMPLATE_PATH.read_text(encoding="utf-8").rstrip()


def _start(chat: Chat) -> Line:
    """What stands before the first word of a conversation, beside what the tokenizer puts before plain text."""
    tokens = ", ".join(f"{chat.tokenizer.convert_ids_to_tokens(token)} ({token})" for token in chat.start_ids)
    if not tokens:
        return Line(OK, "start of text", "the tokenizer puts no token before plain text, and none is added")
    puts = f"the tokenizer puts {tokens} before plain text"
    written = json.dumps("".join(chat.tokenizer.convert_ids_to_tokens(chat.start_ids)), ensure_ascii=False)
    if chat.template.startswith(f"{{{{- {written} }}}}"):  # as Chat.load puts it
        return Line(OK, "start of text", f"{puts}, and so does the template, which lacked it and got it")
    if chat.prompt([{"role": "user", "content": "Hi"}])[: len(chat.start_ids)] == chat.start_ids:
        return Line(OK, "start of text", f"{puts}, and the template writes it")
    if chat.writes_start():
        return Line(
            OK, "start of text", f"{puts}, but the template writes it only in some dialogues, and is left as it is"
        )
    return Line(OK, "start of text", f"{puts}, but an earlier phase trained without it, so it stays out")


def _turns(chat: Chat) -> Iterator[Line]:
    """What a rollout does with a conversation, turn by turn, against the whole that training reads."""
    asks, thinks, replies = "Which way?", "<think>\nThe ice is left.\n</think>\n\nRight", "And now?"
    roles = ("user", "assistant", "user", "assistant")
    whole = [{"role": role, "content": text} for role, text in zip(roles, (asks, thinks, replies, "Up"), strict=True)]
    encoded = chat.encode(whole)
    said = [n for n, on in enumerate(encoded.mask) if on]
    spans = [[*chat.content_ids(text), chat.stop_id] for text in (thinks, "Up")]
    if [encoded.ids[n] for n in said] == spans[0] + spans[1]:
        yield Line(OK, "assistant mask", "exactly what the assistant says, and the token that ends it, is trained on")
    else:
        yield Line(
            BROKEN, "assistant mask", "what is marked is not what the assistant says. Write chat.template=" + OURS
        )
    grown = [*chat.prompt(whole[:1]), *spans[0], *chat.extend(replies)]
    if grown == chat.prompt(whole[:3]) == encoded.ids[: len(grown)]:
        words = (
            "turns are appended, and thoughts stay in the history: each turn's tokens are a prefix of the next one's"
        )
        yield Line(OK, "history", words)
    else:
        yield Line(BROKEN, "history", "a turn is not a prefix of the next one. Write chat.template=" + OURS)
    try:
        chat.prompt([{"role": "system", "content": "Play."}, whole[0]])
    except UserError as problem:
        yield Line(BROKEN, "system messages", f"the environments write them, and {problem}")
    else:
        yield Line(OK, "system messages", "taken, as the environments write them")


def _tokens(section: ModelSection, chat: Chat) -> Iterator[Line]:
    from transformers import GenerationConfig

    name = chat.tokenizer.convert_ids_to_tokens
    try:
        revision: Any = section.revision
        stops = GenerationConfig.from_pretrained(section.name_or_path, revision=revision).eos_token_id
    except OSError:  # it has none
        from posttrain.models import model_files

        stops = getattr(model_files.load_config(section), "eos_token_id", None)
    listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
    words = f"{name(chat.stop_id)} ({chat.stop_id}) ends an answer"
    if chat.stop_id in listed:
        words += ", as its makers' settings say"
    else:
        those = ", ".join(f"{name(stop)} ({stop})" for stop in listed) or "none"
        words += f"; its makers' settings name {those}: phase 1 has to teach it before phase 3, or no turn will end"
    yield Line(OK, "stop token", f"{words}; what is saved stops there")
    pad = f"{name(chat.pad_id)} ({chat.pad_id})"
    same = chat.pad_id == chat.stop_id
    yield Line(OK, "pad token", pad + (", which is the stop token as well: masks tell them apart" if same else ""))


# ----------------------------------------------------------------------------------------------------- what it computes


def _computing(cfg: Any, loaded: _Loaded) -> Iterator[Line]:
    from posttrain.models import logit_scale, soft_cap
    from posttrain.plan import selftest
    from posttrain.rollout import ReplaySampler, why_unfit

    net, chat = loaded.net, loaded.chat
    try:
        selftest.without_noise(net)
        yield Line(OK, "noise", "none in training, once all rates of dropout are 0 (phase 3 sets them so)")
    except UserError as problem:
        yield Line(BROKEN, "noise", f"{problem} Phases 1 and 2 can.")
    yield _right_padding(net, chat.pad_id)
    stops = [chat.stop_id]
    unfit, wrong = (why_unfit(net, stops, chat.pad_id, *kind) for kind in ((), (ReplaySampler,)))
    if wrong is None:
        yield Line(OK, "padding on the left", "rows that are replayed give the same log-probs")
    else:
        mark = BROKEN if unfit is not None else SLOWER
        yield Line(mark, "padding on the left", f"{wrong}: {'phase 3 cannot' if unfit else 'do not'} use engine=replay")
    wants = cfg.rollout.engine if hasattr(cfg, "rollout") else "auto"
    if unfit is None:
        yield Line(OK, "KV cache", "kept across turns (engine=slots)")
    elif wants == "slots":
        yield Line(BROKEN, "KV cache", f"engine=slots cannot be used: {unfit}. Write rollout.engine=auto.")
    else:
        yield Line(SLOWER, "KV cache", f"every turn reads its whole history again (engine=replay): {unfit}")
    if selftest.can_share_prefixes(net):
        yield Line(OK, "shared prefixes", "the prompt of a group is read once in an update")
    else:
        yield Line(SLOWER, "shared prefixes", "every sample of a group reads its prompt in an update")
    config = net.config.get_text_config()
    cap, scale = soft_cap(config), logit_scale(config)
    shaped = [f"soft-capped at {cap:g}"] if cap is not None else []
    shaped += [f"times {scale:g}"] if scale != 1.0 else []
    agrees = selftest.head_agrees(net)
    words = f"logits {' and '.join(shaped) or 'plain'}"
    if not agrees:
        words = f"{type(net).__name__} does more to its logits than phase 3 knows. Phases 1 and 2 can train it."
    tied = net.get_output_embeddings().weight is net.get_input_embeddings().weight
    yield Line(OK if agrees else BROKEN, "output layer", words)
    yield Line(OK, "tied heads", "the output layer is the embedding" if tied else "not tied")


def _right_padding(net: Any, pad_id: int) -> Line:
    from posttrain.plan.selftest import change_beside_longer_rows

    off = change_beside_longer_rows(net, pad_id)
    if off <= (1e-3 if str(net.dtype) == "torch.float32" else 0.05):
        return Line(OK, "padding on the right", "a row gives the same states alone and beside longer ones")
    words = f"states of a row change by {off:.1%} beside a longer one: write trainer.per_device_train_batch_size=1"
    return Line(BROKEN, "padding on the right", words)


def _checkpointing(cfg: Any, net: Any) -> Line:
    from posttrain.plan.selftest import why_not_recomputed
    from posttrain.runtime import trainer_field

    if not (problem := why_not_recomputed(net)):
        return Line(OK, "gradient checkpointing", "gives the same gradients")
    asked = trainer_field(cfg, "gradient_checkpointing")
    words = f"not to be had ({problem}): write trainer.gradient_checkpointing=false, which takes more memory"
    return Line(BROKEN if asked else SLOWER, "gradient checkpointing", words)


def _lora(cfg: Any, net: Any, chat: Chat) -> Line:
    """What the adapter would sit on, whether all of it learns, and that phase 3 leaves the output layer alone."""
    from posttrain.plan import selftest as trials

    section: ModelSection = cfg.model
    asked, targets = section.tuning != "full", section.lora.target_modules
    mark = BROKEN if asked else OK
    section = section if asked else section.model_copy(update={"tuning": "lora"})
    told = trials.adapter_of(section, net, chat)
    if isinstance(told, str):
        every = {name: trials.adapter_of(trials.on(section, [name]), net, chat) for name in trials.linear_names(net)}
        takes = [name for name, each in every.items() if not isinstance(each, str) and not each.idle]
        if not takes:
            return Line(BROKEN if asked else SLOWER, "LoRA", f"not to be had: {told}. Write model.tuning=full.")
        words = f"write model.lora.target_modules=[{','.join(takes)}]: {targets} is refused ({told})"
        return Line(mark, "LoRA", words)
    if told.head:
        words = "phase 3 takes no adapter on the output layer: leave it out of model.lora.target_modules"
        return Line(mark if hasattr(cfg, "rollout") else OK, "LoRA", words)
    if told.idle:
        rest = ",".join(name for name in told.names if name not in told.idle)
        words = f"no gradient reaches {', '.join(told.idle)}: write model.lora.target_modules=[{rest}]"
        return Line(mark, "LoRA", words)
    words = f"{targets} is {', '.join(told.names)}; not the output layer, which phase 3 refuses"
    return Line(OK, "LoRA", words)


# ------------------------------------------------------------------------------------------------------------- its size


def _context(cfg: Any, section: ModelSection) -> Line:
    from posttrain.models import model_files
    from posttrain.plan import preflight

    asked = preflight.longest_row(cfg)
    assert asked is not None
    limit = getattr(model_files.load_config(section).get_text_config(), "max_position_embeddings", None)
    words = f"{limit:,} tokens" if isinstance(limit, int) else "config.json names no limit"
    try:
        preflight.check_positions(cfg, section)
    except UserError as problem:
        return Line(BROKEN, "longest context", str(problem))
    beyond = isinstance(limit, int) and asked[1] > limit
    more = ", which is more than it was trained on" if beyond else ""
    return Line(OK, "longest context", f"{words}; {asked[0]} is {asked[1]:,}{more}")


def _memory(section: ModelSection) -> Line:
    from posttrain import plan
    from posttrain.models import model_files

    try:
        shape = plan.Shape.of(model_files.load_config(section), section.model_copy(update={"tuning": "full"}))
    except UserError as problem:
        return Line(BROKEN, "memory plan", str(problem))
    words = f"{plan.gib(4 * shape.parameters)} GiB of weights in float32, four times that with gradients and moments"
    return Line(OK, "memory plan", f"{words}; {2 * shape.cache / 1024:.1f} KiB of KV cache a token in bfloat16")


# ----------------------------------------------------------------------------------------------------------------- main


def schema_of(file: str) -> type[SFTRun] | type[DPORun] | type[StarPORun]:
    """Which phase a config file is for."""
    given = read_yaml(find_config(file))
    if "envs" in given:
        return StarPORun
    data: Any = given.get("data")
    sources = data.get("sources") if isinstance(data, dict) else None
    if not isinstance(sources, list):
        raise UserError(f"--config {file} is not a config of phase 1, 2 or 3: it has neither envs nor data.sources.")
    kinds = [source.get("kind") for source in sources if isinstance(source, dict)]
    return DPORun if any(kind in DPO_KINDS for kind in kinds) else SFTRun


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="posttrain check-model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="Hub id, or a model's folder")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. model.tuning=lora")
    parser.add_argument(
        "--config", default="configs/phase3_starpo.yaml", help="of phase 1, 2 or 3 (default: %(default)s)"
    )
    given = parser.parse_intermixed_args(argv)
    fixed = ["device=auto", f"model.name_or_path={json.dumps(given.name)}"]
    cfg: Any = resolve(schema_of(given.config), given.config, [*fixed, *given.overrides])

    from transformers.utils import logging

    logging.set_verbosity_error()
    broken = 0
    print(f"{given.name}, with the settings of {' '.join([given.config, *given.overrides])}")
    for line in check(cfg):
        broken += line.mark == BROKEN
        print(line, flush=True)
    if broken:
        print(f"It cannot be trained so: {broken} of these {'does' if broken == 1 else 'do'} not work.")
        sys.exit(1)
    print("It can be trained so.")


if __name__ == "__main__":
    run(main)
