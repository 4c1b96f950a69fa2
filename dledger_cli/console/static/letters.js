// Messages that no consumer gets now: a group's dead letters, and those that wait for their delivery time.

import { showMessage } from "./browser.js";
import { $, h } from "./dom.js";
import * as format from "./format.js";
import { openSheet } from "./forms.js";
import { ask, change } from "./stream.js";
import { can, now, state } from "./store.js";
import { plain } from "./table.js";

const REFRESH_MS = 3000;
const PAGE = 20;

// --- dead letters ----------------------------------------------------------------------------------------------------

export function showDeadLetters(group) {
  openSheet(`Dead letters of ${group}`, (body) => fillDead(body, group, -1));
}

let askedDead = 0;

async function fillDead(body, group, before) {
  const mine = (askedDead += 1);
  let found;
  try {
    found = await ask("/api/dead-letters", { group, before });
  } catch (error) {
    if (mine === askedDead) body.replaceChildren(h("p", { class: "empty bad" }, error.message));
    return;
  }
  if (mine !== askedDead) return;
  const count = found.max_offset - found.min_offset;
  if (count <= 0) {
    body.replaceChildren(h("p", { class: "empty" }, "None. Messages come here after their last delivery failed (16 by default)."));
    return;
  }
  const turn = (words, to, enabled) =>
    h("button", { type: "button", class: "ghost", "aria-disabled": String(!enabled), onclick: () => enabled && fillDead(body, group, to) }, words);
  const end = found.first + found.messages.length;
  const say = h("p", { class: "form-say", role: "status" });
  body.replaceChildren(
    h("div", { class: "result-line" }, count === 1 ? "1 dead letter" : `${format.count(count)} dead letters`,
      h("span", {}, turn("Newer", end + PAGE, end < found.max_offset), turn("Older", found.first, found.first > found.min_offset), turn("Newest", -1, true))),
    plain(
      [["Offset", true], [""], ["Dead since", false, "time"], ["Of topic"], ["Keys"], ["Deliveries", true], ["Body", false, "body"]],
      found.messages.map((one) => [
        h("button", { type: "button", class: "linklike", "aria-label": `Show dead letter ${one.offset}`, onclick: () => showMessage({ topic: found.topic, queue: 0, offset: one.offset }) }, String(one.offset)),
        can("resend") ? h("button", { type: "button", class: "ghost", "aria-label": `Send dead letter ${one.offset} again`, onclick: (event) => resend(group, one.offset, event.currentTarget, say) }, "Resend") : "",
        format.moment(one.stored_ms).slice(0, 19), one.origin || "–", one.keys || "–", String(one.deliveries), one.preview.text,
      ]),
    ),
    say,
    h("p", { class: "quiet" }, "Resend delivers a copy to this group once more, after a second; if that fails, too, it is a dead letter again. The old one stays until it expires with its file. What you skip stays as it is."),
  );
}

async function resend(group, offset, button, say) {
  if (button.getAttribute("aria-disabled") === "true") return;
  button.setAttribute("aria-disabled", "true");
  try {
    const answer = await change("resend", { group, offset });
    button.textContent = "Sent again";
    say.className = "form-say";
    say.textContent = answer.message;
  } catch (error) {
    button.removeAttribute("aria-disabled");
    say.className = "form-say bad";
    say.textContent = error.message;
  }
}

// --- delayed messages ------------------------------------------------------------------------------------------------

const parts = {};
const opened = { level: 0, offset: -1 };
let asked = 0;

export function start() {
  parts.lists = h("div", {}, h("p", { class: "empty" }, "Loading…"));
  $("panel-delayed").append(h("h3", {}, "At a delay level"), parts.lists);
  setInterval(() => {
    const isSeen = !$("panel-delayed").hidden && !document.hidden && state.connection === "live";
    if (isSeen && !parts.lists.contains(document.activeElement)) loadDelayed();
  }, REFRESH_MS);
}

/** The tab was opened. */
export function show() {
  loadDelayed();
}

async function loadDelayed(focused = "") {
  const mine = (asked += 1);
  let found;
  try {
    found = await ask("/api/delayed", opened);
  } catch (error) {
    if (mine === asked) parts.lists.replaceChildren(h("p", { class: "empty bad" }, error.message));
    return;
  }
  if (mine !== asked) return;
  const waiting = found.levels.filter((one) => one.count > 0 || one.level === opened.level);
  if (waiting.length === 0) {
    parts.lists.replaceChildren(h("p", { class: "empty" }, `No message waits for its delivery time at any of the ${found.levels.length} delay levels.`));
    return;
  }
  const open = waiting.find((one) => one.level === opened.level);
  parts.lists.replaceChildren(
    plain(
      [["Level", true], ["Delay"], ["Waiting", true], ["Next is due", false, "time"]],
      waiting.map((one) => [
        h("button", { type: "button", class: "linklike", "data-key": `level-${one.level}`, "aria-expanded": String(one.level === opened.level), "aria-label": `Messages of delay level ${one.level}`, onclick: () => openLevel(one.level) }, String(one.level)),
        format.span(one.delay_ms), format.count(one.count), one.next_due_ms > 0 ? dueIn(one.next_due_ms) : "–",
      ]),
    ),
    ...(open ? messagesOf(open, found.messages) : [h("p", { class: "quiet" }, "Choose a level to see its messages.")]),
  );
  if (focused) parts.lists.querySelector(`[data-key="${focused}"]`)?.focus();
}

function openLevel(level) {
  opened.level = opened.level === level ? 0 : level;
  opened.offset = -1;
  loadDelayed(`level-${level}`);
}

function dueIn(atMs) {
  const left = atMs - now();
  return `${format.clock(atMs)} (${left > 0 ? `in ${format.span(left)}` : "now"})`;
}

function messagesOf(level, messages) {
  const begin = messages[0]?.offset ?? level.next_offset;
  const end = begin + messages.length;
  const turn = (words, offset, enabled, key) =>
    h("button", { type: "button", class: "ghost", "data-key": key, "aria-disabled": String(!enabled), onclick: () => { if (enabled) { opened.offset = offset; loadDelayed(key); } } }, words);
  return [
    h("div", { class: "result-line" }, `Delay level ${level.level}: ${level.count === 1 ? "1 message waits" : `${format.count(level.count)} messages wait`}`,
      h("span", {}, turn("Next to be delivered", -1, true, "delayed-first"), turn("Later", end, messages.length > 0 && end < level.end_offset, "delayed-later"))),
    messages.length
      ? plain(
        [["Due", false, "time"], ["For topic"], ["Queue", true], ["Tags"], ["Keys"], ["Bytes", true], ["Body", false, "body"]],
        messages.map((one) => [dueIn(one.due_ms), one.to_topic || "–", one.to_queue || "–", one.tags || "–", one.keys || "–", format.count(one.preview.bytes), one.preview.text]),
      )
      : h("p", { class: "empty" }, "All of them have been delivered meanwhile."),
  ];
}
