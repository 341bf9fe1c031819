// How does a level look while it is played?  The report's player follows it: it plays what is new, and waits for more.

let film = null; // of the level that is shown: its number, and a newer state of it that waits for the film's end
const moving = !matchMedia("(prefers-reduced-motion: reduce)").matches;

function controls(place) {
  const slider = place.querySelector(".controls input");
  const button = place.querySelector(".controls button:nth-child(2)");
  return slider && { slider, button, at: Number(slider.value), last: Number(slider.max) };
}

function showFilm(place, state) {
  if (!state) {
    film = null;
    place.replaceChildren();
  } else if (film?.number === state.number && controls(place)?.button.ariaLabel === "pause") {
    film.waits = state;
  } else {
    drawFilm(place, state);
  }
}

function drawFilm(place, state) {
  const before = film?.number === state.number ? controls(place) : null;
  const focused = before && place.contains(document.activeElement) ? document.activeElement.ariaLabel : null;
  film = { number: state.number };
  const shown = episode(state.row, state.pictures, "h2", () => film.waits && drawFilm(place, film.waits));
  place.replaceChildren(shown);
  const list = shown.querySelector(".turns");
  const told = state.row.messages.slice(state.row.messages.findLastIndex((each) => each.role === "assistant") + 1);
  if (state.row.won === null && told.length) list.append(make("li", { className: "coming" }, ...told.map(seen)));
  const now = controls(place);
  if (!now) return;
  const follows = !before || before.at >= before.last; // it stands at the newest moment, or the level has just begun
  const from = follows ? Math.min(moving ? (before ? before.at + 1 : 0) : now.last, now.last) : before.at;
  now.slider.value = from;
  now.slider.dispatchEvent(new Event("input"));
  if (follows && moving && from < now.last) now.button.click();
  if (follows) list.scrollTop = list.scrollHeight;
  if (focused) place.querySelector(`[aria-label="${focused === "pause" ? "play" : focused}"]`)?.focus();
}

const place = element.querySelector(".place");
showFilm(place, props.value);
watch("value", () => showFilm(place, props.value));
