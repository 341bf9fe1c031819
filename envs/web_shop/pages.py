"""What does the shop show, and where does each click lead?  Pages as values; nothing here knows the goal."""

from __future__ import annotations

from typing import NamedTuple

from envs.web_shop.catalogue import Catalogue, Product, clean_field, fold

SHORT_TITLE, SHORT_TEXT = 80, 500  # characters shown of a title in a list, and of a description
BUY, NEXT, BEFORE, SEARCH = "Buy Now", "Next >", "< Prev", "Back to Search"
DETAILS = ("Description", "Features", "Reviews", "Attributes")
_BUTTONS = {fold(label) for label in (BUY, NEXT, BEFORE, SEARCH, *DETAILS)}


class View(NamedTuple):
    """Where the shopper is: View("item", results=(4, 7), number=0, item=4, chosen=(("color", "red"),), detail="").

    `page` is search, results, item, detail (one of `DETAILS` of an item) or bought; items are places in the catalogue.
    """

    page: str = "search"
    results: tuple[int, ...] = ()
    number: int = 0  # of the page of results
    item: int = -1
    chosen: tuple[tuple[str, str], ...] = ()  # sorted by name
    detail: str = ""


def links(shop: Catalogue, view: View, per_page: int) -> dict[str, View]:
    """Return what can be clicked, by its label as shown, and the view that it leads to."""
    back = {SEARCH: View()}
    if view.page == "results":
        items = page_items(view, view.number, per_page)
        by_label = {shop.products[item].asin: view._replace(page="item", item=item) for item in items}
        if view.number > 0:
            by_label[BEFORE] = view._replace(number=view.number - 1)
        if page_items(view, view.number + 1, per_page):
            by_label[NEXT] = view._replace(number=view.number + 1)
        return by_label | back
    if view.page == "item":
        by_label = {label: choose_option(view, name, value) for label, name, value in labels(shop.products[view.item])}
        by_label |= {detail: view._replace(page="detail", detail=detail) for detail in DETAILS}
        by_label[BUY] = view._replace(page="bought")
        by_label[BEFORE] = view._replace(page="results", item=-1, chosen=())
        return by_label | back
    if view.page == "detail":
        return {BEFORE: view._replace(page="item", detail="")} | back
    return {}


def page_items(view: View, number: int, per_page: int) -> tuple[int, ...]:
    """Return the items of one page of results."""
    return view.results[number * per_page : (number + 1) * per_page]


def choose_option(view: View, name: str, value: str) -> View:
    """Return the page after an option has taken a value, in place of the one it had."""
    return view._replace(chosen=tuple(sorted({**dict(view.chosen), name: value}.items())))


def labels(product: Product) -> list[tuple[str, str, str]]:
    """Return each value of each option as (label, name, value).

    The label is the value, with the option's name before it where the value alone would be a button's or another
    option's label: no text of a product can take another label's place.
    """
    values = [fold(value) for _, group in product.options for value in group]
    taken, names = set(_BUTTONS), []
    for name, group in product.options:
        for value in group:
            alone = fold(value) not in _BUTTONS and values.count(fold(value)) == 1
            label = value if alone else f"{name}: {value}"
            if fold(label) not in taken:
                taken.add(fold(label))
                names.append((label, name, value))
    return names


def page_text(shop: Catalogue, view: View, per_page: int) -> str:
    """Return a page as text; what can be clicked stands in brackets, which no text of a product holds."""
    if view.page == "search":
        return "Search page. Write search[words]."
    bar = " ".join(f"[{label}]" for label in links(shop, view, per_page) if fold(label) in _BUTTONS)
    if view.page == "results":
        if not view.results:
            return f"Nothing found.\n{bar}"
        pages = -(-len(view.results) // per_page)
        lines = [f"Results, page {view.number + 1} of {pages}"]
        for item in page_items(view, view.number, per_page):
            product = shop.products[item]
            lines.append(f"[{product.asin}] {clean_field(product.title, SHORT_TITLE)} ${product.price:.2f}")
        return "\n".join([*lines, bar])
    product, chosen = shop.products[view.item], dict(view.chosen)
    if view.page == "bought":
        return f"Bought {product.asin}{''.join(f', {name} {value}' for name, value in view.chosen)}."
    lines = [f"{product.asin} {product.title} ${product.price:.2f}"]
    if view.page == "detail":
        return "\n".join([*lines, f"{view.detail}: {detail_text(product, view.detail)}", bar])
    by_name: dict[str, list[str]] = {}
    for label, name, _ in labels(product):
        by_name.setdefault(name, []).append(f"[{label}]")
    lines += [f"{name} (chosen: {chosen.get(name, 'none')}): {' '.join(values)}" for name, values in by_name.items()]
    return "\n".join([*lines, bar])


def detail_text(product: Product, detail: str) -> str:
    """Return one of an item's sub-pages."""
    texts = {
        "Description": product.description,
        "Features": "; ".join(product.features),
        "Reviews": product.reviews,
        "Attributes": ", ".join(product.attributes),
    }
    return clean_field(texts[detail], SHORT_TEXT) or "none"
