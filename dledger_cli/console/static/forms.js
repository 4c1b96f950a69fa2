// A form in a dialog, with the server's complaints beside the fields, and the questions asked before something is lost.

import { $, h, text } from "./dom.js";

/** Gives what returns the focus to where it is now, also if that is drawn anew meanwhile (then by its `data-key`). */
export function wayBack() {
  const from = document.activeElement;
  const key = from?.dataset.key;
  return () => {
    const to = from?.isConnected || key === undefined ? from : document.querySelector(`[data-key="${CSS.escape(key)}"]`);
    to?.focus();
  };
}

/** Ask; gives whether the answer was yes. The yes of a `danger` looks like one. */
export function confirmed(title, words, yes, danger = false) {
  const dialog = $("confirm");
  text($("confirm-title"), title);
  text($("confirm-text"), words);
  text($("confirm-yes"), yes);
  $("confirm-yes").className = danger ? "strong danger" : "strong";
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/**
 * Do `work(fields)`; if the answer is a question, ask it, and do it again if the answer is yes. Null: it was no. Throws
 * if the question arrives while another one is open, which would have its answer.
 */
export async function askedFirst(work, fields) {
  const answer = await work(fields);
  if (answer.confirm === undefined) return answer;
  if ($("confirm").open) throw new Error("nothing was done, because another question was open");
  const { title, text: losses, yes } = answer.confirm;
  return (await confirmed(title, losses, yes, true)) ? work({ ...fields, confirmed: true }) : null;
}

/**
 * A field of a form. `kind`: text, number, select, textarea, time; `options`: [[value, words], …]; it is shown while
 * `when(values)`.
 */
function makeField({ name, label, kind = "text", value = "", options = [], hint = "", size = "", when = () => true, ...attributes }) {
  const id = `form-${name}`;
  const about = [hint ? `${id}-hint` : "", `${id}-error`].filter(Boolean).join(" ");
  const common = { id, name, "aria-describedby": about, ...attributes };
  let input;
  if (kind === "select") {
    input = h("select", common, options.map(([one, words]) => h("option", { value: one, selected: one === value }, words)));
  } else if (kind === "textarea") {
    input = h("textarea", { rows: 6, spellcheck: "false", ...common });
    input.value = value;
  } else {
    const type = { number: "number", time: "datetime-local" }[kind] ?? "text";
    input = h("input", { type, autocomplete: "off", spellcheck: "false", ...common });
    input.value = value;
  }
  const error = h("p", { class: "field-error", id: `${id}-error` });
  const box = h("div", { class: `field ${size}` }, h("label", { for: id }, label), input, hint ? h("p", { class: "field-hint", id: `${id}-hint` }, hint) : null, error);
  const read = () => {
    const given = input.value;
    if (kind === "textarea" || kind === "select") return given;
    if (kind === "number") return given.trim() === "" ? (input.validity.badInput ? NaN : null) : Number(given);
    return given.trim();
  };
  return { name, box, input, error, read, when };
}

/**
 * Show a form. `send(values)` does what it is for, and may throw; what it gives is passed to `done`, which says in
 * words what came of it (they appear below the form, which stays) or gives null to close it. `more` are elements below
 * the fields; `changed(values)` is called when a field was changed.
 */
export function openForm({ title, intro = "", fields, submit, more = [], send, done, changed = () => {} }) {
  const dialog = $("form-dialog");
  const goBack = wayBack();
  const made = fields.map(makeField);
  const say = h("p", { class: "form-say", role: "status" });
  const button = h("button", { type: "submit", class: "strong" }, submit);
  const values = () => Object.fromEntries(made.map((one) => [one.name, one.read()]));
  const complain = (name, words) => {
    for (const one of made) {
      const isIt = one.name === name;
      text(one.error, isIt ? words : "");
      one.input.setAttribute("aria-invalid", String(isIt));
      if (isIt) one.input.focus();
    }
    say.className = words && !made.some((one) => one.name === name) ? "form-say bad" : "form-say";
    text(say, say.className.endsWith("bad") ? words : "");
  };
  const submitted = async (event) => {
    event.preventDefault();
    if (button.getAttribute("aria-disabled") === "true") return;
    const given = values();
    const odd = made.find((one) => Number.isNaN(given[one.name]));
    complain(odd?.name ?? "", odd ? "This must be a whole number" : "");
    if (odd) return;
    button.setAttribute("aria-disabled", "true");
    try {
      const answer = await send(given);
      const words = answer === null ? "" : done(answer);
      if (words === null && form.isConnected) dialog.close();
      else say.replaceChildren(...[words ?? ""].flat());
    } catch (error) {
      complain(error.answer?.field ?? "", error.message);
    } finally {
      button.removeAttribute("aria-disabled");
    }
  };
  const form = h("form", { class: "form", novalidate: true, onsubmit: submitted },
    intro ? h("p", { class: "quiet" }, intro) : null,
    h("div", { class: "form-fields" }, made.map((one) => one.box)), more, say,
    h("p", { class: "dialog-buttons" }, h("button", { type: "button", class: "ghost", onclick: () => dialog.close() }, "Close"), button));
  const showFields = () => made.forEach((one) => (one.box.hidden = !one.when(values())));
  form.addEventListener("input", () => {
    showFields();
    changed(values());
  });
  showFields();
  text($("form-title"), title);
  $("form-content").replaceChildren(form);
  dialog.addEventListener("close", () => {
    $("form-content").replaceChildren();
    goBack();
  }, { once: true });
  dialog.showModal();
  (made.find((one) => one.input.value === "" && !one.box.hidden) ?? made[0]).input.focus();
  return { button, values };
}

/**
 * Show a dialog with lists. `fill(body)` draws them, and is called again by what it draws. Every dialog has a body of
 * its own, so that an answer which comes late does not appear under another one's title.
 */
export function openSheet(title, fill) {
  const dialog = $("sheet");
  const goBack = wayBack();
  text($("sheet-title"), title);
  const body = h("div", {}, h("p", { class: "quiet" }, "Loading…"));
  $("sheet-body").replaceChildren(body);
  dialog.addEventListener("close", () => {
    body.remove();
    goBack();
  }, { once: true });
  dialog.showModal();
  fill(body);
}
