// What does a screen reader call the model?  The name that the page shows, where gradio writes "chatbot" and "bot".

const side = element.closest(".side"), said = "bot's message: ";

function nameModel() {
  const name = element.querySelector("[data-model]")?.dataset.model;
  if (!name) return;
  const log = side.querySelector('[role="log"]');
  if (log) log.ariaLabel = `Conversation with ${name}`;
  for (const message of side.querySelectorAll(`[data-testid="bot"][aria-label^="${said}"]`))
    message.ariaLabel = `${name}'s message: ${message.ariaLabel.slice(said.length)}`;
  changes.takeRecords(); // of these labels: otherwise it would be called for them again
}

const changes = new MutationObserver(nameModel);
changes.observe(side, { subtree: true, childList: true, attributeFilter: ["aria-label"] });
nameModel();
