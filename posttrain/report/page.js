// Makes a player of every row of pictures: step back, play or pause, step on, or drag. Without it all pictures show.
const pace = 800;
for (const film of document.querySelectorAll(".film")) {
  const frames = [...film.querySelectorAll("img")];
  if (frames.length < 2) continue;
  const turns = [...film.parentElement.querySelectorAll("ol > li")];
  const bar = document.createElement("div");
  const button = (label, title, act) => {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: label, title });
    made.setAttribute("aria-label", title);
    made.addEventListener("click", act);
    bar.append(made);
    return made;
  };
  const slider = Object.assign(document.createElement("input"), { type: "range", min: 0, max: frames.length - 1, value: 0 });
  slider.setAttribute("aria-label", "picture");
  const count = document.createElement("output");
  let at = 0;
  let timer = null;
  const show = (number) => {
    at = Math.max(0, Math.min(frames.length - 1, number));
    frames.forEach((frame, place) => (frame.hidden = place !== at));
    turns.forEach((turn, place) => turn.classList.toggle("now", place === Number(frames[at].dataset.turn)));
    slider.value = at;
    count.textContent = `${at} / ${frames.length - 1}`;
  };
  const pause = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "▶";
  };
  const step = (by) => () => {
    pause();
    show(at + by);
  };
  button("‹", "one action back", step(-1));
  const play = button("▶", "play or pause", () => {
    if (timer) return pause();
    if (at === frames.length - 1) show(0);
    play.textContent = "❚❚";
    timer = setInterval(() => (at === frames.length - 1 ? pause() : show(at + 1)), pace);
  });
  button("›", "one action on", step(1));
  slider.addEventListener("input", () => {
    pause();
    show(Number(slider.value));
  });
  bar.className = "controls";
  bar.append(slider, count);
  film.classList.add("player");
  film.append(bar);
  show(0);
}
