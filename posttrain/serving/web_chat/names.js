// What does a screen reader call the model?  The name that the page shows, where gradio writes "chatbot" and "bot".
// Texts are read as they were written: gradio writes "&lt;" for "<" into the labels of messages.

const side = element.closest(".side"), said = "bot's message: ";
const signs = { "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&amp;": "&" };
const written = (text) => text.replace(/&(lt|gt|quot|#39|amp);/g, (sign) => signs[sign]);

function nameModel() {
  const name = element.querySelector("[data-model]")?.dataset.model;
  if (!name) return;
  const log = side.querySelector('[role="log"]');
  if (log) log.ariaLabel = `Conversation with ${name}`;
  for (const message of side.querySelectorAll(`[data-testid="bot"][aria-label^="${said}"]`))
    message.ariaLabel = `${name}'s message: ${written(message.ariaLabel.slice(said.length))}`;
  for (const message of side.querySelectorAll('[data-testid="user"][aria-label*="&"]:not([data-read])')) {
    message.ariaLabel = written(message.ariaLabel);
    message.dataset.read = "";
  }
  changes.takeRecords(); // of these labels: otherwise it would be called for them again
}

const changes = new MutationObserver(nameModel);
changes.observe(side, { subtree: true, childList: true, attributeFilter: ["aria-label"] });
nameModel();
