"""What is an episode of an agent program?  Contexts in which the model answered its requests, tied to a trajectory.

A request that continues a former conversation, with its messages and answer unchanged, extends the context of that
answer: the tokens that were sampled stay as they are. If that context has been continued already, the tokens up to that
answer begin a new one. Any other request opens a new context. In each context only what was sampled there is trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from envs.episode import Episode
from envs.prompts import Prompts
from posttrain.models import Chat, Message, Said
from posttrain.rollout.agents.programs import ProgramEnd, RunningProgram
from posttrain.rollout.agents.requests import (
    CUT,
    AgentAnswer,
    Asked,
    Refusal,
    cut_answer,
    following,
    is_text,
    message_of,
    plain_message,
)
from posttrain.types import Completion, Segment, Trajectory, UserError, derive_seed, one_line

T = TypeVar("T")
PROGRAM_CRASHED = "ProgramCrashed"  # in the place of an exception's name
TOO_LONG = "context_length_exceeded"  # OpenAI's code


@dataclass(eq=False)
class Branch:
    """A context of an episode.

    segment: None until its first answer is written. handle: of the sampler's conversation with just its ids, if it is
    open. busy: an answer is being written in it. messages: up to the last answer. prompt: how many of these came before
    the first answer. shown: the messages of it that stand in no other context, with answers as they were sampled.
    """

    segment: Segment | None = None
    handle: int | None = None
    busy: bool = False
    messages: list[Message] = field(default_factory=list[Message])
    prompt: int = 0
    shown: list[Message] = field(default_factory=list[Message])


@dataclass(frozen=True)
class AnswerPlace:
    """Where an answer ends in its context, and whether it ended with the stop token."""

    branch: Branch
    length: int
    finished: bool


@dataclass(eq=False)
class PendingTurn:
    """An answer that is being written: after `ids`, of which the last `new` are not in the segment of `branch` yet.

    before: how many of the request's messages stand in a context already.
    """

    game: AgentGame
    asked: Asked
    branch: Branch
    ids: list[int]
    new: int
    before: int
    seed: int
    others: list[Asked] = field(default_factory=list[Asked])  # the same request again, after those before it had left

    @property
    def wanted(self) -> bool:
        """Return whether somebody still waits for it."""
        return not all(asked.left for asked in (self.asked, *self.others))

    def ends_with(self, completion: Completion) -> bool:
        """Return whether the answer has all tokens that were sampled."""
        segment = self.branch.segment
        return segment is not None and segment.turn_ends[-1] - segment.turn_starts[-1] == len(completion.ids)


@lru_cache(maxsize=4)
def longest_token(chat: Chat) -> int:
    """Return the characters of the longest token: a prompt with more for each of its tokens is too long."""
    return max(map(len, chat.tokenizer.get_vocab()))


class AgentGame:
    """An episode whose turns are asked for by a program. All methods are called in one thread.

    most_tokens: of a prompt.
    """

    def __init__(self, chat: Chat, episode: Episode, most_tokens: float, seed: int) -> None:
        assert isinstance(episode.env, Prompts) and episode.env.agent is not None
        self.chat, self.env, self.most_tokens = chat, episode.env, most_tokens
        self.agent, self.most_turns = episode.env.agent, episode.protocol.max_turns
        self.program: RunningProgram | None = None  # while it runs
        self.trajectory = Trajectory(
            env=episode.env.title,
            level_key=episode.level_key,
            level_seed=episode.seed,
            noise_seed=episode.noise_seed,
            seed=seed,
        )
        self.pending: list[PendingTurn] = []
        self._held: list[Asked] = []
        self.branches: list[Branch] = []  # those with an answer, in the order of their last one
        self.over = self.out_of_context = self.out_of_turns = False
        self._places: dict[str, AnswerPlace] = {}  # by the digest of a conversation that ends with an answer
        self.refused = ""  # why the last request was refused, if no answer came after it
        self._unclaimed: dict[str, list[tuple[PendingTurn, Completion]]] = {}  # answers that nobody waited for any more
        self._abandoned = 0  # how many those were, without those that a repeated request was given
        self._answers: dict[str, tuple[AgentAnswer, list[Asked]]] = {}  # the last to each, and who waited for it
        self._asked: dict[str, int] = {}  # how often each request has been answered

    def begin_turn(self, asked: Asked) -> PendingTurn | None:
        """Return the turn to write for a request; None where it needs none, or has to wait for those before it."""
        if self.over:
            asked.answer.set_result(Refusal(410, "This episode is over."))
            return None
        if self.impatient:
            asked.answer.set_result(Refusal(403, "This program did not wait for too many answers."))
            return None
        if self.repeats(asked):
            return None
        if self.trajectory.turns >= self.most_turns:
            self.out_of_turns = True
            asked.answer.set_result(Refusal(403, f"All {self.most_turns} answers of this episode are used up."))
            if self.program:
                self.program.stop()
            return None
        if self.trajectory.turns + len(self.pending) >= self.most_turns:
            self._held.append(asked)
            return None
        try:
            if (characters := asked.characters) > self.most_tokens * longest_token(self.chat):
                return self._too_long(asked, f"{characters} characters")
            branch, ids, new, before = self._context(asked)
        except Exception as error:  # a request never ends the run
            self.refused = str(error) if isinstance(error, UserError) else one_line(error)
            asked.answer.set_result(Refusal(400, self.refused))
            return None
        if len(ids) > self.most_tokens:
            return self._too_long(asked, f"{len(ids)} tokens")
        again = self._asked.get(asked.digest, 0) + sum(turn.asked.digest == asked.digest for turn in self.pending)
        seed = derive_seed(self.trajectory.seed, "request", asked.digest, again)
        turn = PendingTurn(self, asked, branch, ids, new, before, seed)
        branch.busy = True
        self.pending.append(turn)
        return turn

    def _too_long(self, asked: Asked, length: str) -> None:
        self.out_of_context = True
        self.refused = f"The prompt has {length}, and a prompt of this run has at most {self.most_tokens:g} tokens."
        asked.answer.set_result(Refusal(400, self.refused, TOO_LONG))

    @property
    def impatient(self) -> bool:
        """Return whether more answers were written in vain than the episode may have turns: it could go on forever."""
        return self._abandoned > self.most_turns

    def held_requests(self) -> list[Asked]:
        """Return the requests that waited for those before them, which may take all turns that are left."""
        held, self._held = self._held, []
        return held

    def drop_turn(self, turn: PendingTurn) -> None:
        """Forget a turn that is not written."""
        self.pending.remove(turn)
        turn.branch.busy = False

    def end_turn(self, turn: PendingTurn, completion: Completion) -> bool:
        """Record an answer and send it; return whether the sampler's conversation still has the context's ids.

        An answer that nobody waits for any more is not a part of the episode. One too many ends it.
        """
        self.drop_turn(turn)
        if self.over:
            return False
        if not turn.wanted:
            self._unclaimed.setdefault(turn.asked.digest, []).append((turn, completion))
            self._abandoned += 1
            if self.impatient and self.program:
                self.program.stop()
            return False
        self._record(turn, completion)
        return turn.ends_with(completion)

    def _record(self, turn: PendingTurn, completion: Completion) -> None:
        asked, branch, trajectory = turn.asked, turn.branch, self.trajectory
        kept, text, cut = cut_answer(completion, asked, self.chat)
        if branch.segment is None:
            branch.segment, branch.prompt = Segment(list(turn.ids)), len(asked.messages)
        else:
            branch.segment.read(turn.ids[len(turn.ids) - turn.new :])
        branch.segment.write(trajectory.turns, kept)
        trajectory.turn_rewards.append(0.0)
        trajectory.turn_penalties.append(0.0)
        trajectory.state_keys.append(asked.digests[-1])
        trajectory.versions.append(kept.version)
        trajectory.unfinished_turns += cut and turn.ends_with(completion)  # not by the program's own limit
        self.out_of_context, self.refused = False, ""
        trajectory.actions.append(text)
        answer = self._answer(asked, text, cut, len(turn.ids), len(kept.ids))
        message = plain_message(answer.message)
        branch.messages = [*asked.messages, message]
        branch.shown += [*asked.messages[turn.before :], {"role": "assistant", "content": text}]
        self.branches = [each for each in self.branches if each is not branch] + [branch]
        self._places[following(asked.digests[-1], message)] = AnswerPlace(
            branch, len(branch.segment.ids), kept.finished
        )
        self._answers[asked.digest] = answer, [asked, *turn.others]
        self._asked[asked.digest] = self._asked.get(asked.digest, 0) + 1
        for each in (asked, *turn.others):
            each.answer.set_result(answer)

    def end(self, ended: ProgramEnd) -> None:
        """Record how the program ended."""
        trajectory, last = self.trajectory, self.branches[-1] if self.branches else None
        self.over = True
        unanswered = [each for turn in self.pending for each in (turn.asked, *turn.others)]
        for each in (*unanswered, *self.held_requests()):
            each.answer.set_result(Refusal(410, "This episode is over."))
        self._order_turns()
        trajectory.messages = [message for branch in self.branches for message in branch.shown]
        trajectory.out_of_context = self.out_of_context and bool(ended.problem)
        trajectory.truncated = self.out_of_turns or trajectory.out_of_context
        trajectory.terminated = not trajectory.truncated
        if self.impatient:
            words = f"it did not wait for more answers than it may have in all ({self.most_turns})"
            trajectory.crashed = f"{PROGRAM_CRASHED}: {words}. Raise the time-out of its client"
        elif last is None:
            reason = ended.problem or "it ended with exit code 0"
            asked = f"a request was refused ({self.refused})" if self.refused else "the model was asked for no answer"
            trajectory.crashed = f"{PROGRAM_CRASHED}: {asked}, and {reason}"
        elif ended.problem and not trajectory.truncated:
            refused = f"a request was refused ({self.refused}), and " if self.refused else ""
            trajectory.crashed = f"{PROGRAM_CRASHED}: {refused}{ended.problem}"
        else:
            prompt, said = last.messages[: last.prompt], last.messages[last.prompt :]
            # whether a program that is stopped ends by itself before is chance
            self.env.played(prompt, said, ended.output, None if self.out_of_turns else ended.exit_code)
            trajectory.unscored = self.env
        trajectory.terminated = trajectory.terminated and not trajectory.crashed

    # ------------------------------------------------------------------ contexts

    def _context(self, asked: Asked) -> tuple[Branch, list[int], int, int]:
        """Return the context of a request, its ids, how many of them are new to its segment, and how many messages
        stand in a context already."""
        tools = {"tools": asked.tools} if asked.tools else {}
        if asked.tools:
            self.chat.check_tools(asked.tools)
        known = next((k for k in range(len(asked.messages) - 1, 0, -1) if asked.digests[k] in self._places), None)
        if known is None:
            ids = self.chat.prompt(asked.messages, **tools)
            return Branch(), ids, len(ids), 0
        place = self._places[asked.digests[known]]
        assert place.branch.segment is not None
        new = self.chat.extend(asked.messages[known:], finished=place.finished, **tools)
        before = place.branch.segment.ids
        if len(before) == place.length and not place.branch.busy:
            return place.branch, before + new, len(new), known
        ids = before[: place.length] + new
        return Branch(), ids, len(ids), known

    def repeats(self, asked: Asked) -> bool:
        """Give a request the answer to an equal one that was left without it; return whether it needs no other.

        That answer may still be being written. An equal request that got its answer wanted another sample.
        """
        if asked.left:
            return True
        for turn in self.pending:
            if turn.asked.digest == asked.digest and not turn.wanted:
                turn.others.append(asked)
                return True
        free = self.trajectory.turns + len(self.pending) < self.most_turns
        if self._unclaimed.get(asked.digest) and not self.over and free:
            turn, completion = self._unclaimed[asked.digest].pop(0)
            segment = turn.branch.segment
            if not turn.branch.busy and (segment is None or len(segment.ids) == len(turn.ids) - turn.new):
                turn.asked, turn.others = asked, []
                self._abandoned -= 1
                self._record(turn, completion)
                return True
        if asked.digest not in self._answers:
            return False
        answer, waited = self._answers[asked.digest]
        if not all(each.left for each in waited):
            return False
        waited.append(asked)
        asked.answer.set_result(answer)
        return True

    def _answer(self, asked: Asked, text: str, cut: bool, prompt_tokens: int, tokens: int) -> AgentAnswer:
        said = self.chat.read_calls(text) if asked.tools else Said(text, [])
        if any(call.error for call in said.calls) or not is_text(said.calls):  # it stays text
            said = Said(text, [])
        again = self._asked.get(asked.digest, 0)
        number = hashlib.blake2b(f"{asked.digest}{again}".encode(), digest_size=6).hexdigest()
        reason = CUT if cut else "tool_calls" if said.calls else "stop"
        return AgentAnswer(message_of(said, number), reason, prompt_tokens, tokens)

    def _order_turns(self) -> None:
        """Renumber the turns: those of a context follow each other, and the context of the last turn is the last."""
        trajectory = self.trajectory
        trajectory.segments = [branch.segment for branch in self.branches if branch.segment is not None]
        order = [turn for segment in trajectory.segments for turn in segment.turns]

        def ordered(values: Sequence[T]) -> list[T]:
            return [values[turn] for turn in order]

        trajectory.turn_rewards = ordered(trajectory.turn_rewards)
        trajectory.turn_penalties = ordered(trajectory.turn_penalties)
        trajectory.state_keys, trajectory.versions = ordered(trajectory.state_keys), ordered(trajectory.versions)
        trajectory.actions, trajectory.effective_actions = ordered(trajectory.actions), len(order)
        first = 0
        for segment in trajectory.segments:
            segment.turns = list(range(first, first + len(segment.turns)))
            segment.first_turn, first = first, first + len(segment.turns)
