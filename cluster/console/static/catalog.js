// Topics and consumer groups: totals that the server keeps fresh, details when a row is opened.

import * as changes from "./changes.js";
import { $, h } from "./dom.js";
import * as format from "./format.js";
import { ask } from "./stream.js";
import { state } from "./store.js";
import { plain, Table } from "./table.js";

const REFRESH_MS = 3000;
const PERMISSIONS = { 6: "read, write", 4: "read", 2: "write", 0: "none" };

let browse = () => {};
let showSystem = false;
const parts = {};

/** `onBrowse(topic, queue, offset)`: somebody wants to see messages. */
export function start(onBrowse) {
  browse = onBrowse;
  parts.topics = new Table(
    [
      { name: "Topic", value: (row) => row.name, cell: (row) => topicCell(row) },
      { name: "Queues", value: (row) => row.write_queues, number: true, cell: (row) => (row.write_queues === row.read_queues ? String(row.write_queues) : `${row.write_queues} w, ${row.read_queues} r`) },
      { name: "Messages", value: (row) => row.messages, number: true, cell: (row) => format.count(row.messages) },
      { name: "Newest", value: (row) => row.newest_ms, kind: "time", cell: (row) => (row.newest_ms > 0 ? format.moment(row.newest_ms).slice(0, 19) : "–") },
      { name: "Permission", value: (row) => row.permission, cell: (row) => PERMISSIONS[row.permission & 6] ?? String(row.permission) },
    ],
    (row) => row.name, 0,
  );
  parts.groups = new Table(
    [
      { name: "Consumer group", value: (row) => row.name, cell: (row) => parts.groups.expander(row.name, row.name, (place) => fillGroup(place, row.name)) },
      { name: "Topics", value: (row) => row.topics.length, cell: (row) => format.names(row.topics) },
      { name: "Lag", value: (row) => row.lag, number: true, cell: (row) => lagCell(row.lag) },
    ],
    (row) => row.name, 2, true,
  );
  parts.topicsSay = h("p", { class: "empty", role: "status" }, "Loading topics…");
  parts.groupsSay = h("p", { class: "empty", role: "status" }, "Loading groups…");
  const system = h("input", { type: "checkbox", onchange: () => { showSystem = system.checked; render(); } });
  $("panel-topics").append(parts.topics.element, parts.topicsSay, h("p", {}, h("label", { class: "toggle" }, system, "Show internal topics")));
  $("panel-groups").append(parts.groups.element, parts.groupsSay);
  setInterval(refreshOpen, REFRESH_MS);
}

export function render() {
  const { loaded, error, totals, topics, groups } = state.catalog;
  const shown = topics.filter((row) => showSystem || !row.system);
  parts.topics.render(shown);
  parts.groups.render(groups);
  say(parts.topicsSay, parts.topics, shown.length, loaded, error, "No topics yet. Create one: dledger topic create orders", cut(topics.length, totals.topics, "topics", "dledger topic list"));
  say(parts.groupsSay, parts.groups, groups.length, loaded, error, "No consumer group has committed an offset yet.", cut(groups.length, totals.groups, "groups", "dledger consumer progress"));
}

/** What is missing from a list that is too long for a page. */
function cut(shown, total, things, command) {
  return shown < total ? `The first ${format.count(shown)} of ${format.count(total)} ${things}, including internal ones. To see all: ${command}` : "";
}

function say(place, table, count, loaded, error, none, missing) {
  const words = error && !count ? error : !loaded ? "Loading…" : count ? missing : none;
  place.hidden = words === "";
  place.className = error && !count ? "empty bad" : "empty";
  if (place.textContent !== words) place.textContent = words;
  table.element.hidden = count === 0;
}

function topicCell(row) {
  return parts.topics.expander(row.name, row.name, (place) => fillTopic(place, row.name));
}

function lagCell(lag) {
  return h("span", { class: lag > 0 ? "lagging" : null }, format.count(lag));
}

function close(table, name) {
  table.open.delete(name);
  table.redraw();
}

/** Look again at what is open, while it can be seen. */
function refreshOpen() {
  if (document.hidden || state.connection !== "live" || document.querySelector("dialog[open]") !== null) return;
  if (!$("panel-topics").hidden) for (const [name, place] of parts.topics.open) fillTopic(place, name);
  if (!$("panel-groups").hidden) for (const [name, place] of parts.groups.open) fillGroup(place, name);
}

async function fill(place, path, name, make) {
  if (place.dataset.asking || place.contains(document.activeElement)) return;
  place.dataset.asking = "yes";
  try {
    place.replaceChildren(make(await ask(path, { name })));
  } catch (error) {
    place.replaceChildren(h("p", { class: "empty bad" }, error.message));
  } finally {
    delete place.dataset.asking;
  }
}

const fillTopic = (place, name) => fill(place, "/api/topic", name, (found) => {
  const groups = Object.keys(found.groups).sort();
  const columns = [["Queue", true], ["First", true], ["End", true], ["Newest", false, "time"], ...groups.map((group) => [`${group}: committed (lag)`, true]), ["", false, "time"]];
  const rows = found.queues.map((queue, place) => [
    String(queue.queue), format.count(queue.min_offset), format.count(queue.max_offset), format.moment(queue.newest_ms),
    ...groups.map((group) => progress(found.groups[group][place], queue)),
    h("button", { type: "button", class: "linklike", "aria-label": `Messages of queue ${queue.queue} of ${name}`, onclick: () => browse(name, queue.queue) }, "messages"),
  ]);
  const table = plain(columns, rows);
  if (found.all_queues > found.queues.length) table.append(h("p", { class: "quiet" }, `The first ${found.queues.length} of ${found.all_queues} queues.`));
  return h("div", {}, changes.topicTools(found, () => close(parts.topics, name)), table);
});

function progress(committed, queue) {
  const lag = Math.max(0, queue.max_offset - Math.max(committed, queue.min_offset));
  return h("span", {}, committed < 0 ? "–" : format.count(committed), " (", h("span", { class: lag > 0 ? "lagging" : null }, format.count(lag)), ")");
}

const fillGroup = (place, name) => fill(place, "/api/group", name, (found) => {
  const table = plain(
    [["Topic"], ["Queue", true], ["Committed", true], ["End", true], ["Lag", true]],
    found.rows.map((row) => [row.topic, String(row.queue), row.committed < 0 ? "–" : format.count(row.committed), format.count(row.max_offset), lagCell(row.lag)]),
  );
  return h("div", {}, changes.groupTools(found, () => close(parts.groups, name)), table);
});
