// Messages that wait for a time of their own: the next ones, found by topic, key and hour, and recalled.

import { toast } from "./actions.js";
import { field } from "./browser.js";
import { $, h, text } from "./dom.js";
import * as format from "./format.js";
import { askedFirst, wayBack } from "./forms.js";
import { ask, change } from "./stream.js";
import { can, now, state } from "./store.js";
import { plain } from "./table.js";

const REFRESH_MS = 3000;
const NEAR_MS = 12 * 3_600_000;

const form = {};
const opened = { topic: "", key: "", from_ms: 0, from_offset: 0 };
let pages = []; // where the pages before this one begin
let asked = 0;

export function start() {
  form.topic = h("input", { id: "timed-topic", list: "topic-names", autocomplete: "off", maxlength: 127, spellcheck: "false" });
  form.key = h("input", { id: "timed-key", autocomplete: "off", maxlength: 1024, spellcheck: "false" });
  form.from = h("input", { id: "timed-from", type: "datetime-local", step: 1 });
  form.element = h("form", { class: "search", novalidate: true, onsubmit: (event) => { event.preventDefault(); search(); } },
    field("For topic", form.topic, "grow"), field("Key or message id", form.key, "grow"), field("Due from", form.from, ""),
    h("button", { type: "submit", class: "strong" }, "Find"));
  form.total = h("p", { class: "result-line", role: "status" }, "Loading…");
  form.list = h("div", { id: "timed-list" });
  $("panel-delayed").append(h("h3", {}, "At a time of their own"), form.element, form.total, form.list);
  setInterval(() => {
    const isSeen = !$("panel-delayed").hidden && !document.hidden && state.connection === "live";
    const isCheap = !opened.topic && !opened.key; // a search may read thousands of records
    if (isSeen && isCheap && !form.list.contains(document.activeElement)) load();
  }, REFRESH_MS);
}

/** The tab was opened. */
export function show() {
  load();
}

function search() {
  pages = [];
  Object.assign(opened, { topic: form.topic.value.trim(), key: form.key.value.trim(), from_ms: form.from.value === "" ? 0 : new Date(form.from.value).getTime(), from_offset: 0 });
  load();
}

async function load(focused = "") {
  const mine = (asked += 1);
  let found;
  try {
    found = await ask("/api/timed", opened);
  } catch (error) {
    if (mine === asked) form.list.replaceChildren(h("p", { class: "empty bad" }, error.message));
    return;
  }
  if (mine !== asked) return;
  render(found);
  if (focused) (form.list.querySelector(`[data-key="${focused}"]`) ?? form.key).focus();
}

function render(found) {
  const late = found.late ? `, ${format.count(found.late)} of them late` : "";
  const next = found.next_due_ms >= 0 ? `; the next one is due ${dueAt(found.next_due_ms)}` : "";
  text(form.total, found.open === 1 ? `1 message waits for its time${late}${next}` : `${format.count(found.open)} messages wait for their time${late}${next}`);
  const hasMore = found.next_ms >= 0;
  const turn = (words, key, enabled, work) =>
    h("button", { type: "button", class: "ghost", "data-key": key, "aria-disabled": String(!enabled), onclick: () => { if (enabled) { work(); load(key); } } }, words);
  const isSearched = opened.topic !== "" || opened.key !== "";
  const line = hasMore && isSearched ? `Looked at what is due before ${format.moment(found.next_ms).slice(0, 19)}` : "";
  form.list.replaceChildren(
    h("div", { class: "result-line", hidden: !hasMore && pages.length === 0 }, h("span", {}, line),
      h("span", {}, turn("Earlier", "timed-earlier", pages.length > 0, () => Object.assign(opened, pages.pop())),
        turn(isSearched ? "Search later ones" : "Later", "timed-later", hasMore, () => {
          pages.push({ from_ms: opened.from_ms, from_offset: opened.from_offset });
          Object.assign(opened, { from_ms: found.next_ms, from_offset: found.next_offset });
        }))),
    found.messages.length
      ? plain(
        [["Due", false, "time"], ...(can("recall") ? [[""]] : []), ["For topic"], ["Queue", true], ["Tags"], ["Keys"], ["Bytes", true], ["Message id", false, "mono"]],
        found.messages.map((one) => [
          dueAt(one.due_ms),
          ...(can("recall") ? [h("button", { type: "button", class: "ghost danger", "data-key": `recall-${one.message_id}`, "aria-label": `Recall message ${one.message_id || one.keys} for ${one.topic}`, onclick: () => recall(one) }, "Recall…")] : []),
          one.topic, String(one.queue), one.tags || "–", one.keys || "–", format.count(one.size), one.message_id || "–",
        ]),
      )
      : h("p", { class: "empty" }, hasMore ? "None so far." : isSearched || opened.from_ms ? "No waiting message is like that." : "No message waits for a time of its own."),
  );
}

/** 14:03:09 (in 3 h), with the day if that is not soon. */
function dueAt(atMs) {
  const left = atMs - now();
  const at = Math.abs(left) < NEAR_MS ? format.clock(atMs) : format.moment(atMs).slice(0, 19);
  return `${at} (${left > 0 ? `in ${format.span(left)}` : "now"})`;
}

async function recall(message) {
  const goBack = wayBack();
  try {
    const answer = await askedFirst((fields) => change("recall", fields), { handle: message.recall_handle });
    if (answer === null) {
      goBack();
      return;
    }
    toast(answer.message, false);
  } catch (error) {
    toast(error.message, true);
  }
  load("timed-later");
}
