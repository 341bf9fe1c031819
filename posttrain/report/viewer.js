// Which of thousands of episodes is worth reading?  Filters, and a list of which only the rows in sight exist.

const ROW = 52; // pixels; .rows button in page.css has the same
const NUMBERS = { reward: "reward", turns: "turns", length: "tokens", invalid: "invalid turns" };

// rows: as posttrain/report/episodes.py writes them. ordered: by what, at first. Returns an element.
let viewers = 0;
function viewer(rows, pictures, ordered = "") {
  const prefix = `viewer-${(viewers += 1)}-row`;
  const words = rows.map(() => null); // what the text filter searches, made when it is first asked
  const text = (number) => (words[number] ??= [rows[number].at, rows[number].facts, rows[number].end, ...rows[number].messages.map((m) => m.content)].join("\n").toLowerCase());
  const tests = [];
  const filters = make("form", { className: "filters", onsubmit: (event) => event.preventDefault() });
  const field = (label, input, tag = "label") => filters.append(make(tag, { className: "field" }, make("span", { textContent: label }), input));
  const choice = (label, key, names) => {
    if (names.length < 2) return;
    const select = make("select", { name: key });
    select.append(new Option("all", ""), ...names.map((name) => new Option(name, name)));
    field(label, select);
    tests.push(() => select.value && ((row) => String(row[key]) === select.value));
  };
  const all = (key) => [...new Set(rows.map((row) => row[key]))].filter((value) => value !== null).map(String);
  choice("environment", "env", all("env"));
  choice("from", "from", all("from"));
  choice("outcome", "end", all("end").sort());
  for (const [key, label] of Object.entries(NUMBERS)) {
    const values = rows.map((row) => row[key]).filter((value) => value !== null);
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    if (!(low < high)) continue;
    const limit = (name, placeholder) => make("input", { type: "number", step: "any", name: `${name}-${key}`, placeholder: Number(placeholder.toFixed(2)), ariaLabel: `${label}, ${name}` });
    const [least, most] = [limit("least", low), limit("most", high)];
    field(label, make("span", { className: "range" }, least, "to", most), "div");
    tests.push(() => least.value !== "" && ((row) => row[key] !== null && row[key] >= Number(least.value)));
    tests.push(() => most.value !== "" && ((row) => row[key] !== null && row[key] <= Number(most.value)));
  }
  const search = make("input", { type: "search", name: "text", placeholder: "a word of a prompt or an answer" });
  field("text", search);
  tests.push(() => search.value && ((_, number) => text(number).includes(search.value.toLowerCase())));
  const orders = { "as recorded": () => 0, "highest reward first": (a, b) => reward(b) - reward(a), "lowest reward first": (a, b) => reward(a) - reward(b) };
  const reward = (number) => rows[number].reward ?? -Infinity;
  const order = make("select", { name: "order" }, ...Object.keys(orders).map((name) => new Option(name)));
  if (new Set(rows.map((row) => row.reward)).size > 1) {
    field("order", order);
    if (ordered) order.value = ordered;
    for (const option of order.options) option.defaultSelected = option.selected; // what "show all" goes back to
  }
  const clear = make("button", { type: "reset", textContent: "show all", onclick: () => setTimeout(apply) });
  const count = make("output", { className: "count" });
  filters.append(clear, count);

  const list = make("div", { className: "rows", tabIndex: 0, role: "listbox", ariaLabel: "episodes" });
  const space = make("div");
  list.append(space);
  const shown = make("div", { className: "shown" });
  let found = [];
  let chosen = 0;

  const draw = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 3);
    const last = Math.min(found.length, first + Math.ceil(list.clientHeight / ROW) + 6);
    space.style.height = `${found.length * ROW}px`;
    space.replaceChildren(...Array.from({ length: last - first }, (_, offset) => line(first + offset)));
    list.setAttribute("aria-activedescendant", `${prefix}-${chosen}`);
  };
  const line = (place) => {
    const row = rows[found[place]];
    const made = make(
      "div",
      { className: "row", role: "option", id: `${prefix}-${place}`, ariaSelected: String(place === chosen), onclick: () => select(place) },
      make("span", { textContent: row.at }),
      badge(row),
      make("small", { textContent: [row.env, row.reward === null ? "" : `reward ${signed(row.reward)}`, `${row.turns} turn${row.turns === 1 ? "" : "s"}`, row.length === null ? "" : `${row.length} tokens`].filter(Boolean).join(" · ") }),
    );
    made.style.top = `${place * ROW}px`;
    made.setAttribute("aria-setsize", found.length);
    made.setAttribute("aria-posinset", place + 1);
    return made;
  };
  const select = (place) => {
    chosen = Math.max(0, Math.min(found.length - 1, place));
    if (chosen * ROW < list.scrollTop) list.scrollTop = chosen * ROW;
    if ((chosen + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (chosen + 1) * ROW - list.clientHeight;
    draw();
    shown.replaceChildren(found.length ? episode(rows[found[chosen]], pictures, "h3") : make("p", { className: "quiet", textContent: "No episode passes these filters." }));
  };
  const apply = () => {
    const active = tests.map((test) => test()).filter(Boolean);
    found = rows.map((_, number) => number).filter((number) => active.every((test) => test(rows[number], number))).sort(orders[order.value]);
    count.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`;
    list.scrollTop = 0;
    select(0);
  };
  filters.addEventListener("input", apply);
  list.addEventListener("scroll", draw);
  new ResizeObserver(draw).observe(list);
  list.addEventListener("keydown", (event) => {
    const page = Math.floor(list.clientHeight / ROW);
    const to = { ArrowDown: chosen + 1, ArrowUp: chosen - 1, PageDown: chosen + page, PageUp: chosen - page, Home: 0, End: found.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(to);
  });
  apply();
  return make("div", { className: "viewer" }, filters, make("div", { className: "panes" }, list, shown));
}
