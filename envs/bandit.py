"""Does the model choose the better arm?  A slot machine whose arms pay by chance: one pull by name, or many by count.

One pull (`pulls=1`) is RAGEN's bandit: the names of the two arms say which one takes the risk. Over several pulls the
names say nothing, and the arms have to be tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from envs.base import TextEnv, split_by_hash
from envs.sentences import counted, listed

# Names by split and kind: those that sound safe, those that sound risky. No name is in two splits, and the two arms of
# a level are of one kind.
NAMES = {
    "train": (
        (
            "Teacher Nurse Baker Gardener Tailor Clerk Postman Plumber Carpenter Dentist Farmer Weaver",
            "Trader Gambler Stuntman Astronaut Smuggler Racer Pirate Matador Spy Daredevil Buccaneer Skydiver",
        ),
        (
            "Sheep Tortoise Hamster Cow Rabbit Goose Donkey Snail",
            "Tiger Shark Cobra Wolf Crocodile Scorpion Hyena Bear",
        ),
    ),
    "validation": (
        ("Accountant Cook Optician Cleaner Florist Janitor", "Speculator Bandit Mercenary Acrobat Mountaineer Duelist"),
        ("Lamb Duck Pony Dove", "Lion Viper Piranha Panther"),
    ),
    "test": (
        (
            "Librarian Archivist Pharmacist Notary Potter Cobbler",
            "Prospector Burglar Bullfighter Firewalker Outlaw Boxer",
        ),
        ("Hen Goldfish Mouse Pigeon", "Leopard Eagle Python Jaguar"),
    ),
}
PAIRS = {
    split: [(safe, risky) for low, high in kinds for safe in low.split() for risky in high.split()]
    for split, kinds in NAMES.items()
}
SPLIT_OF = {name: split for split, pairs in PAIRS.items() for pair in pairs for name in pair}
LETTERS = "ABCDEFGHIJ"  # names of arms that say nothing


class Arm(NamedTuple):
    """An arm that pays `prize` with a chance, else nothing: Arm(name="Trader", chance=0.25, prize=1.0)."""

    name: str
    chance: float
    prize: float

    @property
    def mean(self) -> float:
        return self.chance * self.prize


class Machine(NamedTuple):
    """Which levels there are: Machine(arms=2, pulls=1, reversed=False, sure=0.1, chance=0.25, gap=0.2)."""

    arms: int
    pulls: int
    reversed: bool
    sure: float
    chance: float
    gap: float


class Bandit(TextEnv):
    """Choose the better arm of a slot machine: one pull by the meaning of two names, or many pulls by their results.

    ## Action space
    The name of an arm of the level: two names such as `Teacher` and `Trader` with one pull, else letters from `A`.

    ## Observation space
    Text: the names with one pull; else wins and pulls of each arm. Then the last pull, and how many are left.

    ## Rewards
    What the arm pays. One pull: `sure` from one arm; 1 with probability `chance`, else 0, from the other. More pulls: 1
    with a probability of the arm's own, else 0.

    ## Starting state
    One pull: a pair of names in either order. More pulls: probabilities from 0.05 to 0.95.

    ## Episode end
    Terminated after `pulls` pulls. Success: the last pull was of the arm that pays most on average; `failure` is "worse
    arm" otherwise. An invalid action is not a pull. Truncation is left to the protocol, after `max_turns`: `pulls`.

    ## Arguments
    - `arms=2`: 2 to 10; 2 with one pull.
    - `pulls=1`: 1, or at least one for each arm.
    - `reversed=False`: the arm whose name sounds risky pays the sure sum; only with one pull.
    - `sure=0.1`: what the safe arm pays, above 0 and below `chance`.
    - `chance=0.25`: how often the risky arm pays 1, at most 1.
    - `gap=None`: how far the best probability is above the others, 0.01 to 0.5; 0.2 when None; only with more pulls.
    - `render_mode=None`: or "ansi".

    `info["regret"]` is the sum of (mean of the best arm - mean of the arm that was pulled).
    """

    name = "bandit"
    harder, easier = "arms: 4, pulls: 10, gap: 0.1", "gap: 0.4"
    actions = tuple(SPLIT_OF)  # `begin` sets those of the level
    deterministic = False
    observable = False  # what the arms pay on average

    def __init__(
        self,
        arms: int = 2,
        pulls: int = 1,
        reversed: bool = False,
        sure: float = 0.1,
        chance: float = 0.25,
        gap: float | None = None,
        render_mode: str | None = None,
    ):
        if not 2 <= arms <= len(LETTERS) or (pulls == 1 and arms != 2) or (pulls != 1 and pulls < arms):
            raise ValueError(
                f"bandit needs 2 arms and 1 pull (names that mean something), or 2 to {len(LETTERS)} arms and at least"
                f" one pull for each of them, not arms={arms}, pulls={pulls}."
            )
        if pulls > 1 and reversed:
            raise ValueError("bandit has names to reverse with pulls=1 only: leave out reversed, or set pulls=1.")
        if pulls == 1 and gap is not None:
            raise ValueError("bandit has a gap between chances with more pulls only: leave out gap, or set pulls.")
        gap = 0.2 if gap is None else gap
        if not 0 < sure < chance <= 1 or not 0.01 <= gap <= 0.5:
            raise ValueError(
                "bandit needs 0 < sure < chance <= 1 (the risk has to be worth taking) and 0.01 <= gap <= 0.5, not"
                f" sure={sure}, chance={chance}, gap={gap}."
            )
        self.max_turns = pulls
        self.example_state = "If the arms were Butterfly and Beetle" if pulls == 1 else ""
        super().__init__(render_mode)
        self.config = Machine(arms, pulls, reversed, float(sure), float(chance), float(gap))

    @classmethod
    def draw(cls, config: Machine, rng: np.random.Generator) -> Iterator[tuple[Arm, ...] | None]:
        while True:
            yield _named(config, rng) if config.pulls == 1 else _numbered(config, rng)

    @classmethod
    def key_of(cls, level: tuple[Arm, ...]) -> str:
        """Return the names where they mean something, else the chances, in any order."""
        return " ".join(sorted(arm.name if arm.name in SPLIT_OF else f"{arm.chance:.2f}" for arm in level))

    @classmethod
    def split_of(cls, level: tuple[Arm, ...]) -> str | None:
        """Return the split of the pair of names; of the chances where names say nothing."""
        return SPLIT_OF.get(level[0].name) or split_by_hash(cls.key_of(level))

    def begin(self, level: tuple[Arm, ...]) -> None:
        self.level = level
        self.actions = tuple(arm.name for arm in level)
        self.best = max(level, key=lambda arm: arm.mean)
        self.tries, self.wins = [0] * len(level), [0] * len(level)
        self.regret = 0.0
        self.last: tuple[Arm, float] | None = None

    @property
    def pulls_left(self) -> int:
        return self.config.pulls - sum(self.tries)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        name, reward = self.canonical_action(action), 0.0
        pulled = name is not None and self.pulls_left > 0
        if pulled:
            number = (self.actions or ()).index(name)
            arm = self.level[number]
            paid = bool(self.noise.random() < arm.chance)
            reward = arm.prize * paid
            self.tries[number] += 1
            self.wins[number] += paid
            self.regret += self.best.mean - arm.mean
            self.last = (arm, reward)
        over = self.pulls_left == 0 and self.last is not None
        success = over and self.last is not None and self.last[0] == self.best
        info = {
            "success": success,
            "action_is_valid": name is not None,
            "action_is_effective": pulled,
            "failure": "worse arm" if over and not success else "",
            "regret": self.regret,
        }
        return self.observe(), reward, over, False, info

    # -- text ------------------------------------------------------------------------------------------------------

    def observe(self) -> str:
        if self.style == "plain":
            return self._plain_observation()
        counts = [
            f"{arm.name} {won}/{tried}" for arm, won, tried in zip(self.level, self.wins, self.tries, strict=True)
        ]
        parts = ["Arms", *(self.actions or ())] if self.config.pulls == 1 else counts
        parts += [f"Last {self.last[0].name} paid {self.last[1]:g}"] if self.last else []
        parts += [f"Pulls left {self.pulls_left}"] if self.config.pulls > 1 else []
        return " ".join(parts)

    def _plain_observation(self) -> str:
        names = list(self.actions or ())
        if self.config.pulls == 1:
            said = [f"The arms are {listed(names)}."]
        else:
            results = zip(names, self.wins, self.tries, strict=True)
            said = [
                f"Arm {name} paid in {won} of {counted(tried, 'pull')}."
                if tried
                else f"Arm {name} has not been pulled."
                for name, won, tried in results
            ]
        said += [f"The last pull was of {self.last[0].name} and paid {self.last[1]:g}."] if self.last else []
        said += [f"You have {counted(self.pulls_left, 'pull')} left."] if self.config.pulls > 1 else []
        return " ".join(said)

    def rules(self) -> str:
        config = self.config
        if self.style == "plain" and config.pulls > 1:
            return (
                f"A slot machine has the arms {listed(LETTERS[: config.arms])}. Each arm pays 1 with a chance of its"
                f" own, else 0. You have {config.pulls} pulls. Win as much as you can, and find the arm with the best"
                " chance: your last pull must be of that arm. An action is the name of the arm that you pull."
            )
        if config.pulls == 1:
            return (
                f"A slot machine has two arms. One pays {config.sure:g} every time. The other pays 1 or nothing, and"
                " more on average. The meaning of their names tells which is which. Pull the arm that pays more on"
                " average. The action is its name."
            )
        return (
            f"A slot machine has the arms {', '.join(LETTERS[: config.arms])}. Each pays 1 with a chance of its own,"
            f" else 0. You have {config.pulls} pulls. Win as much as you can, and find the arm with the best chance:"
            " the last pull must be of that arm. A 2/3 means that A paid in 2 of 3 pulls. The action is the name of an"
            " arm."
        )

    def state_key(self) -> str:
        """Return arms with what is known of them, in any order."""
        known = zip(self.level, self.wins, self.tries, strict=True)
        return " ; ".join(sorted(f"{arm.name} {arm.mean:g} {won}/{tried}" for arm, won, tried in known))

    # -- players ---------------------------------------------------------------------------------------------------

    def cues(self) -> dict[str, tuple[str, ...]]:
        """One pull: the `risky` arm and the `safe` one. Many: the arms `untried` so far, and the `leading` ones."""
        names = self.actions or ()
        if self.config.pulls == 1:
            return {"risky": (self.best.name,), "safe": tuple(name for name in names if name != self.best.name)}
        shares = [won / max(1, tried) for won, tried in zip(self.wins, self.tries, strict=True)]
        untried = tuple(name for name, tried in zip(names, self.tries, strict=True) if not tried)
        leading = tuple(name for name, share in zip(names, shares, strict=True) if share == max(shares))
        return {"untried": untried, "leading": leading}

    def thought(self) -> str:
        if self.style == "compact":
            return super().thought()
        cues = self.cues()
        if self.config.pulls == 1:
            return f"{cues['risky'][0]} is the arm that takes a risk, and {cues['safe'][0]} the one that pays for sure."
        untried = f"I have not tried {listed(cues['untried'])} yet. " if cues["untried"] else ""
        lead = f"{listed(cues['leading'])} {'has' if len(cues['leading']) == 1 else 'have'} paid most often so far."
        return f"{untried}{lead if any(self.tries) else 'No arm has been pulled.'}"

    def thought_of(self, action: str) -> str:
        return self.thought() if self.style == "compact" else f"{self.thought()} I pull {action}."

    def example(self) -> tuple[str, tuple[str, ...]]:
        if self.config.pulls == 1:
            thought = "Of Butterfly and Beetle, Butterfly sounds like the one that takes risks. I pull Butterfly."
            return thought, ("Butterfly",)
        return "C has not been pulled yet, so I try it.", ("C", "C")

    def players(self) -> dict[str, str]:
        """`safe` takes the sure sum. `greedy` pulls the arm that leads, `even` the one with the fewest pulls."""
        cues, random = self.cues(), self.choose()
        if self.config.pulls == 1:
            return {"random": random, "safe": cues["safe"][0]}
        rarest = [name for name, tried in zip(self.actions or (), self.tries, strict=True) if tried == min(self.tries)]
        return {"random": random, "greedy": self.choose(cues["leading"]), "even": self.choose(rarest)}

    def expert(self) -> str:
        """Return the better arm with one pull; else that with the highest upper bound on its chance.

        The bound is the mean of the posterior Beta(1 + wins, 1 + losses) plus its standard deviation times a factor
        that falls to 0 with the last pull, where there is nothing left to explore for.
        """
        if self.config.pulls == 1:
            return self.best.name
        width = math.sqrt(2 * math.log(max(1, self.pulls_left)))

        def bound(number: int) -> float:
            total = self.tries[number] + 2
            mean = (self.wins[number] + 1) / total
            return mean + width * math.sqrt(mean * (1 - mean) / (total + 1))

        return (self.actions or ())[max(range(len(self.level)), key=bound)]


def _named(config: Machine, rng: np.random.Generator) -> tuple[Arm, ...]:
    """Return two arms whose names say what they are, in any order; reversed semantics change neither."""
    pairs = PAIRS[list(PAIRS)[int(rng.integers(len(PAIRS)))]]
    names = pairs[int(rng.integers(len(pairs)))]
    pays = (config.chance, 1.0), (1.0, config.sure)
    arms = [Arm(name, *pay) for name, pay in zip(names, pays if config.reversed else pays[::-1], strict=True)]
    return tuple(arms[::-1] if rng.random() < 0.5 else arms)


def _numbered(config: Machine, rng: np.random.Generator) -> tuple[Arm, ...] | None:
    """Return arms of different chances, the best of them well above the others; None if these are too close."""
    chances = [round(float(chance), 2) for chance in rng.uniform(0.05, 0.95, config.arms)]
    second, best = sorted(chances)[-2:]
    clear = best - second >= config.gap - 1e-9
    return tuple(Arm(name, chance, 1.0) for name, chance in zip(LETTERS, chances, strict=False)) if clear else None
