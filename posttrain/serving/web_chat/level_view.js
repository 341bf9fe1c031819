// How does a level look while it is played?  The report's player follows it: it plays what is new, and waits for more.

let current = null; // the level that is shown: its number, and a newer state that waits until the pictures have played
const moving = !matchMedia("(prefers-reduced-motion: reduce)").matches;

function controls(place) {
  const slider = place.querySelector(".controls input");
  const button = place.querySelector(".controls button:nth-child(2)");
  return slider && { slider, button, at: Number(slider.value), last: Number(slider.max) };
}

function showLevel(place, state) {
  if (!state) {
    current = null;
    place.replaceChildren();
  } else if (current?.number === state.number && controls(place)?.button.ariaLabel === "pause") {
    current.waits = state;
  } else {
    drawLevel(place, state);
  }
}

function drawLevel(place, state) {
  const before = current?.number === state.number ? controls(place) : null;
  const focused = before && place.contains(document.activeElement) ? document.activeElement.ariaLabel : null;
  current = { number: state.number };
  const shown = episode(state.row, state.pictures, "h2", () => current.waits && drawLevel(place, current.waits));
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
showLevel(place, props.value);
watch("value", () => showLevel(place, props.value));
