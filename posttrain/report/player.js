// How is an episode shown?  Its pictures as a film that can be stepped, and beside it the turns, linked to the pictures.
// Whatever a model wrote becomes a text node: nothing here reads HTML.

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

// The page's data: JSON, gzipped, in base64.
async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(plain).json();
}

// Back, play or pause, on, a slider, the speed; `show` is told the number of the moment, and `ended` is called when the
// film comes to its end. Returns the bar and how to go to a moment.
const PACE = 800;
let speed = 1; // kept from one episode to the next
function player(count, show, ended = () => {}) {
  let at = 0;
  let timer = null;
  const go = (number) => {
    at = Math.max(0, Math.min(count - 1, number));
    slider.value = at;
    place.textContent = `${at} / ${count - 1}`;
    show(at);
  };
  const pause = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "▶";
    play.setAttribute("aria-label", "play");
  };
  const stop = (number) => {
    pause();
    go(number);
  };
  const start = () => {
    if (timer) return pause();
    if (at === count - 1) go(0);
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "pause");
    timer = setInterval(step, PACE / speed);
  };
  const step = () => {
    if (at < count - 1 && bar.isConnected) return go(at + 1);
    pause();
    if (bar.isConnected) ended();
  };
  const button = (textContent, label, onclick) => {
    const made = make("button", { type: "button", textContent, onclick });
    made.setAttribute("aria-label", label);
    return made;
  };
  const play = button("▶", "play", start);
  const slider = make("input", { type: "range", min: 0, max: count - 1, value: 0, oninput: () => stop(Number(slider.value)) });
  slider.setAttribute("aria-label", "moment");
  const place = make("output");
  const pace = make("select", { ariaLabel: "speed" });
  pace.append(...[0.5, 1, 2, 4].map((times) => new Option(`${times}×`, times, false, times === speed)));
  pace.addEventListener("change", () => {
    speed = Number(pace.value);
    if (!timer) return;
    clearInterval(timer);
    timer = setInterval(step, PACE / speed);
  });
  const back = button("‹", "one step back", () => stop(at - 1));
  const on = button("›", "one step on", () => stop(at + 1));
  const bar = make("div", { className: "controls" }, back, play, on, slider, place, pace);
  if (count < 2) bar.hidden = true;
  go(0);
  return { bar, go: stop };
}

// ------------------------------------------------------------------------------------------------- tokens, shaded

// Of each figure: its name, and from a value a colour and how much of it, from 0 to 1; `reach` is the largest value.
const SHADES = {
  logprob: ["log-prob: the darker, the less likely the token was", (value, reach) => ["bad", value / reach]],
  entropy: ["entropy: the darker, the less sure the model was", (value, reach) => ["a", value / reach]],
  advantage: ["advantage: green is reinforced, red is discouraged", (value, reach) => [value < 0 ? "bad" : "good", value / reach]],
  loss: ["loss mask: blue counts in the loss; what the model read never does", (value) => ["a", value]],
};
const DARKEST = 46; // per cent of the colour: the text on it still has enough contrast

function shade(tokens, kind, reach) {
  return tokens.text.map((text, number) => {
    const facts = Object.keys(SHADES).map((name) => {
      const value = tokens[name][number];
      if (name === "loss") return value ? "counts in the loss" : "not in the loss";
      return `${name === "logprob" ? "log-prob" : name} ${value === null ? "none" : value.toFixed(3)}`;
    });
    const span = make("span", { className: "token", textContent: text, title: facts.join(", "), tabIndex: number ? -1 : 0 });
    span.setAttribute("role", "option");
    span.setAttribute("aria-label", `“${text}”: ${span.title}`);
    const value = tokens[kind]?.[number];
    if (value !== null && value !== undefined) {
      const [colour, much] = SHADES[kind][1](value, reach);
      const share = Math.round(DARKEST * Math.min(1, Math.abs(much)));
      span.style.background = `color-mix(in srgb, var(--${colour}) ${share}%, transparent)`;
    }
    return span;
  });
}

// What the model wrote: the thought quiet, the answer strong, all else as it is.
function said(words) {
  const found = /^([^]*?<think>)([^]*?)(<\/think>\s*<answer>)([^]*?)(<\/answer>[^]*)$/.exec(words);
  if (!found) return [words === "" ? make("i", { textContent: "nothing" }) : words];
  const classes = ["tag", "thought", "tag", "chosen", "tag"];
  return found.slice(1).map((part, number) => make("span", { className: classes[number], textContent: part }));
}

// ------------------------------------------------------------------------------------------------- one episode

const signed = (value) => (value > 0 ? "+" : "") + Number(value.toFixed(3));

function badge(row) {
  return make("span", { className: `badge ${row.won === true ? "yes" : row.won === false ? "no" : ""}`, textContent: row.end });
}

// The turns of an episode: what was read, what was said to it, which action came of it, what it earned.
function turnsOf(row, jump) {
  const items = [];
  let read = [];
  for (const message of row.messages) {
    if (message.role !== "assistant") {
      read.push(message);
      continue;
    }
    const number = items.length;
    const words = make("div", { className: "words" }, ...said(message.content));
    const label = `turn ${number + 1}`;
    const link = make("button", { type: "button", className: "turn", textContent: label, onclick: () => jump(number) });
    const actions = row.actions?.[number];
    const earned = row.rewards?.[number];
    const penalty = row.penalties?.[number];
    const item = make(
      "li",
      {},
      ...read.map(seen),
      words,
      make(
        "p",
        { className: "meta" },
        row.moments.length > 1 ? link : null,
        actions ? make("b", { textContent: actions.join(", ") || "no valid action" }) : null,
        earned === undefined ? null : make("span", { textContent: `reward ${earned === null ? "not a finite number" : signed(earned)}` }),
        penalty ? make("span", { className: "bad", textContent: `penalty ${signed(penalty)}` }) : null,
      ),
    );
    items.push({ item, words, content: message.content });
    read = [];
  }
  return items;
}

function seen(message) {
  if (message.role === "tool") {
    const call = make("code", { textContent: message.call || "a call that cannot be read" });
    const result = make("span", { className: "result", textContent: message.content });
    return make("p", { className: message.failed ? "call failed" : "call" }, call, make("span", { textContent: "→", ariaHidden: "true" }), result);
  }
  const said = message.role === "example" ? "an answer in the prompt: " : "";
  const text = make("p", { className: "seen", textContent: said + message.content });
  if (message.role !== "system") return text;
  return make("details", {}, make("summary", { textContent: "the rules it was told" }), text);
}

// row: as posttrain/report/episodes.py writes it. pictures: all of the page's. Returns an element.
function episode(row, pictures, heading = "h4", ended = () => {}) {
  const picture = row.frames ? make("img", { className: "picture" }) : null;
  const list = make("ol", { className: "turns", tabIndex: 0 });
  list.setAttribute("aria-label", "turns");
  const moments = row.moments;
  const items = turnsOf(row, (turn) => bar.go(Math.max(0, moments.findIndex((moment) => moment[0] === turn))));
  list.append(...items.map(({ item }) => item));
  const bar = player(moments.length, (at) => {
    if (!moments.length) return;
    const [turn, frame] = moments[at];
    if (picture) {
      picture.src = `data:image/png;base64,${pictures[row.frames[frame]]}`;
      picture.alt = `${row.env}, picture ${frame} of ${row.frames.length - 1}`;
    }
    items.forEach(({ item }, number) => (number === turn ? item.setAttribute("aria-current", "step") : item.removeAttribute("aria-current")));
    const shown = items[Math.max(0, turn)]?.item;
    if (shown && list.scrollHeight > list.clientHeight) list.scrollTop = shown.offsetTop - list.offsetTop - 8;
  }, ended);
  list.addEventListener("keydown", (event) => {
    const by = { ArrowRight: "one step on", ArrowLeft: "one step back", " ": null }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    bar.bar.querySelector(by ? `[aria-label="${by}"]` : "button:nth-child(2)").click();
  });
  const film = moments.length ? make("div", { className: "film" }, picture, bar.bar) : null;
  return make(
    "article",
    { className: "episode" },
    make(heading, {}, row.at, " ", badge(row), " ", make("small", { textContent: row.facts })),
    row.tokens ? shading(row, items) : null,
    make("div", { className: picture ? "scene" : "scene text" }, film, list),
  );
}

// The tokens of a turn are one stop of the Tab key; the arrow keys, Home and End walk through them.
function walkTokens(event) {
  const tokens = [...event.currentTarget.querySelectorAll(".token")];
  const at = tokens.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  event.stopPropagation(); // in the list of turns they step the film
  tokens[Math.max(0, Math.min(tokens.length - 1, to))].focus();
}

// A choice of what the tokens are shaded by, and one line that says what the colours mean or what a token's figures are.
let shadedBy = ""; // kept from one episode to the next
function shading(row, items) {
  const legend = make("output", { className: "quiet" });
  const choose = make("select");
  choose.setAttribute("aria-label", "shade tokens by");
  choose.append(new Option("plain text", ""), ...Object.keys(SHADES).map((kind) => new Option(kind === "logprob" ? "log-prob" : kind === "loss" ? "loss mask" : kind, kind)));
  const paint = () => {
    const kind = (shadedBy = choose.value);
    const values = kind ? row.tokens.flatMap((turn) => turn[kind]).filter((value) => value !== null) : [];
    const reach = Math.max(1e-6, ...values.map(Math.abs));
    items.forEach(({ words, content }, number) => {
      words.replaceChildren(...(kind ? shade(row.tokens[number], kind, reach) : said(content)));
      words[kind ? "setAttribute" : "removeAttribute"]("role", "listbox");
      words[kind ? "setAttribute" : "removeAttribute"]("aria-label", `tokens of turn ${number + 1}`);
    });
    const missing = kind === "advantage" && !values.length ? "none: the update left this group out" : "";
    const range = values.length && kind !== "loss" ? `, from ${Math.min(...values).toFixed(2)} to ${Math.max(...values).toFixed(2)}` : "";
    legend.textContent = kind ? missing || SHADES[kind][0] + range : "";
  };
  choose.addEventListener("change", paint);
  for (const { words } of items) {
    words.addEventListener("click", (event) => event.target.closest(".token")?.focus());
    words.addEventListener("keydown", walkTokens);
    words.addEventListener("focusin", ({ target }) => {
      if (!target.matches(".token")) return;
      words.querySelectorAll(".token").forEach((token) => {
        token.tabIndex = token === target ? 0 : -1;
        token.setAttribute("aria-selected", String(token === target));
      });
      legend.textContent = target.getAttribute("aria-label");
    });
  }
  choose.value = shadedBy;
  paint();
  return make("div", { className: "shading" }, make("label", {}, "shade tokens by ", choose), legend);
}
