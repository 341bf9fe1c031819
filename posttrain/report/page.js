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
        words.textContent = turn < 0 ? "\u00a0" : spoken[turn].content.replace(/\s+/g, " ");
        words.title = turn < 0 ? "" : spoken[turn].content;
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

// A link to a folded section unfolds it.
function unfold(place) {
  const fold = place && document.querySelector(`${place} > details.fold`);
  if (fold) fold.open = true;
}

async function start() {
  document.querySelector("nav")?.addEventListener("click", ({ target }) => unfold(target.hash));
  if (/^#s\d+$/.test(location.hash)) unfold(location.hash);
  document.querySelectorAll(".chart").forEach(livelyChart);
  const data = await unpack("data");
  if (data.top) document.getElementById("top").append(...stage(data.top, data.pictures));
  for (const place of document.querySelectorAll("[data-pair]")) {
    place.append(...data.pairs[place.dataset.pair].map((row) => episode(row, data.pictures)));
  }
  document.getElementById("recorded")?.append(viewer(data.recorded, data.pictures));
  document.body.dataset.ready = "yes";
}
start();
