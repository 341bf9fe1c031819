"""Is it worth training from here?  What the policy does before the first step, and what follows from it.

A group of episodes teaches only where their rewards differ. So a start is measured by many answers to each of some
held-out levels: how often the first one succeeds, how often one of them does, and how many groups differ at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

from envs import TextEnv
from posttrain.config import StarPORun
from posttrain.rollout import open_env
from posttrain.runtime import floats
from posttrain.starpo.learner import Learner
from posttrain.starpo.monitoring.episodes import differs
from posttrain.types import OF_GAMES, Trajectory, Words, words_of

LEVELS, ANSWERS = 64, 16  # validation levels of each environment, and episodes of each
READ_AGAIN = 128  # episodes whose entropy is measured: reading all of them takes as long as playing them
FEW = 0.2  # of groups that differ
SATURATED = 0.9  # of pass@1: the signal falls with p (1 - p)
HOPELESS = 0.1  # of pass@16: then nine levels in ten have no success to learn from
ENOUGH = 48  # episodes to judge success by
UNREADABLE = 0.3  # of turns whose format or action is invalid
CUT_OFF = 0.2  # of answers
COLD = 0.2  # nats a token: below it, RL explored little in published runs (arXiv 2606.18487)
GAIN = 0.05  # of success, whose time to be seen is computed
LARGE = 1e8  # parameters from which published rates and entropies hold
FASTEST = {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4}  # of such models; above, published runs diverged


class Start(NamedTuple):
    """What a policy does in an environment before it is trained: Start("sokoban", .2, .7, 16, .6, .5, .1, .0, .3, .1).

    pass_1, pass_k: the chance that one, or one of k, episodes of a level succeeds. differ: the share of groups whose
    rewards differ. entropy: nats a token. invalid, unfinished: shares of turns. between, within: the variances of
    success between levels, and between episodes of a level. levels: how many there were, k episodes of each. crashed:
    share of the episodes, which are left out of all other figures. graded: the share of groups whose rewards differ
    without penalties, too.
    """

    env: str
    pass_1: float
    pass_k: float
    k: int
    differ: float
    entropy: float
    invalid: float
    unfinished: float
    between: float
    within: float
    levels: int = LEVELS
    crashed: float = 0.0
    graded: float = 0.0

    @classmethod
    def of(cls, env: str, groups: Sequence[Sequence[Trajectory]], entropies: Sequence[float]) -> Start:
        """Measure an environment's groups, all of one size; `entropies` are those of its episodes.

        At least one episode did not crash.
        """
        size, played = len(groups[0]), len(groups) * len(groups[0])
        groups = [own for group in groups if (own := [t for t in group if not t.crashed])]
        sizes = [len(group) for group in groups]
        won = [sum(t.success for t in group) for group in groups]
        shares = [each / count for each, count in zip(won, sizes, strict=True)]
        unbiased = [count / max(1, count - 1) for count in sizes]
        within = fmean(share * (1 - share) * each for share, each in zip(shares, unbiased, strict=True))
        turns = max(1, sum(t.turns for group in groups for t in group))
        return cls(
            env=env,
            pass_1=sum(won) / sum(sizes),
            pass_k=fmean(each > 0 for each in won),
            k=size,
            differ=fmean(differs(group) for group in groups),
            entropy=fmean(entropies) if entropies else 0.0,
            invalid=sum(t.invalid_turns for group in groups for t in group) / turns,
            unfinished=sum(t.unfinished_turns for group in groups for t in group) / turns,
            between=max(0.0, variance(shares) - within * fmean(1 / count for count in sizes)) if len(won) > 1 else 0.0,
            within=within,
            levels=len(groups),
            crashed=1 - sum(sizes) / played,
            graded=fmean(differs(group, penalties=False) for group in groups),
        )

    def figures(self, rewarded: bool = True, words: Words = OF_GAMES) -> str:
        """Return the figures in a line. rewarded: whether rewards are learned from."""
        differing = f", groups that differ {self.differ:.0%}" if rewarded else ""
        of_groups = f", pass@{self.k} {self.pass_k:.0%}{differing}" if self.k > 1 else ""
        crashed = f", crashed {self.crashed:.0%}" if self.crashed else ""
        return (
            f"{self.env}, {self.levels} {words.levels}: pass@1 {self.pass_1:.0%}{of_groups}, entropy {self.entropy:.2f}"
            f" nats a token, invalid turns {self.invalid:.0%}, cut-off answers {self.unfinished:.0%}{crashed}"
        )


def verdicts(
    start: Start,
    env: TextEnv,
    answer_tokens: int,
    parameters: int,
    *,
    rewarded: bool = True,
    advising: bool = False,
) -> list[str]:
    """Return what follows from a start, a sentence or two for each finding; at least one.

    Args:
        answer_tokens: `rollout.max_completion_length`.
        parameters: of the model; a small one gains from entropies at which large ones did not.
        rewarded: False where a teacher replaces the reward: groups need not differ.
        advising: whether the start was measured by --advise, which is then not recommended.
    """
    found, words = list[str](), words_of([env.name])
    rare = start.pass_k < HOPELESS * min(1, start.k / ANSWERS)  # k times the tries win at most k times the levels
    if start.unfinished > CUT_OFF:
        found.append(
            f"Answers are cut off: raise rollout.max_completion_length (now {answer_tokens}), or ask for shorter ones."
        )
    if not rewarded:
        return [*found, *_beside_a_teacher(start, parameters)]
    if start.invalid > UNREADABLE:
        found.append(
            "The answer format is not learnt: show it (protocol.example), begin it (protocol.force_think: true), or"
            " train phase 1 on a few hundred demonstrations (posttrain env demos)."
        )
    if start.levels * start.k < ENOUGH:
        few = f"{start.levels * start.k} {words.episodes} are too few to judge success by"
        if advising:
            return [*found, f"{few}: more validation {words.levels} are needed. {env.more_levels}"]
        return [*found, f"{few}; --advise {words.plays} more, and trains nothing."]
    if start.pass_1 > SATURATED:
        harder = f" ({env.harder})" if env.harder else ""
        idle, won = 1 - start.differ, f"{start.pass_1:.0%} of the {words.episodes} succeed"
        seen = f"{idle:.0%} of the groups teach nothing" if idle >= 0.005 else won
        found.append(
            f"Saturated: {seen}. Take harder {words.levels}{harder}, or"
            f" those that are not always {words.won} (envs.difficulty: auto), or fewer demonstrations before."
        )
    elif rare and start.graded >= FEW:
        reached = f"{start.k} tries succeed on {start.pass_k:.0%} of the {words.levels}"
        counted = "; the partial rewards of this environment teach before anything is won."
        if env.name == "prompts":
            counted = ". A prompt counts as solved from a first reward of options.success (by default 1)."
        found.append(f"Rewards differ in {start.graded:.0%} of the groups, which teach, though {reached}{counted}")
    elif rare:
        easier = f" ({env.easier})" if env.easier else ""
        shown, prompt = "phase 1 on good answers", "a clearer prompt"
        if env.has("expert"):
            shown, prompt = "demonstrations (posttrain env demos, then phase 1)", "a clearer prompt (protocol.system)"
        penalties = " Groups differ by penalties, which teach the format alone." if start.differ >= FEW else ""
        found.append(
            f"Hopeless as it is: {start.k} tries succeed on {start.pass_k:.0%} of the {words.levels}.{penalties} First"
            f" {shown}, {prompt}, or easier {words.levels}{easier}."
        )
    elif start.differ < FEW and start.k > 1:
        found.append(
            f"Few groups teach: the rewards of {start.differ:.0%} differ. Take {words.levels} that are {words.won} now"
            f" and then (envs.difficulty: auto), or more {words.samples} (rollout.num_generations)."
        )
    if start.entropy < COLD and start.pass_1 <= SATURATED and parameters >= LARGE:
        found.append(
            f"The entropy is low, so {words.samples} resemble each other: fewer epochs or rows of imitation, or"
            " a higher rollout.temperature."
        )
    if not found:
        teach = f"{start.differ:.0%} of the groups teach" if start.k > 1 else f"success is {start.pass_1:.0%}"
        found.append(f"A good start: {teach}.")
    return found


def _beside_a_teacher(start: Start, parameters: int) -> list[str]:
    """Return what follows from a start where rewards are not learned from; at least a sentence."""
    found: list[str] = []
    if start.invalid > UNREADABLE:
        found.append(
            f"{start.invalid:.0%} of the turns are invalid: a teacher that does not know the answer format cannot"
            " correct them. Show it (protocol.example), or train phase 1 on demonstrations (posttrain env demos)."
        )
    if start.entropy < COLD and parameters >= LARGE:
        found.append(
            "The entropy is low, so the teacher judges answers that resemble each other: a higher rollout.temperature."
        )
    found.append(
        f"Rewards are measured and not learned from (distillation.reward: false), and every group teaches: success is"
        f" {start.pass_1:.0%}, and the teacher's is what can be gained (evaluate_model.py measures it)."
    )
    return found


def rate_warning(cfg: StarPORun, parameters: int) -> str:
    """Return what to say about the learning rate; empty where it is within what is known to be stable."""
    rate, most = cfg.trainer.learning_rate, FASTEST[cfg.model.tuning]
    if rate is None or rate <= most or parameters < LARGE:
        return ""
    return (
        f"trainer.learning_rate {rate:g} is above what published runs of models of this size found stable with"
        f" model.tuning {cfg.model.tuning} ({most:g})."
    )


def steps_to_see(start: Start, groups: int, size: int) -> int:
    """Return over how many steps success has to be averaged, before and after, to see a gain of `GAIN` at 95 %.

    Both means are given the variance of a success halfway through the gain, as in a pooled test of two shares: at 1 %
    of success, it is a third of what it is at 3.5 %. The part of it between levels is assumed to stay the same.

    Args:
        start: with a success between 0 and 1.
        groups, size: of a step, each on a level of its own; episodes of a group.
    """
    halfway = min(start.pass_1 + GAIN / 2, 1 - GAIN / 2)
    grown = halfway * (1 - halfway) / (start.pass_1 * (1 - start.pass_1))
    error = math.sqrt(grown * (start.between + start.within / size) / groups)
    return max(1, math.ceil(2 * (1.96 * error / GAIN) ** 2))


def measure_start(learner: Learner, groups: Sequence[Sequence[Trajectory]], title: str) -> Start:
    """Return what the policy does in the environment of this title, by groups of one size that it has played."""
    written = [t for group in groups for t in group if not t.crashed and t.tokens]
    written = written[:: -(-len(written) // READ_AGAIN) or 1]
    return Start.of(title, groups, floats(learner.mean_entropies(written)) if written else [])


def advice_text(
    cfg: StarPORun,
    starts: Mapping[str, Start],
    parameters: int,
    seconds: float | None = None,
    *,
    updated: bool = True,
) -> str:
    """Return what the starts show and what follows, a line each.

    Args:
        starts: by title of the environment.
        seconds: that a step takes, which --advise measures; None before the first update of a run.
        updated: whether that step kept a group to learn from.
    """
    lines: list[str] = []
    for section in cfg.envs:
        if (start := starts.get(section.title)) is not None:
            longest = cfg.rollout.max_completion_length
            found = verdicts(
                start,
                open_env(section),
                longest,
                parameters,
                rewarded=cfg.rewarded,
                advising=seconds is not None,
            )
            lines += [start.figures(cfg.rewarded, words_of([section.name])), *(f"  {each}" for each in found)]
    lines += [text] if (text := rate_warning(cfg, parameters)) else []
    if seconds is not None and starts:
        groups, steps = cfg.rollout.groups, cfg.trainer.max_steps
        without = " without distillation from its sources" if cfg.remembers else ""
        without = without if updated else " without an update (none of its groups was kept)"
        lines.append(f"A step takes {_duration(seconds)}{without}, all {steps} take {_duration(steps * seconds)}.")
        moving = [start for start in starts.values() if 0 < start.pass_1 < 1]  # the others' error is not known
        if moving:
            steps = max(steps_to_see(start, groups, cfg.rollout.num_generations) for start in moving)
            lines[-1] += f" A gain of {100 * GAIN:.0f} points is seen in the mean of {steps} steps of {groups} groups."
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    """Write a duration with two digits at least: .04 -> 0.04 s, 75 -> 75 s, 400 -> 6.7 min, 9000 -> 2.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def first_advice(cfg: StarPORun, learner: Learner, groups: Sequence[Sequence[Trajectory]], parameters: int) -> str:
    """Return the same by what the first step played, before anything was learned from it."""
    titles = dict.fromkeys(group[0].env for group in groups)  # in the same order in all processes
    starts = dict[str, Start]()
    for title in titles:
        own = [group for group in groups if group[0].env == title]
        if not all(t.crashed for group in own for t in group):
            starts[title] = measure_start(learner, own, title)
    words = words_of(env.name for env in cfg.envs)
    return f"Before the first update, on training {words.levels}:\n{advice_text(cfg, starts, parameters)}"
