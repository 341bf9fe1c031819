// What is put into report.html when it opens: the pictures on top, the episodes, the charts' hover and zoom.

// The same level in several places at once, one player for all of them.
function stage({ columns, rows }, pictures) {
  const cells = [];
  const blocks = rows.map(({ title, shares, cells: byColumn }) => {
    const grid = make("div", { className: "stage" });
    grid.style.gridTemplateColumns = `repeat(${columns.length}, minmax(0, 1fr))`;
    grid.append(...columns.map((words) => make("h4", { textContent: words })));
    byColumn.forEach((levels, column) => {
      const picture = make("img", { className: "picture" });
      const [end, words] = [make("span"), make("span", { className: "words1" })];
      const share = make("figcaption", {}, make("b", { textContent: shares[column] }), " of levels ", end);
      grid.append(make("figure", {}, picture, words, share));
      cells.push({ levels, picture, words, end, title: `${title}, ${columns[column]}` });
    });
    return make("div", {}, make("h3", { textContent: title }), grid);
  });
  const bar = make("div", { className: "stagebar" });
  const choose = make("select", { ariaLabel: "test level" });
  choose.append(...rows[0].cells[0].map((_, level) => new Option(`test level ${level + 1}`, level)));
  const open = (level) => {
    const now = cells.map((cell) => ({ ...cell, row: cell.levels[Math.min(level, cell.levels.length - 1)] }));
    const controls = player(Math.max(...now.map(({ row }) => row.moments.length)), (at) => {
      for (const { row, picture, words, end, title } of now) {
        const last = row.moments.length - 1;
        const [turn, frame] = row.moments[Math.min(at, last)];
        const spoken = row.messages.filter((message) => message.role === "assistant");
        if (row.frames) picture.src = `data:image/png;base64,${pictures[row.frames[frame]]}`;
        picture.alt = `${title}, after ${turn + 1} of ${last} turns`;
        const chosen = turn < 0 ? [] : (row.actions?.[turn] ?? []);
        words.textContent = turn < 0 ? "\u00a0" : chosen.join(", ") || "no valid action";
        words.title = turn < 0 || !row.readable ? "" : spoken[turn].content;
        end.replaceChildren(at >= last ? badge(row) : "");
      }
    });
    bar.replaceChildren(choose, controls.bar);
    return controls;
  };
  choose.addEventListener("change", () => open(Number(choose.value)));
  const controls = open(0);
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) controls.bar.querySelector("button:nth-child(2)").click();
  return [make("div", { className: "halves" }, ...blocks), bar];
}

// The menu of the sections: on a phone a button opens it; the section in sight is marked.
function navigation(nav) {
  const button = nav.querySelector("button");
  const links = new Map([...nav.querySelectorAll("a")].map((link) => [link.hash.slice(1), link]));
  const open = (yes) => button.setAttribute("aria-expanded", String(yes));
  nav.classList.add("lively"); // without scripts all links are shown
  button.addEventListener("click", () => open(button.getAttribute("aria-expanded") !== "true"));
  nav.addEventListener("click", ({ target }) => {
    if (!target.hash) return;
    unfold(target.hash);
    open(false);
  });
  nav.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    open(false);
    button.focus();
  });
  document.addEventListener("click", ({ target }) => nav.contains(target) || open(false));
  const sections = [...document.querySelectorAll("section[id]")].filter((section) => links.has(section.id));
  const mark = () => {
    const line = nav.getBoundingClientRect().bottom + 60;
    const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
    const passed = sections.filter((section) => section.getBoundingClientRect().top <= line);
    const now = links.get((atEnd && scrollY > 0 ? sections.at(-1) : passed.at(-1))?.id);
    for (const link of links.values()) link === now ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    button.textContent = now ? `Sections: ${now.textContent}` : "Sections";
  };
  addEventListener("scroll", mark, { passive: true });
  mark();
}

// A link to a folded section unfolds it.
function unfold(place) {
  const fold = place && document.querySelector(`${place} > details.fold`);
  if (fold) fold.open = true;
}

async function start() {
  document.querySelectorAll("nav").forEach(navigation);
  if (/^#s\d+$/.test(location.hash)) unfold(location.hash);
  document.querySelectorAll(".chart").forEach(livelyChart);
  const data = await unpack("data");
  if (data.top) document.getElementById("stage").append(...stage(data.top, data.pictures));
  for (const place of document.querySelectorAll("[data-pair]")) {
    place.append(...data.pairs[place.dataset.pair].map((row) => episode(row, data.pictures)));
  }
  const best = "highest reward first";
  document.getElementById("recorded")?.append(viewer(data.recorded, data.pictures, document.querySelector(".rewards") && best));
  document.getElementById("answered")?.append(viewer(data.answered, data.pictures, best));
  document.body.dataset.ready = "yes";
}
start();
