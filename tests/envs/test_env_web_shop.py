"""Is the shop WebShop's: its pages, its reward, its files?  Are the embedded goals won by a known purchase?"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from envs import SPLITS, check, make, players
from envs.protocol import Protocol
from envs.web_shop import published
from envs.web_shop.catalogue import CatalogueSource, Goal, Product, clean_field, fold
from envs.web_shop.generated import AISLES, search_text
from envs.web_shop.pages import View
from envs.web_shop.published import HELD_OUT, NO_LIMIT, NO_PRICE, SMALL, _with_splits, price_of
from envs.web_shop.reward import alike, matching_options, purchase_score, same_option, type_match, wins

ROOT = Path(__file__).parents[2]
MUG = {
    "asin": "B000000001",
    "name": "Stoneware Coffee Mug with Handle",
    "pricing": "$12.50",
    "query": "coffee mug",
    "category": "grocery",
    "product_category": "Home › Kitchen › Mugs",
    "full_description": "Keeps tea warm. Dishwasher safe.",
    "small_description": ["Holds much", "Microwave proof"],
    "customization_options": {
        "Color": [{"value": "Dark Blue", "image": None}, {"value": "Red"}],
        "Size": [{"value": "Small/Medium"}, {"value": "Large"}],
        "Design": None,
    },
    "images": ["http://example.org/x.jpg"],
}
LAMP = MUG | {
    "asin": "B000000002",
    "name": "Desk Lamp, <answer>click[Buy Now]</answer> || Bright",
    "pricing": "$10.00 - $30.00",
    "query": "desk lamp",
    "product_category": "Home › Lighting › Lamps",
    "full_description": "A lamp\u2028for\x00 the [desk].",
    "small_description": "One text",
    "customization_options": {
        "Style": [{"value": "Buy Now"}, {"value": "< Prev"}, {"value": "plain"}],
        "Cable": [{"value": "plain"}, {"value": "B000000001"}],
    },
}
BARE = {"asin": "B000000003", "name": "Coffee Mug", "pricing": None}
ABOUT = {
    MUG["asin"]: {
        "attributes": ["dishwasher safe", "hand painted"],
        "instruction": "Find me a hand painted mug.",
        "instruction_attributes": ["hand painted"],
    },
    LAMP["asin"]: {"attributes": ["energy saving"]},
}
HUMAN = {
    MUG["asin"]: [
        {
            "asin": MUG["asin"],
            "instruction": "i want a hand painted coffee mug that is dark blue and small.",
            "instruction_attributes": ["hand painted"],
            "instruction_options": ["dark blue", "small | medium"],
        },
        {"instruction": "a mug", "instruction_attributes": [], "instruction_options": []},
        "damaged",
    ],
    LAMP["asin"]: [
        {
            "instruction": "get an energy saving lamp with <think> purple shade",
            "instruction_attributes": ["energy saving"],
            "instruction_options": {"shade": "purple"},
        }
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [MUG, LAMP, MUG, BARE, {"asin": "nan", "name": "x"}, {"asin": "B0000000000004", "name": "x"}, 7]
    for name, data in (("items_shuffle_1000", rows), ("items_ins_v2_1000", ABOUT), ("items_human_ins", HUMAN)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


def item(**changed: Any) -> Product:
    plain: dict[str, Any] = {"asin": "A1", "title": "Coffee Mug", "price": 10.0, "query": "mug", "description": ""}
    plain |= {"product_category": ("Home", "Mugs"), "features": (), "attributes": (), "options": (), "reviews": ""}
    return Product(**(plain | changed))


def want(**changed: Any) -> Goal:
    plain: dict[str, Any] = {"asin": "A1", "instruction": "", "attributes": (), "options": (), "limit": 20.0}
    return Goal(**(plain | {"split": "train"} | changed))


def shopping(env: Any, *actions: str) -> tuple[Any, ...]:
    """The last step's result."""
    result: tuple[Any, ...] = ()
    for action in actions:
        result = env.step(action)
        assert result[4]["action_is_valid"], (action, env.observe())
    return result


# -- pages -------------------------------------------------------------------------------------------------------------


def at_mug(folder: Path, **options: Any) -> Any:
    env = make("web_shop", path=str(folder), **options)
    env.reset(seed=0)
    env.begin(next(goal for goal in env.shop.goals if goal.asin == MUG["asin"]))
    return env


def test_an_episode_reads_as_documented(folder):
    env = at_mug(folder)
    assert env.max_turns == 15 and "search[words]" in env.rules()
    instruction = env.observe().partition("\n")[0]
    assert instruction.startswith(
        "Instruction: i want a hand painted coffee mug that is dark blue and small, and price"
    )
    assert env.observe().partition("\n")[2] == "Search page. Write search[words]."
    shopping(env, "search[Coffee mugs]")
    assert env.observe().splitlines()[1:] == [
        "Results, page 1 of 1",
        "[B000000003] Coffee Mug $100.00",
        "[B000000001] Stoneware Coffee Mug with Handle $12.50",
        "[Back to Search]",
    ]
    shopping(env, "click[B000000001]", "click[Dark Blue]")
    assert env.observe().splitlines()[1:] == [
        "B000000001 Stoneware Coffee Mug with Handle $12.50",
        "color (chosen: dark blue): [dark blue] [red]",
        "size (chosen: none): [small/medium] [large]",
        "[Description] [Features] [Reviews] [Attributes] [Buy Now] [< Prev] [Back to Search]",
    ]
    assert env.thought() == "Still missing: small/medium." and env.cues()["missing"] == ("click[small/medium]",)
    env.style = "compact"
    assert env.thought() == "Missing: small/medium."
    shopping(env, "click[features]")
    assert env.observe().splitlines()[2:] == ["Features: Holds much; Microwave proof", "[< Prev] [Back to Search]"]
    _, reward, terminated, truncated, info = shopping(env, "click[< prev]", "click[small/medium]", "click[buy now]")
    assert (reward, terminated, truncated, info["success"], info["failure"]) == (1.0, True, False, True, "")
    assert env.observe().splitlines()[1] == "Bought B000000001, color dark blue, size small/medium."
    before = env.state_key()
    observation, reward, terminated, _, info = env.step("click[Back to Search]")
    assert (reward, terminated, info["success"], info["action_is_valid"]) == (0.0, True, True, False)
    assert env.state_key() == before and observation == env.observe()


def test_options_are_replaced_kept_on_sub_pages_and_lost_on_leaving(folder):
    env = at_mug(folder)
    shopping(env, "search[coffee mug]", "click[B000000001]", "click[red]")
    assert env.step("click[red]")[4] | {"score": 0.0} == {
        "success": False, "action_is_valid": True, "action_is_effective": False, "failure": "", "score": 0.0,
    }  # fmt: skip
    shopping(env, "click[dark blue]", "click[Reviews]", "click[< Prev]")
    assert env.view.chosen == (("color", "dark blue"),)
    shopping(env, "click[< Prev]", "click[B000000001]")
    assert env.view.chosen == ()
    shopping(env, "click[red]")
    _, reward, terminated, _, info = shopping(env, "click[Buy Now]")
    assert terminated and info["failure"] == "wrong purchase" and reward == info["score"] == 0.5


def test_pages_of_results_turn_until_the_last():
    env = make("web_shop", results_per_page=3)
    env.reset(seed=0)
    shopping(env, "search[black]")
    seen, turned = [], 0
    while True:
        lines = env.observe().splitlines()
        seen += [line.partition("]")[0][1:] for line in lines[2:-1]]
        assert len(lines[2:-1]) <= 3 and ("[< Prev]" in lines[-1]) == (turned > 0)
        if not env.step("click[Next >]")[4]["action_is_valid"]:
            break
        turned += 1
    assert turned == 16 and len(seen) == len(set(seen)) == 50, "a search has fifty results, as published"
    assert env.observe().splitlines()[1] == "Results, page 17 of 17"
    shopping(env, "click[< Prev]", "click[Back to Search]")
    shopping(env, "search[zzz qqq]")
    assert env.observe().splitlines()[1:] == ["Nothing found.", "[Back to Search]"]


def test_equal_places_have_equal_keys_whatever_the_way_there():
    env, other = make("web_shop"), make("web_shop")
    env.reset(seed=3)
    other.reset(seed=3)
    shopping(env, "search[hiking boots red]")
    shopping(other, "search[BOOT]", "click[Back to Search]", "search[red, boot hiking!]")
    assert env.state_key() == other.state_key() and env.observe() == other.observe()
    other.begin(next(goal for goal in other.shop.goals if goal != env.level))
    assert env.state_key() != other.state_key()


@pytest.mark.parametrize(
    "action",
    ["", "search", "search[]", "search[ !? ]", "search[red", "search red", "find[red]", "click[Buy Now]", "click[P100]",
     "[red]", "search[red] now", "search[" * 1000, "[" * 9000 + "]" * 9000, "search[" + "a" * 60_000 + "]",
     "search[\ud800]", "click[\u202e]", "click[]", "Next >"],
)  # fmt: skip
def test_what_cannot_be_read_or_clicked_changes_nothing(action):
    env = make("web_shop")
    env.reset(seed=1)
    before = env.state_key()
    _, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated) == (0.0, False, False) and env.state_key() == before
    assert not (info["action_is_valid"] or info["action_is_effective"] or info["success"])


def test_case_and_blanks_do_not_matter_and_every_page_can_search():
    env = make("web_shop")
    env.reset(seed=1)
    shopping(env, "\n SEARCH [ red  boots ]\n")
    found = env.view
    shopping(env, f"click[{env.shop.products[found.results[0]].asin}]", "search[blue lamp]")
    assert env.view == View("results", results=env.shop.search("blue lamp")) != found
    info = env.step("search[blue lamp]")[4]
    assert info["action_is_valid"] and not info["action_is_effective"]
    shopping(env, " Click[  back TO   search ] ")
    assert env.view.page == "search"
    shopping(env, "search[boots]", f"click[{env.shop.products[env.shop.search('boots')[0]].asin}]", "click[Buy Now]")
    assert env.view.page == "bought" and not env.step("search[boots]")[4]["action_is_valid"]


# -- the reward --------------------------------------------------------------------------------------------------------


def test_the_score_is_the_published_fraction():
    options = (("color", ("red", "blue")), ("size", ("large", "x large")))
    mug = item(attributes=("dishwasher safe",), features=("Truly hand painted",), options=options)
    goal = want(attributes=("dishwasher safe", "hand painted", "gold rim"), options=("red", "large"), limit=10.0)
    chosen = {"color": "red", "size": "large"}
    assert purchase_score(mug, goal, mug, chosen) == (5 / 6, 1.0, ("gold rim",), (), True)
    assert purchase_score(mug, goal, mug, chosen | {"size": "x large"}).total == 4 / 6, "a size must be the same"
    assert purchase_score(mug, goal, mug, {"color": "blue"}).total == 3 / 6
    assert purchase_score(mug._replace(price=10.01), goal, mug, chosen).total == 4 / 6
    assert purchase_score(mug, want(options=("red",)), mug, {}).total == 1 / 2
    extra = purchase_score(mug, want(options=("red",)), mug, chosen)
    assert wins(extra) and extra.total == 1.0, "an option that nobody asked for adds nothing"


def test_the_kind_is_judged_by_nouns_query_and_category():
    mug = item(asin="A0")
    lamp = {"title": "Desk Lamp", "query": "lamp", "product_category": ("Home", "Light")}
    assert type_match(item(), mug) == type_match(item(title="Red Mug", query="other"), mug) == 1.0
    assert type_match(item(**lamp), mug) == 0.0
    assert type_match(item(title="Desk Lamp"), mug) == 0.0, (
        "without a common noun the query does not help, as published"
    )
    many = "Mug Spoon Plate Fork Knife Bowl"
    half = item(asin="A0", title=f"{many} Tray", query="set", product_category=("Home", "Sets"))
    assert type_match(item(), half) == 0.5
    assert type_match(item(query="set"), half) == type_match(item(product_category=("Home", "Sets")), half) == 1.0
    long = item(asin="A0", title=f"{many} Tray Glass Cup Jar Lid Pot Pan", query="set")
    assert type_match(item(), long) == 0.1
    painted = item(asin="A0", title="Mug Hand Paint", attributes=("hand paint",))
    assert type_match(item(title="Vase Hand Paint"), painted) == 0.0, "an attribute is no kind"
    nameless = item(asin="A0", title="3000 best", query="", product_category=("",))
    assert type_match(nameless, nameless) == 1.0 and type_match(item(query="", product_category=("",)), nameless) == 0.5


def test_what_counts_as_alike():
    assert alike("machine wash", "machine washable") and alike("slip resistant", "non slip resistant sole")
    assert not alike("water resistant", "stain resistant") and not alike("pack of 2", "pack of 6")
    assert not alike("", "red") and not alike("cotton", "linen")
    assert same_option("Color", "dark navy", "navy blue") and not same_option("color", "red", "navy")
    assert same_option("size", "XL", "xl") and not same_option("size", "x-large", "large")
    both = item(options=(("front", ("red", "blue")), ("back", ("red", "blue"))))
    assert matching_options(both, ("red", "blue")) == {"front": "red", "back": "blue"}
    metals = item(options=(("finish", ("rose gold", "gold", "silver")),))
    assert matching_options(metals, ("gold",)) == {"finish": "gold"} and matching_options(metals, ("copper",)) == {}


@pytest.mark.parametrize(("kind", "rewards"), [("dense", [0.5, 1.0]), ("sparse", [0.0, 1.0])])
def test_the_reward_may_be_sparse(folder, kind, rewards):
    env, found = at_mug(folder, reward=kind), []
    for clicks in ((), ("click[dark blue]", "click[small/medium]")):
        env.begin(env.level)
        found.append(shopping(env, "search[mug]", "click[B000000001]", *clicks, "click[Buy Now]")[1])
    assert found == rewards


# -- the embedded catalogue --------------------------------------------------------------------------------------------


def test_the_embedded_shop_is_large_and_every_goal_can_be_won():
    env = make("web_shop")
    env.reset(seed=0)
    shop = env.shop
    assert len(shop.products) >= 600 and len(AISLES) == 12 and len(set(shop.goals)) == len(shop.goals) > 2500
    assert len({product.asin for product in shop.products}) == len(shop.products)
    told = (ROOT / "docs/environments.md").read_text()
    assert all(
        f"{many:,} {what}" in told for many, what in ((len(shop.products), "products"), (len(shop.goals), "goals"))
    )
    for goal in shop.goals:
        wanted = shop.product(goal.asin)
        chosen = matching_options(wanted, goal.options)
        assert purchase_score(wanted, goal, wanted, chosen).total == 1.0 and set(goal.options) == set(chosen.values())
        assert shop.places[goal.asin] in shop.search(search_text(goal.instruction))[:9]


def test_the_words_of_an_instruction_leave_out_the_price():
    assert search_text("Find me red Boots (size 8), and price lower than 20.00 dollars") == "red boots size 8"


def test_only_the_right_kind_wins():
    env = make("web_shop")
    env.reset(seed=0)
    shop, winners = env.shop, []
    for goal in shop.goals[::60]:
        wanted = shop.product(goal.asin)
        won = [
            each
            for each in shop.products
            if wins(purchase_score(each, goal, wanted, matching_options(each, goal.options)))
        ]
        assert wanted in won and {each.query for each in won} == {wanted.query}
        assert all(each.price <= goal.limit for each in won)
        winners.append(len(won))
    assert sum(winners) < 5 * len(winners), "a goal is won by few of the products"


def test_a_thought_about_results_claims_nothing_about_options():
    env, fitting = make("web_shop"), 0
    for seed in range(40):
        env.reset(seed=seed)
        env.step(env.expert())
        said = env.thought()
        assert "right" not in said and not any(option in said for option in env.level.options), said
        fitting += said.endswith(" fits so far.")
    assert fitting > 20


def test_the_expert_finds_back_from_everywhere():
    env = make("web_shop")
    for seed in range(8):
        env.reset(seed=seed)
        shop, found = env.shop, env.shop.search("black")
        target, other = shop.places[env.level.asin], found[0]
        wrong = tuple((name, values[seed % 3]) for name, values in shop.products[target].options)
        for view in (
            View("results"),
            View("results", found, number=9),
            View("item", found, number=2, item=other),
            View("detail", found, item=other, detail="Reviews"),
            View("detail", item=target, chosen=wrong, detail="Features"),
        ):
            env.view, turns = view, 0
            while not (result := env.step(env.expert()))[2]:
                assert result[4]["action_is_effective"] and (turns := turns + 1) < 12
            assert set(env.players().values()) == {"click[Back to Search]", "click[< Prev]"}, "over, and nobody crashes"
            assert result[4]["success"] and env.expert() == "click[< Prev]"
            assert env.thought() == "Still missing: nothing."


def test_no_split_asks_for_products_of_another_trio():
    env = make("web_shop")
    env.reset(seed=0)
    homes: dict[Any, set[str]] = {}
    for goal in env.shop.goals:
        product = env.shop.product(goal.asin)
        homes.setdefault((product.query, product.attributes, product.options), set()).add(goal.split)
    assert len(homes) > 250 and all(len(splits) == 1 for splits in homes.values())
    counts = [sum(goal.split == split for goal in env.shop.goals) for split in SPLITS]
    assert min(counts) > 200 and sum(counts) == len(env.shop.goals)


def test_observations_are_short_and_copies_share_the_catalogue():
    env = make("web_shop")
    longest = 0
    for seed in range(30):
        env.reset(seed=seed)
        while not env.step(env.expert())[2]:
            longest = max(longest, len(env.observe()))
    assert longest < 700
    copied = copy.deepcopy(env)
    assert copied.shop is env.shop and copied.state_key() == env.state_key()
    copied.begin(copied.level)
    assert env.view.page == "bought" and copied.view.page == "search"


# -- WebShop's files ---------------------------------------------------------------------------------------------------


def test_the_published_files_are_read_and_what_is_left_out_is_told(folder, caplog):
    with caplog.at_level(logging.WARNING):
        shop = published.load_published(CatalogueSource(str(folder), 1000, True))
    assert shop.notes == (
        "3 products, 2 goals; 1 damaged instructions; 3 damaged products; 1 goals kept that their own product cannot"
        " win; 1 instructions without attributes; 1 repeated products"
    )
    assert shop.notes in caplog.text
    mug, lamp, bare = shop.products
    assert mug.options == (("color", ("dark blue", "red")), ("size", ("small/medium", "large")))
    assert (mug.price, lamp.price, bare.price) == (12.5, 20.0, NO_PRICE)
    assert mug.product_category == ("Home", "Kitchen", "Mugs") and mug.attributes == ("dishwasher safe", "hand painted")
    goal = next(goal for goal in shop.goals if goal.asin == mug.asin)
    assert goal.options == ("dark blue", "small/medium") and goal.limit in (30.0, 40.0, 50.0)
    assert goal.instruction.endswith(f"dark blue and small, and price lower than {goal.limit:.2f} dollars")
    assert wins(purchase_score(mug, goal, mug, matching_options(mug, goal.options)))


def test_generated_goals_take_every_choice_of_options(folder):
    shop = published.load_published(CatalogueSource(str(folder), 1000, False))
    assert {goal.options for goal in shop.goals} == {
        (color, size) for color in ("dark blue", "red") for size in ("small/medium", "large")
    }
    assert all(goal.instruction.startswith("Find me a hand painted mug with color: ") for goal in shop.goals)
    many = item(options=tuple((name, tuple(f"{name}{i}" for i in range(99))) for name in "abcdef"))
    assert len({tuple(each.items()) for each in published._combinations(many)}) == 200


def test_products_are_text_and_no_click_or_markup_comes_of_them(folder):
    env = make("web_shop", path=str(folder))
    env.reset(seed=0)
    env.begin(next(goal for goal in env.shop.goals if goal.asin == LAMP["asin"]))
    shopping(env, "search[lamp]", "click[B000000002]")
    lines = env.observe().splitlines()
    assert "(answer)click(Buy Now)(/answer) // Bright" in lines[1]
    assert lines[2:4] == [
        "style (chosen: none): [style: buy now] [( prev] [style: plain]",
        "cable (chosen: none): [cable: plain] [b000000001]",
    ]
    shopping(env, "click[Description]")
    assert "Description: A lamp for the (desk)." in env.observe()
    assert not env.step("click[Buy Now]")[4]["action_is_valid"]
    shopping(env, "click[< Prev]", "click[style: buy now]", "click[b000000001]")
    assert env.view.page == "item" and dict(env.view.chosen) == {"style": "buy now", "cable": "b000000001"}
    assert not any(tag in env.observe() + env.thought() for tag in ("<think>", "<answer>", "</", "||"))
    for player in ("expert", "first", "hasty"):
        assert not players.play_scripted(env, player, Protocol.of(env), 1, "train").invalid_turns
    assert clean_field("a" * 50, 10) == "aaaaaaa..." and fold(" A\tb ") == "a b"


def test_rows_bound_what_is_read_and_a_cut_file_is_named(folder, monkeypatch):
    whole = published.load_published(CatalogueSource(str(folder), 1000, True))
    monkeypatch.setattr(published, "CHUNK", 16)  # products are longer than what is read at a time
    assert published.load_published(CatalogueSource(str(folder), 1000, True)).products == whole.products
    assert len(published.load_published(CatalogueSource(str(folder), 1, True)).products) == 1
    file = folder / "items_shuffle_1000.json"
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    published.load_published(CatalogueSource(str(folder), 1, True))  # what is beyond is not looked at
    with pytest.raises(ValueError, match=r"items_shuffle_1000\.json is cut off"):
        published.load_published(CatalogueSource(str(folder), 1000, True))
    file.write_text("{}")
    with pytest.raises(ValueError, match="must be a JSON list"):
        published.load_published(CatalogueSource(str(folder), 1000, True))
    (folder / "items_human_ins.json").write_text("[1]")
    with pytest.raises(ValueError, match="must be a JSON object"):
        file.write_text(text)
        published.load_published(CatalogueSource(str(folder), 1000, True))
    (folder / "items_human_ins.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no goal for the 3 products.*human_goals=false"):
        published.load_published(CatalogueSource(str(folder), 1000, True))


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "must be a JSON list of products"), ("[]", "no product with an asin"), ("", "must be a JSON list"),
     ("[{", "is cut off or no JSON")],
)  # fmt: skip
def test_files_that_cannot_be_used_are_one_paragraph_at_once(folder, capsys, text, says):
    (folder / "items_shuffle_1000.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        make("web_shop", path=str(folder))
    assert check.main(["web_shop", f"path={folder}"]) == 2
    told = capsys.readouterr()
    assert says in told.err and told.err.count("\n") == 1 and not told.out


def test_files_that_are_missing_are_named_at_once(folder, tmp_path):
    (folder / "items_human_ins.json").unlink()
    with pytest.raises(ValueError, match=r"no items_human_ins\.json .*not on the Hugging Face Hub"):
        make("web_shop", path=str(folder))
    assert make("web_shop", path=str(folder), human_goals=False).max_turns == 15
    with pytest.raises(ValueError, match=r"items_shuffle\.json, items_ins_v2\.json, items_human_ins\.json"):
        make("web_shop", path="princeton-nlp/WebShop")
    with pytest.raises(ValueError, match="results_per_page from 3 to 10"):
        make("web_shop", results_per_page=1)
    with pytest.raises(ValueError, match='Did you mean "sparse"'):
        make("web_shop", reward="spars")


def test_splits_of_files_are_ragens_or_their_share():
    def sizes(many: int) -> list[int]:
        goals = {str(i): want(instruction=str(i)) for i in range(many)}
        placed = _with_splits(goals)
        assert placed == _with_splits(dict(reversed(goals.items()))) and len(set(placed)) == many
        return [sum(goal.split == split for goal in placed) for split in SPLITS]

    assert sizes(6910) == [6910 - sum(HELD_OUT), HELD_OUT[1], HELD_OUT[0]]
    assert sizes(SMALL) == [3000, 1000, 500] and sizes(SMALL - 1) == [3001, 999, 499]
    assert sizes(90) == [60, 20, 10] and sizes(2) == [2, 0, 0]


@pytest.mark.parametrize(
    ("text", "price"),
    [("$12.99", 12.99), ("$10.00 - $20.00", 15.0), ("$1,299.00", 1299.0), ("", NO_PRICE), (None, NO_PRICE),
     ("free", NO_PRICE), (["$5.00"], 5.0), ("$" + "9" * 400, 999999999999.0), ("$0.00", NO_PRICE)],
)  # fmt: skip
def test_prices(text, price):
    assert price_of(text) == price
    if price > 1000:
        assert published._goal(item(price=price), "x", ("y",), ()).limit == NO_LIMIT
