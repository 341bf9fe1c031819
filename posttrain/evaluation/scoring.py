"""What does a model answer, and how good are the answers?  Text, preference pairs and levels, one task at a time."""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from posttrain import metrics
from posttrain.config import EvaluateRun, ModelSection
from posttrain.evaluation.figures import env_figures
from posttrain.evaluation.instructions import instruction_scores
from posttrain.evaluation.tasks import Task, env_error, env_section
from posttrain.runtime import runlog
from posttrain.types import Completion, Record, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from envs.math_judge import MathJudge
    from posttrain.evaluation.text_episodes import TextChat
    from posttrain.models import Chat
    from posttrain.rollout import Sampler

PAIR_TOKENS = 8192  # padded tokens of one batch of preference pairs
MOST_ROWS = 256  # sampled at a time where batch_size is null and the memory suffices
WITHOUT_BLANKS = re.compile(  # Thai to Tibetan, Burmese, Khmer, kana, ideographs, Hangul
    "[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)
Tick = Callable[[int], None]  # progress callback: gets the number of rows that were finished since the last call


@dataclass
class Loaded:
    """The model that a process holds; a process holds one at a time."""

    judge: MathJudge
    processes: int = 1  # number of processes that share the memory of this machine
    key: tuple[str, str] = ("", "")
    model: PreTrainedModel | None = None
    chat: Chat | None = None

    def get(self, section: ModelSection, device: str, template: str | None) -> tuple[PreTrainedModel, Chat]:
        """Return the model of a section, in its dtype, and its chat.

        Raises:
            UserError: a weight is NaN or infinite.
        """
        import torch

        from posttrain import models

        if self.key != (section.name_or_path, section.dtype) or self.model is None or self.chat is None:
            self.model = self.chat = None  # free the memory before the next one is loaded
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            model, self.chat = models.load(section, device=device, chat_template=template, training=False)
            for name, weight in model.named_parameters():
                if not torch.isfinite(weight).all():
                    raise UserError(f"{section.name_or_path}: the weights {name} contain NaN or infinity.")
            self.model, self.key = model.eval(), (section.name_or_path, section.dtype)
        return self.model, self.chat


def section(cfg: EvaluateRun, name: str) -> ModelSection:
    """Return how the local checkpoint of this name is loaded."""
    return ModelSection(name_or_path=cfg.local[name], dtype=cfg.dtype, attn_implementation=cfg.attn_implementation)


def run_task(cfg: EvaluateRun, name: str, task: Task, tick: Tick, loaded: Loaded) -> list[Record]:
    """Return a checkpoint's rows of one task.

    Raises:
        ScoresNotFinite: a log-prob is NaN or infinite.
    """
    import torch

    from posttrain.rollout import open_sampler

    torch.set_num_threads(1)  # sums are rounded alike on all machines; `workers` uses the cores
    if name in cfg.endpoints:
        return task.described(name, ask_task(cfg, name, task, tick, loaded.judge))
    model_section = section(cfg, name)
    if task.suite == "preferences":  # bfloat16 changes the log-prob of a sequence as much as DPO does
        model_section = model_section.model_copy(update={"dtype": "float32"})
    model, chat = loaded.get(model_section, cfg.device, cfg.chat.template)
    if task.suite == "preferences":
        rows = score_pairs(model, chat, task, tick)
    elif task.suite == "envs":
        suite = cfg.suites.envs
        assert suite is not None
        longest, new = suite.max_context, suite.max_completion_length
        slots, graphs = answers_at_once(cfg, model_section, loaded, longest, new)
        sampler = open_sampler(model, chat, max_context=longest, graphs=graphs)
        rows = play_levels(cfg, task, tick, sampler, chat, slots)
    else:
        rows = answer(cfg, model_section, loaded, task, tick)
    return task.described(name, rows)


def ask_task(cfg: EvaluateRun, name: str, task: Task, tick: Tick, judge: MathJudge) -> list[Record]:
    """Return the rows of a task from an endpoint, with the prompts, levels and contexts of local models."""
    from posttrain.evaluation.endpoint import Client
    from posttrain.evaluation.endpoints import counting_chat, replies_file
    from posttrain.evaluation.text_episodes import TextChat, TextSampler
    from posttrain.rollout import has_agent, open_env

    chat, params = counting_chat(cfg), task.params
    assert params is not None
    with Client(cfg.endpoints[name], replies_file(cfg, name, task)) as client:
        if task.suite == "envs":
            if has_agent(open_env(env_section(cfg, task.part))):
                raise UserError(
                    f"{task.part} is played by a program, which needs a local checkpoint: leave out endpoints, or set"
                    f" OPENAI_BASE_URL to that of {name} and run the program itself."
                )
            text_chat = TextChat(chat)
            return play_levels(
                cfg, task, tick, TextSampler(client, text_chat), text_chat, cfg.endpoints[name].concurrency
            )
        futures = [
            client.begin(item["messages"], params, seed) for item, seed in zip(task.items, task.seeds, strict=True)
        ]
        rows, equal_length = [], counted_tokens(cfg)
        for item, reply in zip(task.items, (future.result() for future in futures), strict=True):
            tick(1)
            ids = chat.content_ids(reply.text) if chat and task.suite == "repetition" else []
            count = reply.completion_tokens
            if count is None:
                count = len(TextChat(chat).completion(reply).ids)
            tokens = len(ids) or count - (reply.finished and count > 0)
            row = item | {"text": reply.text, "never_stops": not reply.finished, "tokens": tokens}
            rows.append(row | score(task.suite, row, ids, judge, equal_length))
        return rows


def answers_at_once(
    cfg: EvaluateRun, section: ModelSection, loaded: Loaded, longest: int, new: int
) -> tuple[int, bool]:
    """Return how many conversations of `longest` tokens, the last `new` of them sampled, run at the same time.

    Also whether CUDA graphs fit beside them.
    """
    from posttrain import plan

    assert loaded.model is not None
    most = cfg.batch_size or MOST_ROWS
    rows, graphs = plan.rows_at_once(loaded.model, section, longest, new, most, loaded.processes)
    if cfg.batch_size and rows < most:
        runlog.say(f"The memory suffices for {rows} answers at a time, not for batch_size={most}.")
    return rows, graphs


class ScoresNotFinite(ValueError):
    """A log-prob is NaN or infinite, so the rows say nothing about the checkpoint."""


def check_finite(logprobs: Iterable[float]) -> None:
    if not all(map(math.isfinite, logprobs)):
        raise ScoresNotFinite("a log-prob is NaN or infinite")


def answer(cfg: EvaluateRun, section: ModelSection, loaded: Loaded, task: Task, tick: Tick) -> list[Record]:
    """Return a row for each prompt of a task, with the model's answer and its scores."""
    from posttrain.rollout import complete, open_sampler

    model, chat, params = loaded.model, loaded.chat, task.params
    assert model is not None and chat is not None and params is not None
    prompts = [chat.prompt(item["messages"]) for item in task.items]
    longest = max(map(len, prompts)) + params.max_new_tokens
    batch, graphs = answers_at_once(cfg, section, loaded, longest, params.max_new_tokens)
    sampler = open_sampler(model, chat, max_context=longest, graphs=graphs)
    completions = complete(sampler, prompts, params, task.seeds, batch=batch, done=tick)
    return score_answers(task, completions, chat, loaded.judge, counted_tokens(cfg))


def counted_tokens(cfg: EvaluateRun) -> int:
    """Return how many tokens of each answer count for `seq_rep_4_first`."""
    return cfg.suites.repetition.equal_length if cfg.suites.repetition else 0


def score_answers(
    task: Task, completions: Sequence[Completion], chat: Chat, judge: MathJudge, equal_length: int
) -> list[Record]:
    """Return a row for each item of a task, with its answer and the scores of its suite.

    Args:
        equal_length: tokens of each answer that count for `seq_rep_4_first`.

    Raises:
        ScoresNotFinite: a log-prob is NaN or infinite.
    """
    rows = []
    for item, completion in zip(task.items, completions, strict=True):
        check_finite(completion.logprobs)
        ids = completion.ids[:-1] if completion.finished else completion.ids
        row = item | {"text": chat.decode(completion.ids), "never_stops": not completion.finished, "tokens": len(ids)}
        rows.append(row | score(task.suite, row, ids, judge, equal_length))
    return rows


def score(suite: str, row: Record, ids: list[int], judge: MathJudge, equal_length: int) -> Record:
    """Return the scores of a row's text in a suite. ids: the tokens of the text, for repetition."""
    from envs.math_judge import last_boxed, last_number

    if suite == "math":
        number = last_number(row["text"])
        return {
            "accuracy": judge.correct(row["text"], row["answer"]),
            "boxed": last_boxed(row["text"]) is not None,
            "last_number": number is not None and judge.equal(number, row["answer"]),
        }
    if suite == "recall":
        return {"accuracy": recalls(row["text"], row["answer"])}
    if suite == "instructions":
        return instruction_scores(row["text"], row["instructions"])
    return {
        "ids": ids,
        "seq_rep_4": metrics.seq_rep_n(ids),
        "seq_rep_4_first": metrics.seq_rep_n(ids[:equal_length]),
        "longest_repeat": metrics.longest_repeat(ids),
    }


def recalls(text: str, expected: str) -> bool:
    """Return whether a text contains the expected answer as a separate word, whatever its case and Unicode form.

    In scripts without spaces between words (Chinese) or with particles after them (Korean), it may be part of a word.
    """
    text, expected = (unicodedata.normalize("NFKC", each).casefold() for each in (text, expected.strip()))
    start = text.find(expected) if expected else -1
    while start >= 0:
        end = start + len(expected)
        before, after = text[start - 1 : start], text[end : end + 1]
        if not (_goes_on(before, expected[0]) or _goes_on(after, expected[-1]) or _is_mark(after)):
            return True
        start = text.find(expected, start + 1)
    return False


def _goes_on(outside: str, inside: str) -> bool:
    """Return whether the character beside an answer continues its word."""
    is_letter = outside.isalnum() or outside == "_" or _is_mark(outside)
    return is_letter and not WITHOUT_BLANKS.match(outside) and not WITHOUT_BLANKS.match(inside)


def _is_mark(character: str) -> bool:
    """Return whether a character is a vowel sign or an accent, which belongs to the letter before it."""
    return character != "" and unicodedata.category(character).startswith("M")


def score_pairs(model: PreTrainedModel, chat: Chat, task: Task, tick: Tick) -> list[Record]:
    """Return rows with log pi(answer | prompt), summed over the answer's tokens, for both answers of each pair.

    Computed in the precision of the weights: autocast changes the log-prob of a sequence as much as DPO does.

    Raises:
        ScoresNotFinite: a log-prob is NaN or infinite.
    """
    import torch

    from posttrain.models import microbatches, token_logprobs
    from posttrain.runtime import hardware

    encoded = []
    for item in task.items:
        for side in ("chosen", "rejected"):
            ids, mask = chat.encode(item[side])
            start = len(chat.prompt(item[side][:-1]))  # only the last answer of the assistant is compared
            encoded.append((ids, [trained and place >= start for place, trained in enumerate(mask)]))
    sums = [0.0] * len(encoded)
    for batch in microbatches([len(ids) for ids, _ in encoded], PAIR_TOKENS):
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            logprobs_S, _ = token_logprobs(model, [encoded[i][0] for i in batch], [encoded[i][1] for i in batch])
        for i, part in zip(batch, logprobs_S.split([sum(encoded[i][1]) for i in batch]), strict=True):
            sums[i] = float(part.sum(dtype=hardware.widest(part.device)))
    check_finite(sums)
    rows = []
    for item, chosen, rejected in zip(task.items, sums[::2], sums[1::2], strict=True):
        figures = {"chosen_logprob": chosen, "rejected_logprob": rejected, "margin": chosen - rejected}
        rows.append(item | figures | {"accuracy": chosen > rejected})
    tick(len(rows))
    return rows


def play_levels(
    cfg: EvaluateRun, task: Task, tick: Tick, sampler: Sampler, chat: Chat | TextChat, slots: int
) -> list[Record]:
    """Return a row for each level of a task, with the episode that was played there, `slots` at a time."""
    from posttrain.rollout import Context, new_episode, play

    suite = cfg.suites.envs
    assert suite is not None and task.params is not None
    env = env_section(cfg, task.part)
    episodes = [new_episode(env, suite.protocol, item["seed"], suite.split) for item in task.items]
    played = play(
        sampler,
        chat,  # type: ignore[arg-type]
        episodes,
        task.params,
        task.seeds,
        slots=slots,
        context=Context(suite.context, suite.context_turns, suite.max_context),
        done=lambda ended: tick(len(ended)),
    )
    for trajectory in played:
        check_finite(trajectory.sampled_logprobs)
    if crashed := [trajectory.crashed for trajectory in played if trajectory.crashed]:
        runlog.say(f"{task.part}: {len(crashed)} of {len(played)} episodes crashed, the last with {crashed[-1]}")
    return [
        item
        | {
            "messages": trajectory.messages,
            **(
                {} if trajectory.calls is None else {"calls": trajectory.calls, "failed_calls": trajectory.failed_calls}
            ),
            "actions": trajectory.actions,
            "success": trajectory.success,
            "failure": trajectory.failure,
            "failed": bool(trajectory.failure),
            "turn_rewards": trajectory.turn_rewards,
            "turn_penalties": trajectory.turn_penalties,
            **({"reward_parts": trajectory.reward_parts} if trajectory.reward_parts else {}),
            **({"extra": trajectory.extra} if trajectory.extra else {}),
            "return": sum(trajectory.turn_rewards),
            "penalties": sum(trajectory.turn_penalties),
            "turns": trajectory.turns,
            "invalid_turns": trajectory.invalid_turns,
            "unfinished_turns": trajectory.unfinished_turns,
            "crashed": trajectory.crashed,
            "level": trajectory.level_key,
        }
        for item, trajectory in zip(task.items, played, strict=True)
    ]


def play_baselines(cfg: EvaluateRun, task: Task) -> dict[str, Record]:
    """Return the figures of the scripted policies and the expert on the same levels, with as many actions.

    `optimum` is the mean probability of success under the best policy. Each is present if the environment has it.

    Raises:
        UserError: the environment raised.
    """
    from envs.players import play_scripted, player_names
    from envs.protocol import Protocol
    from posttrain.rollout import open_env

    suite = cfg.suites.envs
    assert suite is not None
    env = open_env(env_section(cfg, task.part))
    protocol = Protocol.of(env, **suite.protocol.arguments())
    horizon = min(protocol.max_actions, protocol.max_turns * protocol.max_actions_per_turn)
    one_action = dataclasses.replace(protocol, max_turns=horizon)  # scripted policies play one action a turn
    optima: list[float] = []
    played: dict[str, list[Record]] = {}
    try:
        for item in task.items:
            env.reset(seed=item["seed"], options={"split": suite.split})
            players = player_names(env)
            if not players and not env.has("optimal_success"):
                return {}  # and no further level is begun, which may cost
            if env.has("optimal_success"):
                optima.append(env.optimal_success(horizon))
            for player in players:
                episode = play_scripted(env, player, one_action, item["seed"], suite.split)
                total = sum(turn.reward for turn in episode.past)
                if not math.isfinite(total):
                    raise ValueError(f"the sum of its rewards is {total}")
                row = {"success": episode.success, "failure": episode.failure, "return": total, "turns": episode.turns}
                row["level"] = episode.level_key
                played.setdefault(player, []).append(row)
    except (Exception, SystemExit) as problem:  # an environment may raise anything
        raise env_error(task.part, problem) from problem
    baselines = {player: env_figures(rows) for player, rows in played.items()}
    if optima:
        baselines["optimum"] = {"success": fmean(optima), "episodes": len(optima)}
    return baselines
