"""What works with a model, and what should be written where something does not?  Tried with the scripts' functions.

    posttrain check-model Qwen/Qwen3-0.6B
    posttrain check-model models/mine --config phase1_sft model.tuning=lora
    posttrain check-model models/mine chat.template=chatml

A line for each subject, with a mark: `ok`, `slower` (it works, but costs time), `does not work`. What depends on
settings is checked with those of the config file and of KEY=VALUE; by default with the reference run of phase 3. The
exit code is 0 if the model can be trained with them, 1 if something does not work or is damaged, and 2 if there is no
such model, or for other bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.config import (
    DPO_KINDS,
    DPORun,
    ModelSection,
    SFTRun,
    StarPORun,
    find_config,
    read_yaml,
    resolve,
    run,
    yaml_value,
)
from posttrain.types import UserError

if TYPE_CHECKING:
    from posttrain.models import Chat

OK, SLOWER, BROKEN = "ok", "slower", "does not work"
OURS = "chatml"


class Line(NamedTuple):
    """A line of the report: Line("ok", "weights", "LlamaForCausalLM, 134.52 M parameters, ...")"""

    mark: str
    subject: str
    words: str

    def __str__(self) -> str:
        return f"{self.mark:<{len(BROKEN)}}  {self.subject:<22}  {self.words}"


def check(cfg: Any) -> Iterator[Line]:
    """Yield all lines for the model of a training config.

    Raises:
        UserError: the model cannot be examined.
    """
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
        kind += "; the code in its repository is not run"
    return Line(OK, "architecture", kind)


def _own_code(section: ModelSection) -> str:
    """Return what to write if a model needs the code of its repository; "" if it needs none."""
    from transformers import PreTrainedConfig

    try:
        content, _ = PreTrainedConfig.get_config_dict(section.name_or_path, revision=section.revision)
    except (OSError, ValueError):
        return ""
    if "auto_map" not in content or section.trust_remote_code:
        return ""
    return (
        " Its architecture is code in its repository: read it, then write model.trust_remote_code=true and"
        " model.revision=<the 40-digit commit that you have read>."
    )


class _Template(NamedTuple):
    file: str | None  # the template that the other lines are for
    refused: str  # why the template of the config cannot be used; "" if it can


def _usable_template(section: ModelSection, template: str | None) -> _Template:
    """Return the template of the config, or ours if it cannot be used."""
    from posttrain import models

    try:
        models.load_chat(section, template)
    except UserError as problem:
        models.load_chat(section, OURS)  # an error here does not depend on the template
        return _Template(OURS, str(problem))
    return _Template(template, "")


class _Loaded(NamedTuple):
    line: Line
    net: Any = None
    chat: Any = None


def _load(section: ModelSection, device: str, template: str | None) -> _Loaded:
    """Return the model as the scripts load it, or with eager attention if only its attention is refused."""
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
    words = (
        f"{type(net).__name__}, {count / 1e6:.2f} M parameters, safetensors, complete and finite, one computation done"
    )
    return _Loaded(Line(OK, "weights", words), net, chat)


def _template(chat: Chat, template: str | None) -> Line:
    from posttrain.models import TEMPLATE_PATH

    words = f"the one of {template}" if template else "the model's own"
    if chat.template.rstrip().endswith(TEMPLATE_PATH.read_text(encoding="utf-8").rstrip()):
        added = f", whose {chat.added_tokens} tokens are added: phase 1 must teach them" if chat.added_tokens else ""
        words = f"{'' if template else 'the model has none, so '}{OURS}{added}"
    if "strftime_now" in chat.template:
        words += "; it writes today's date, so that prompts change daily (chat.template: a copy without the date)"
    return Line(OK, "chat template", words)


def _start(chat: Chat) -> Line:
    """Compare the tokens before a conversation with those that the tokenizer puts before plain text."""
    tokens = ", ".join(f"{chat.tokenizer.convert_ids_to_tokens(token)} ({token})" for token in chat.start_ids)
    if not tokens:
        return Line(OK, "start of text", "the tokenizer puts no token before plain text, and none is added")
    puts = f"the tokenizer puts {tokens} before plain text"
    written = json.dumps("".join(chat.tokenizer.convert_ids_to_tokens(chat.start_ids)), ensure_ascii=False)
    if chat.template.startswith(f"{{{{- {written} }}}}"):  # as Chat.load puts it
        return Line(OK, "start of text", f"{puts}; the template lacked them, so they were added to it")
    if chat.prompt([{"role": "user", "content": "Hi"}])[: len(chat.start_ids)] == chat.start_ids:
        return Line(OK, "start of text", f"{puts}, and the template writes them")
    if chat.writes_start():
        return Line(
            OK, "start of text", f"{puts}, but the template writes them only in some dialogues, and is not changed"
        )
    return Line(OK, "start of text", f"{puts}, but an earlier phase was trained without them, so they are not added")


def _turns(chat: Chat) -> Iterator[Line]:
    """Compare a conversation that grows turn by turn in a rollout with the whole conversation in training."""
    asks, thinks, replies = "Which way?", "<think>\nThe ice is left.\n</think>\n\nRight", "And now?"
    roles = ("user", "assistant", "user", "assistant")
    whole = [{"role": role, "content": text} for role, text in zip(roles, (asks, thinks, replies, "Up"), strict=True)]
    encoded = chat.encode(whole)
    marked = [n for n, on in enumerate(encoded.mask) if on]
    spans = [[*chat.content_ids(text), chat.stop_id] for text in (thinks, "Up")]
    if [encoded.ids[n] for n in marked] == spans[0] + spans[1]:
        yield Line(OK, "assistant mask", "training uses exactly the assistant's messages and the token that ends each")
    else:
        yield Line(
            BROKEN, "assistant mask", "the mask does not select the assistant's messages. Write chat.template=" + OURS
        )
    grown = [*chat.prompt(whole[:1]), *spans[0], *chat.extend(replies)]
    if grown == chat.prompt(whole[:3]) == encoded.ids[: len(grown)]:
        words = "turns are appended and keep their thoughts: the tokens of each turn are a prefix of the next turn's"
        yield Line(OK, "history", words)
    else:
        yield Line(BROKEN, "history", "a turn is not a prefix of the next one. Write chat.template=" + OURS)
    try:
        chat.prompt([{"role": "system", "content": "Play."}, whole[0]])
    except UserError as problem:
        yield Line(BROKEN, "system messages", f"environments use them, but {problem}")
    else:
        yield Line(OK, "system messages", "accepted; environments use them")


def _tokens(section: ModelSection, chat: Chat) -> Iterator[Line]:
    from transformers import GenerationConfig

    name = chat.tokenizer.convert_ids_to_tokens
    try:
        revision: Any = section.revision
        stops = GenerationConfig.from_pretrained(section.name_or_path, revision=revision).eos_token_id
    except OSError:  # there is no generation_config.json
        from posttrain.models import model_files

        stops = getattr(model_files.load_config(section), "eos_token_id", None)
    listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
    words = f"{name(chat.stop_id)} ({chat.stop_id}) ends an answer"
    if chat.stop_id in listed:
        words += ", as in the model's generation config"
    else:
        those = ", ".join(f"{name(stop)} ({stop})" for stop in listed) or "none"
        words += (
            f"; the model's generation config has {those}: phase 1 must teach it before phase 3, or no turn will end"
        )
    yield Line(OK, "stop token", f"{words}; saved models stop there")
    pad = f"{name(chat.pad_id)} ({chat.pad_id})"
    same = chat.pad_id == chat.stop_id
    yield Line(OK, "pad token", pad + (", which is also the stop token: masks tell them apart" if same else ""))


# ----------------------------------------------------------------------------------------------------- what it computes


def _computing(cfg: Any, loaded: _Loaded) -> Iterator[Line]:
    from posttrain.models import logit_scale, soft_cap
    from posttrain.plan import selftest
    from posttrain.rollout import ReplaySampler, why_unfit

    net, chat = loaded.net, loaded.chat
    try:
        selftest.without_noise(net)
        yield Line(OK, "noise", "none in training when all dropout rates are 0, as in phase 3")
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
        yield Line(OK, "shared prefixes", "an update reads the prompt of a group once")
    else:
        yield Line(SLOWER, "shared prefixes", "an update reads the prompt again for every sample of a group")
    config = net.config.get_text_config()
    cap, scale = soft_cap(config), logit_scale(config)
    shaped = [f"soft-capped at {cap:g}"] if cap is not None else []
    shaped += [f"times {scale:g}"] if scale != 1.0 else []
    agrees = selftest.head_agrees(net)
    words = f"logits {' and '.join(shaped) or 'plain'}"
    if not agrees:
        words = f"{type(net).__name__} computes logits as phase 3 does not support. Phases 1 and 2 can train it."
    tied = net.get_output_embeddings().weight is net.get_input_embeddings().weight
    yield Line(OK if agrees else BROKEN, "output layer", words)
    yield Line(OK, "tied heads", "the output layer is the embedding" if tied else "not tied")


def _right_padding(net: Any, pad_id: int) -> Line:
    from posttrain.plan.selftest import change_beside_longer_rows

    off = change_beside_longer_rows(net, pad_id)
    if off <= (1e-3 if str(net.dtype) == "torch.float32" else 0.05):
        return Line(OK, "padding on the right", "a row has the same states alone and beside longer rows")
    words = f"states of a row change by {off:.1%} beside a longer one: write trainer.per_device_train_batch_size=1"
    return Line(BROKEN, "padding on the right", words)


def _checkpointing(cfg: Any, net: Any) -> Line:
    from posttrain.plan.selftest import why_not_recomputed
    from posttrain.runtime import trainer_field

    if not (problem := why_not_recomputed(net)):
        return Line(OK, "gradient checkpointing", "gives the same gradients")
    enabled = trainer_field(cfg, "gradient_checkpointing")
    words = f"not possible ({problem}): write trainer.gradient_checkpointing=false, which takes more memory"
    return Line(BROKEN if enabled else SLOWER, "gradient checkpointing", words)


def _lora(cfg: Any, net: Any, chat: Chat) -> Line:
    """Return which layers the adapter has, and whether all get gradients and phase 3 accepts them."""
    from posttrain.plan import selftest

    section: ModelSection = cfg.model
    enabled, targets = section.tuning != "full", section.lora.target_modules
    mark = BROKEN if enabled else OK
    section = section if enabled else section.model_copy(update={"tuning": "lora"})
    adapter = selftest.adapter_of(section, net, chat)
    if isinstance(adapter, str):
        every = {
            name: selftest.adapter_of(selftest.on(section, [name]), net, chat) for name in selftest.linear_names(net)
        }
        possible = [name for name, each in every.items() if not isinstance(each, str) and not each.idle]
        if not possible:
            return Line(BROKEN if enabled else SLOWER, "LoRA", f"not possible: {adapter}. Write model.tuning=full.")
        words = f"write model.lora.target_modules=[{','.join(possible)}]: {targets} is refused ({adapter})"
        return Line(mark, "LoRA", words)
    if adapter.head:
        words = "phase 3 does not accept an adapter on the output layer: leave it out of model.lora.target_modules"
        return Line(mark if hasattr(cfg, "rollout") else OK, "LoRA", words)
    if adapter.idle:
        rest = ",".join(name for name in adapter.names if name not in adapter.idle)
        words = f"no gradient reaches {', '.join(adapter.idle)}: write model.lora.target_modules=[{rest}]"
        return Line(mark, "LoRA", words)
    words = f"{targets} is {', '.join(adapter.names)}; not the output layer, which phase 3 refuses"
    return Line(OK, "LoRA", words)


# ------------------------------------------------------------------------------------------------------------- its size


def _context(cfg: Any, section: ModelSection) -> Line:
    from posttrain.models import model_files
    from posttrain.plan import preflight

    longest = preflight.longest_row(cfg)
    assert longest is not None
    limit = getattr(model_files.load_config(section).get_text_config(), "max_position_embeddings", None)
    words = f"{limit:,} tokens" if isinstance(limit, int) else "config.json has no limit"
    try:
        preflight.check_positions(cfg, section)
    except UserError as problem:
        return Line(BROKEN, "longest context", str(problem))
    beyond = isinstance(limit, int) and longest[1] > limit
    more = ", more than the model was trained on" if beyond else ""
    return Line(OK, "longest context", f"{words}; {longest[0]} is {longest[1]:,}{more}")


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
    """Return the schema of the phase that a config file is for."""
    content = read_yaml(find_config(file))
    if "envs" in content:
        return StarPORun
    data: Any = content.get("data")
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
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="e.g. model.tuning=lora")
    parser.add_argument(
        "--config", default="configs/phase3_starpo.yaml", help="of phase 1, 2 or 3 (default: %(default)s)"
    )
    options = parser.parse_intermixed_args(argv)
    fixed = ["device=auto", f"model.name_or_path={yaml_value(options.name)}"]
    cfg: Any = resolve(schema_of(options.config), options.config, [*fixed, *options.overrides])

    from transformers.utils import logging

    logging.set_verbosity_error()
    broken = 0
    print(f"{options.name}, with the settings of {' '.join([options.config, *options.overrides])}")
    for line in check(cfg):
        broken += line.mark == BROKEN
        print(line, flush=True)
    if broken:
        print(f"It cannot be trained like this: {broken} of these {'does' if broken == 1 else 'do'} not work.")
        sys.exit(1)
    print("It can be trained like this.")


if __name__ == "__main__":
    run(main)
