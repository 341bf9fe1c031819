// A list with choices closes when it loses the focus.  gradio 6.31 handles a key late: it opens the list again that Tab or
// Shift+Tab has just closed.  Until it leaves these keys to the browser, its handler is not called for them.

function keepClosed(event) {
  const moves = event.key === "Tab" || event.key === "Shift";
  if (moves && event.target.role === "combobox") event.stopImmediatePropagation();
}

document.addEventListener("keydown", keepClosed, true);
