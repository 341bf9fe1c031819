// What is the value there?  Values under the pointer, where a finger taps, or by arrow keys; zoom by dragging, + and -.

function livelyChart(figure) {
  const frame = figure.querySelector("svg");
  const plot = frame.querySelector(".plot");
  const whole = plot.viewBox.baseVal;
  const [first, span] = [whole.x, whole.width];
  const low = Number(figure.dataset.low);
  const high = Number(figure.dataset.high);
  const lines = [...plot.querySelectorAll("[data-line]")].map((line) =>
    [...line.points].map(({ x, y }) => ({ x, value: high - ((high - low) * y) / 1000 })),
  );
  const alarms = [...plot.querySelectorAll(".alarm")].map((mark) => ({ x: mark.x1.baseVal.value, words: mark.dataset.alarm }));
  const values = [...figure.querySelectorAll(".legend b")];
  const last = values.map((value) => value.textContent);
  const told = figure.querySelector("figcaption output");
  const drawn = (kind, className) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    made.setAttribute("class", className);
    made.setAttribute("y", 0);
    made.setAttribute("height", 1000);
    made.setAttribute("width", 0);
    plot.append(made);
    return made;
  };
  const cursor = drawn("rect", "cursor");
  const marked = drawn("rect", "marked");
  const steps = [...new Set(lines.flat().map((point) => point.x))].sort((a, b) => a - b);
  let at = null; // the step under the cursor
  let from = null; // where a drag began

  const nearest = (points, x) => points.reduce((best, point) => (Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best));
  const show = (x) => {
    at = nearest(steps.map((step) => ({ x: step })), x).x;
    cursor.setAttribute("x", at);
    cursor.setAttribute("width", plot.viewBox.baseVal.width / 250);
    values.forEach((value, number) => (value.textContent = String(Number(nearest(lines[number], at).value.toPrecision(3)))));
    const near = alarms.filter((alarm) => Math.abs(alarm.x - at) <= plot.viewBox.baseVal.width / 40).map((alarm) => `⚠ ${alarm.words}`);
    told.textContent = [`step ${at}`, ...near].join(", ");
  };
  const leave = () => {
    at = null;
    cursor.setAttribute("width", 0);
    values.forEach((value, number) => (value.textContent = last[number]));
    told.textContent = "";
  };
  const zoom = (start, end) => {
    start = Math.max(first, start);
    end = Math.min(first + span, end);
    if (steps.filter((step) => step >= start && step <= end).length < 2) return;
    plot.setAttribute("viewBox", `${start} 0 ${end - start} 1000`);
    frame.querySelector(".first").textContent = `step ${Math.round(start)}`;
    frame.querySelector(".last").textContent = Math.round(end);
    reset.hidden = start === first && end === first + span;
    if (at !== null) show(at);
  };
  const reset = Object.assign(document.createElement("button"), { type: "button", textContent: "whole run", hidden: true, className: "reset", onclick: () => zoom(first, first + span) });
  figure.querySelector(".legend").append(reset);

  const stepAt = (event) => {
    const box = plot.getBoundingClientRect();
    const view = plot.viewBox.baseVal;
    return view.x + view.width * Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  };
  frame.addEventListener("pointermove", (event) => {
    show(stepAt(event));
    if (from === null) return;
    marked.setAttribute("x", Math.min(from, stepAt(event)));
    marked.setAttribute("width", Math.abs(stepAt(event) - from));
  });
  frame.addEventListener("pointerdown", (event) => {
    from = stepAt(event);
    show(from);
    frame.setPointerCapture(event.pointerId);
  });
  const dropped = (event) => {
    marked.setAttribute("width", 0);
    const [start, end] = [from, stepAt(event)].sort((a, b) => a - b);
    if (from !== null && end - start > plot.viewBox.baseVal.width / 50) zoom(start, end);
    from = null;
  };
  frame.addEventListener("pointerup", dropped);
  frame.addEventListener("pointercancel", () => (from = null));
  frame.addEventListener("pointerleave", (event) => event.pointerType === "touch" || leave()); // a finger leaves values
  frame.addEventListener("blur", leave);
  frame.addEventListener("dblclick", () => zoom(first, first + span));
  frame.addEventListener("keydown", (event) => {
    const view = plot.viewBox.baseVal;
    const inside = steps.filter((step) => step >= view.x && step <= view.x + view.width);
    const place = at === null ? inside.length : inside.indexOf(at);
    const middle = at ?? view.x + view.width / 2;
    const closer = (by) => zoom(middle - (view.width * by) / 2, middle + (view.width * by) / 2);
    const act = {
      ArrowLeft: () => show(inside[Math.max(0, place - 1)]),
      ArrowRight: () => show(inside[Math.min(inside.length - 1, place + 1)]),
      "+": () => closer(0.5),
      "-": () => closer(2),
      Escape: () => zoom(first, first + span),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}
