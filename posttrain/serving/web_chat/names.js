// What does a screen reader say of a message?  The name that the page shows, where gradio writes "chatbot" and "bot", and
// the text as it was written, where gradio has its HTML.

const side = element.closest(".side"), WRITTEN = { lt: "<", gt: ">", amp: "&" };

function nameModel() {
  const name = element.querySelector("[data-model]")?.dataset.model;
  if (!name) return;
  const log = side.querySelector('[role="log"]');
  if (log) log.ariaLabel = `Conversation with ${name}`;
  for (const [who, whose] of [["bot", `${name}'s`], ["user", "Your"]]) {
    const said = `${who}'s message: `; // a label that begins otherwise has been read: it must not be unescaped twice
    for (const message of side.querySelectorAll(`[data-testid="${who}"][aria-label^="${said}"]`)) {
      const text = message.ariaLabel.slice(said.length).replace(/&(lt|gt|amp);/g, (_, sign) => WRITTEN[sign]);
      message.ariaLabel = `${whose} message: ${text}`;
    }
  }
  changes.takeRecords(); // of these labels: otherwise it would be called for them again
}

const changes = new MutationObserver(nameModel);
changes.observe(side, { subtree: true, childList: true, attributeFilter: ["aria-label"] });
nameModel();
