"""What happens in an episode of shopping?  Search, look, choose options, buy: the purchase is scored and ends it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from envs.base import TextEnv, known
from envs.web_shop.catalogue import Catalogue, CatalogueSource, Goal, fold, key_of, search_words
from envs.web_shop.generated import generate_catalogue, search_text
from envs.web_shop.pages import BEFORE, BUY, NEXT, SEARCH, View, choose_option, links, page_items, page_text
from envs.web_shop.published import load_published
from envs.web_shop.reward import Score, matching_options, purchase_score, wins

LONGEST = 400  # characters of an action that are read


class WebShop(TextEnv):
    """Buy what an instruction asks for: the kind of product, its attributes, options and price.

    ## Action space
    Free text: `search[words]`, also from other pages than the search page, and `click[label]`; at most 400 characters.
    A label that the page does not have is invalid.

    ## Observation space
    Text: the instruction and the page; what can be clicked stands in brackets.

    ## Rewards
    For the purchase, "dense": the published score, r_type * (attributes matched + options matched + 1 if the price is
    within the limit) / (attributes + options asked for + 1), see reward.py; "sparse": 1 for a score of 1, else 0.

    ## Starting state
    The search page and an instruction that some product fulfils.

    ## Episode end
    Terminated by the purchase: success for a score of 1, else `failure` "wrong purchase". Truncation is left to the
    protocol, after `max_turns`: 10, or 15 with files.

    ## Arguments
    - `path="embedded"`: a synthetic catalogue, or a folder with WebShop's files.
    - `rows=None`: products read from the files; 1,000 when None.
    - `human_goals=None`: files: instructions by people (when None or True) or generated ones.
    - `reward="dense"`: or "sparse".
    - `results_per_page=5`: 3 to 10.
    - `render_mode=None`: or "ansi".

    `info["score"]` is the score of the purchase.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 2}
    name = "web_shop"
    example_state = "If the instruction were to buy a red cotton shirt"
    actions = None
    max_turns = 10
    observable = False  # the products and pages that were not looked at yet

    def __init__(
        self,
        path: str = "embedded",
        rows: int | None = None,
        human_goals: bool | None = None,
        reward: str = "dense",
        results_per_page: int = 5,
        render_mode: str | None = None,
    ):
        if path == "embedded" and (rows, human_goals) != (None, None):
            raise ValueError("web_shop: rows and human_goals are about WebShop's files. Leave them out, or set path.")
        rows = 1000 if rows is None else rows
        if rows < 1 or not 3 <= results_per_page <= 10:
            raise ValueError(
                f"web_shop needs rows >= 1 and results_per_page from 3 to 10, not rows={rows}, "
                f"results_per_page={results_per_page}."
            )
        self.sparse = known("reward", reward, ("dense", "sparse")) == "sparse"
        self.per_page = results_per_page
        super().__init__(render_mode)
        self.config = CatalogueSource("embedded", 0, False)
        if path != "embedded":
            self.config = CatalogueSource(path, rows, human_goals is not False)
            catalogue(self.config)  # report unreadable files at once
            self.max_turns = 15  # as RAGEN has it for the full catalogue

    @classmethod
    def draw(cls, config: CatalogueSource, rng: np.random.Generator) -> Iterator[Goal]:
        goals = catalogue(config).goals
        while True:
            yield goals[int(rng.integers(len(goals)))]

    @classmethod
    def key_of(cls, level: Goal) -> str:
        return key_of(level)

    @classmethod
    def split_of(cls, level: Goal) -> str:
        """Return the split: embedded goals by a hash of their three products, files as `published` says."""
        return level.split

    def begin(self, level: Goal) -> None:
        self.level = level
        self.view = View()

    @property
    def shop(self) -> Catalogue:
        return catalogue(self.config)

    # -- play ------------------------------------------------------------------------------------------------------

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before, following = self.view, self._follow(action)
        reward, terminated = 0.0, before.page == "bought"
        if following is not None:
            self.view, terminated = following, following.page == "bought"
        won, total = False, 0.0
        if terminated:
            scored = self._score(self.view)
            won, total = wins(scored), scored.total
            if following is not None:
                reward = float(won) if self.sparse else total
        info = {
            "success": won,
            "action_is_valid": following is not None,
            "action_is_effective": self.view != before,
            "failure": "wrong purchase" if terminated and not won else "",
            "score": total,
        }
        return self.observe(), reward, terminated, False, info

    def _follow(self, action: str) -> View | None:
        """Return where an action leads; None for one that cannot be read or is not on this page."""
        action = action[: LONGEST + 2].strip()
        verb, bracket, rest = action.partition("[")
        if len(action) > LONGEST or not bracket or not rest.endswith("]"):
            return None
        verb, argument = verb.strip().lower(), rest[:-1]
        if verb == "search" and self.view.page != "bought":  # from every page, as WebShop's text environment has it
            return View("results", results=self.shop.search(argument)) if search_words(argument) else None
        if verb != "click":
            return None
        return {fold(label): view for label, view in self._links().items()}.get(fold(argument))

    def _links(self) -> dict[str, View]:
        return links(self.shop, self.view, self.per_page)

    def _score(self, view: View) -> Score:
        """Return what a purchase of the open item would be worth."""
        return purchase_score(
            self.shop.products[view.item], self.level, self.shop.product(self.level.asin), dict(view.chosen)
        )

    # -- text ------------------------------------------------------------------------------------------------------

    def observe(self) -> str:
        return f"Instruction: {self.level.instruction}\n{page_text(self.shop, self.view, self.per_page)}"

    def rules(self) -> str:
        return (
            "You are in a shop. Buy what the instruction asks for: the kind of product, its attributes, options and"
            " price. On the search page write search[words]. Elsewhere click what stands in brackets: click[Next >]."
            " On a product's page click each option that is asked for, then click[Buy Now], which ends the game."
            f" Reward: {'1 if all that is asked for is right' if self.sparse else 'the share of it that is right'}."
        )

    def state_key(self) -> str:
        return f"{key_of(self.level)} {tuple(self.view)}"

    # -- players ---------------------------------------------------------------------------------------------------

    def expert(self) -> str:
        """Buy the first result that lacks nothing, else the product that the goal was written for."""
        right = next((item for item, scored in self._offers() if wins(scored)), self.shop.places[self.level.asin])
        if self.view.item >= 0 and wins(self._best(self.view.item)):
            right = self.view.item
        return self._toward(right)

    def players(self) -> dict[str, str]:
        """`first` takes the first result, whatever it is; `hasty` finds the product and chooses no options."""
        first = self.view.item if self.view.item >= 0 else next(iter(self.view.results), -1)
        clicks = [f"click[{label}]" for label in self._links()] or [f"click[{SEARCH}]"]  # the last page has no links
        words = search_text(self.level.instruction).split() or ["all"]
        return {
            "random": self.choose(clicks) if self.view.page != "search" else f"search[{self.choose(words)}]",
            "first": self._toward(first),
            "hasty": self._toward(self.shop.places[self.level.asin], options=False),
        }

    def _toward(self, item: int, options: bool = True) -> str:
        """Return the next action on the way to buying an item, with the options asked for or without any."""
        view = self.view
        if view.page == "search":
            return f"search[{self._query(item)}]"
        if view.page == "results":
            return self._toward_on_results(item)
        if view.page == "item" and view.item == item:
            missing = self._to_choose() if options else []
            return self._click_for(choose_option(view, *missing[0])) if missing else f"click[{BUY}]"
        return f"click[{BEFORE}]"  # also once it is over, where nothing can be clicked

    def _toward_on_results(self, item: int) -> str:
        view = self.view
        if item not in view.results:
            return f"click[{SEARCH}]"
        if item in page_items(view, view.number, self.per_page):
            return f"click[{self.shop.products[item].asin}]"
        return f"click[{NEXT if view.results.index(item) > view.number * self.per_page else BEFORE}]"

    def _click_for(self, target: View) -> str:
        """Return the click that leads to a view; buying where none does."""
        return next((f"click[{label}]" for label, view in self._links().items() if view == target), f"click[{BUY}]")

    def _query(self, item: int) -> str:
        """Return the instruction's words, or the title's where those do not find the item on the first three pages."""
        words = search_text(self.level.instruction)
        if search_words(words) and (item < 0 or item in self.shop.search(words)[: 3 * self.per_page]):
            return words
        return self.shop.products[item].title[:200]

    def cues(self) -> dict[str, tuple[str, ...]]:
        """`right`: results of this page that lack nothing. `missing`: clicks on options that are still to be chosen."""
        right = [f"click[{self.shop.products[item].asin}]" for item, scored in self._offers() if wins(scored)]
        missing = [self._click_for(choose_option(self.view, name, value)) for name, value in self._to_choose()]
        return {"right": tuple(right), "missing": tuple(missing)}

    def example(self) -> tuple[str, tuple[str, ...]]:
        return "I look for a red cotton shirt first.", ("search[red cotton shirt]",)

    def thought(self) -> str:
        """Return what each product on the page lacks of what the instruction asks for, as far as the page shows it."""
        view, level = self.view, self.level
        plain, wanted = self.style == "plain", ", ".join((*level.attributes, *level.options))
        if view.page == "search":
            return f"I need a product with {wanted}." if plain else f"Missing: a product, {wanted}."
        if view.page != "results":
            lacking = _lacks(self._score(view)) or "nothing"
            return f"Still missing: {lacking}." if plain else f"Missing: {lacking}."
        sentences = []
        for item, scored in self._offers():
            lacking = _lacks(scored._replace(options=()))  # a page of results shows no options
            if wins(scored) or lacking:
                sentences.append(f"{self.shop.products[item].asin} {f'lacks {lacking}' if lacking else 'fits so far'}")
            if wins(scored):
                break
        nothing = "Nothing on this page fits" if plain else "Missing: a product"
        return f"{'; '.join(sentences) or nothing}."

    def _offers(self) -> list[tuple[int, Score]]:
        """Return the results of this page, and what each is worth with the best choice of options."""
        view = self.view
        items = page_items(view, view.number, self.per_page) if view.page == "results" else ()
        return [(item, self._best(item)) for item in items]

    def _best(self, item: int) -> Score:
        chosen = tuple(matching_options(self.shop.products[item], self.level.options).items())
        return self._score(View("item", item=item, chosen=chosen))

    def _to_choose(self) -> list[tuple[str, str]]:
        """Return options of the open item that are asked for and not chosen yet."""
        if self.view.page != "item":
            return []
        matching = matching_options(self.shop.products[self.view.item], self.level.options)
        return [each for each in matching.items() if each not in self.view.chosen]


@lru_cache(maxsize=4)
def catalogue(source: CatalogueSource) -> Catalogue:
    """Return the catalogue of a source, made once per process: no environment holds it, so copies of them are cheap."""
    return generate_catalogue() if source.path == "embedded" else load_published(source)


def _lacks(scored: Score) -> str:
    """Return what a purchase lacks, in words: "waterproof, red, lower price"."""
    if scored.kind < 1:
        return "right kind"
    return ", ".join((*scored.attributes, *scored.options, *(() if scored.price else ("lower price",))))
