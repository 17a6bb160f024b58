// Questions to whoever looks at the page.

import { token } from "./api.js";
import { byId, say } from "./dom.js";

/** Shows a dialog until it is closed, and returns what its form was sent with; null: nothing. */
function answered(dialog) {
  const form = dialog.querySelector("form");
  return new Promise((resolve) => {
    let answer = null;
    const send = (event) => {
      event.preventDefault();
      answer = event.submitter?.value ?? "yes";
      dialog.close();
    };
    const end = () => {
      form.removeEventListener("submit", send);
      resolve(answer === "no" ? null : answer);
    };
    form.addEventListener("submit", send);
    dialog.addEventListener("close", end, { once: true });
    dialog.showModal();
  });
}

/** Asks whether something is to be done. */
export async function confirmed(question, consequence) {
  say(byId("confirm-question"), question);
  say(byId("confirm-consequence"), consequence);
  return (await answered(byId("confirm"))) === "yes";
}

/** Asks for a token until one looks right; false: none is given. */
export async function askToken(why) {
  const field = byId("token-field");
  let trouble = why;
  for (;;) {
    say(byId("token-why"), trouble);
    field.value = "";
    if ((await answered(byId("token"))) === null) {
      return false;
    }
    const text = field.value;
    field.value = "";
    if (token.looksRight(text)) {
      token.keep(text);
      return true;
    }
    trouble = "This is no token: it has 32 to 512 letters, digits and -._~+/= and no blanks.";
  }
}

/** Asks for a limit: its text; "" lifts it; null: it stays as it is. */
export async function askLimit(name, limit) {
  const field = byId("limit-field");
  say(byId("limit-title"), `Limit of ${name}`);
  field.value = limit;
  const answer = await answered(byId("limit"));
  if (answer === null) {
    return null;
  }
  return answer === "lift" ? "" : field.value;
}

/** Shows the keys, and what the words mean. */
export function help() {
  const dialog = byId("help");
  if (!dialog.open) {
    answered(dialog);
  }
}

/** Whether a dialog is open. It has the keys then. */
export function isOpen() {
  return document.querySelector("dialog[open]") !== null;
}
