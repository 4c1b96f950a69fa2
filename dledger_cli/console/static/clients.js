// Who is connected: producers, consumers, and the members of one group with their queues.

import { $, h, text } from "./dom.js";
import * as format from "./format.js";
import { openSheet } from "./forms.js";
import { ask } from "./stream.js";
import { state } from "./store.js";
import { plain } from "./table.js";

const REFRESH_MS = 10_000; // a request for each group of a page
export const UNLISTED = "Consumers of this project that read without sharing queues are not listed.";
const parts = {};
let first = 0;
let asked = 0;

export function start() {
  parts.wanted = h("input", { id: "clients-wanted", type: "search", maxlength: 127, autocomplete: "off", spellcheck: "false" });
  parts.form = h("form", { class: "search", onsubmit: (event) => { event.preventDefault(); first = 0; load(); } },
    h("div", { class: "field grow" }, h("label", { for: "clients-wanted" }, "Groups whose name contains"), parts.wanted),
    h("button", { type: "submit", class: "strong" }, "Find"));
  parts.say = h("div", { class: "result-line", role: "status" }, "Loading…");
  parts.lists = h("div");
  $("panel-clients").append(parts.form, parts.say, parts.lists);
  setInterval(() => {
    const isSeen = !$("panel-clients").hidden && !document.hidden && state.connection === "live";
    if (isSeen && !parts.lists.contains(document.activeElement)) load();
  }, REFRESH_MS);
}

/** The tab was opened. */
export function show() {
  load();
}

async function load() {
  const mine = (asked += 1);
  let found;
  try {
    found = await ask("/api/clients", { first, wanted: parts.wanted.value.trim() });
  } catch (error) {
    if (mine !== asked) return;
    parts.say.replaceChildren(error.message);
    parts.lists.replaceChildren(h("p", { class: "empty bad" }, "Nothing to show."));
    return;
  }
  if (mine !== asked) return;
  const turn = (words, to, enabled) =>
    h("button", { type: "button", class: "ghost", "aria-disabled": String(!enabled), onclick: () => { if (enabled) { first = to; load(); } } }, words);
  const last = Math.min(found.first + found.per_page, found.groups);
  parts.say.replaceChildren(
    found.groups > found.per_page ? `Groups ${format.count(found.first + 1)} to ${format.count(last)} of ${format.count(found.groups)}` : found.groups === 1 ? "1 group" : `${format.count(found.groups)} groups`,
    found.groups > found.per_page
      ? h("span", {}, turn("Previous", Math.max(0, found.first - found.per_page), found.first > 0), turn("Next", last, last < found.groups))
      : "",
  );
  parts.lists.replaceChildren(
    h("h3", {}, "Consumers"), consumersOf(found), cut(found.consumers.length, found.all_consumers),
    h("h3", {}, "Producers"), producersOf(found), cut(found.producers.length, found.all_producers),
  );
}

const cut = (shown, all) => (shown < all ? h("p", { class: "quiet" }, `The first ${format.count(shown)} of ${format.count(all)}.`) : "");
const programOf = (one) => (one.version ? `${one.language} ${one.version}` : one.language);
const mono = (words) => h("span", { class: "mono" }, words);

function consumersOf(found) {
  if (found.consumers.length === 0) return h("p", { class: "empty" }, `No member of these groups is connected. ${UNLISTED}`);
  return plain(
    [["Group"], ["Client"], ["Address"], ["Program"], ["Subscribes to", false, "places"]],
    found.consumers.map((one) => [
      h("button", { type: "button", class: "linklike", "aria-label": `Members of ${one.group}`, onclick: () => showMembers(one.group) }, one.group),
      mono(one.id), mono(one.address), programOf(one), `${one.topics.join(", ") || "–"}${one.broadcast ? " (broadcast)" : ""}`,
    ]),
  );
}

function producersOf(found) {
  const note = "Producers of this project introduce themselves only if they send transactions.";
  if (found.producers.length === 0) return h("p", { class: "empty" }, `No producer is listed. ${note}`);
  return h("div", {},
    plain([["Group"], ["Client"], ["Address"], ["Program"]], found.producers.map((one) => [one.group, mono(one.id), mono(one.address), programOf(one)])),
    h("p", { class: "quiet" }, note));
}

// --- the members of one group ----------------------------------------------------------------------------------------

export function showMembers(group) {
  openSheet(`Members of ${group}`, (body) => fillMembers(body, group));
}

async function fillMembers(body, group) {
  let found;
  try {
    found = await ask("/api/members", { group });
  } catch (error) {
    body.replaceChildren(h("p", { class: "empty bad" }, error.message));
    return;
  }
  const own = new Map(found.members.map((one) => [one.id, found.rows.filter((row) => row.member === one.id)]));
  const lagOf = (rows) => rows.reduce((sum, row) => sum + row.lag, 0);
  const members = plain(
    [["Client"], ["Address"], ["Program"], ["Queues", true], ["Lag", true]],
    found.members.map((one) => [
      mono(one.id), mono(one.address), programOf(one), found.broadcast ? "all" : format.count(own.get(one.id).length), found.broadcast ? "–" : lag(lagOf(own.get(one.id))),
    ]),
  );
  const note = h("p", { class: "quiet" });
  text(note, found.broadcast
    ? "Every member gets all messages, and remembers its own position."
    : "Queues as members divide them by the usual rule (an equal run each); a RocketMQ client with another rule differs.");
  const queues = plain(
    [["Topic"], ["Queue", true], ["Committed", true], ["End", true], ["Lag", true], ["Member"]],
    found.rows.map((row) => [row.topic, String(row.queue), row.committed < 0 ? "–" : format.count(row.committed), format.count(row.max_offset), lag(row.lag), row.member ? mono(row.member) : "–"]),
  );
  body.replaceChildren(
    found.members.length ? members : h("p", { class: "empty" }, `No member of this group is connected. ${UNLISTED}`), cut(found.members.length, found.all_members),
    found.subscriptions.length ? h("p", {}, "Subscribes to ", found.subscriptions.join(", ")) : "",
    h("h3", {}, "Queues"), found.rows.length ? queues : h("p", { class: "empty" }, "The group has consumed nothing yet."), cut(found.rows.length, found.all_rows),
    found.members.length ? note : "",
    h("p", { class: "dialog-buttons" }, h("button", { type: "button", class: "ghost", onclick: () => fillMembers(body, group) }, "Look again")),
  );
}

const lag = (count) => h("span", { class: count > 0 ? "lagging" : null }, format.count(count));
