// Topics and consumer groups: lists that the console keeps fresh, details when a row is opened.

import * as changes from "./changes.js";
import { $, h } from "./dom.js";
import * as format from "./format.js";
import { List } from "./list.js";
import { ask } from "./stream.js";
import { state } from "./store.js";
import { plain } from "./table.js";

const REFRESH_MS = 3000;
const PERMISSIONS = { 6: "read, write", 4: "read", 2: "write", 0: "none" };

const SEARCH_MS = 200;

let browse = () => {};
let offer = () => {};
let offered = -1;
let typing = 0;
const lists = {};
const kinds = new Map(); // by topic, what only its row in the list says

/** `onBrowse(topic, queue)`: somebody wants to see messages. `onOffer(names)`: topics to choose from, when they change. */
export function start(onBrowse, onOffer) {
  browse = onBrowse;
  offer = onOffer;
  lists.topics = new List({
    silent, panel: "panel-topics", path: "/api/topics", things: "topics", order: { sort: "name", descending: false },
    internal: "Show internal topics", none: "No topics yet. Create one: dledger topic create orders", command: "dledger topic list",
    columns: [
      { name: "Topic", sort: "name", cell: (row) => topicCell(row) },
      { name: "Queues", sort: "queues", number: true, cell: (row) => (row.write_queues === row.read_queues ? String(row.write_queues) : `${row.write_queues} w, ${row.read_queues} r`) },
      { name: "Messages", sort: "messages", number: true, cell: (row) => format.count(row.messages) },
      { name: "Newest", sort: "newest", kind: "time", cell: (row) => (row.newest_ms > 0 ? format.moment(row.newest_ms).slice(0, 19) : "–") },
      { name: "Permission", sort: "permission", cell: (row) => PERMISSIONS[row.permission & 6] ?? String(row.permission) },
    ],
  });
  lists.groups = new List({
    silent, panel: "panel-groups", path: "/api/groups", things: "groups", order: { sort: "lag", descending: true },
    none: "No consumer group has committed an offset yet.", command: "dledger consumer progress",
    columns: [
      { name: "Consumer group", sort: "name", cell: (row) => lists.groups.table.expander(row.name, row.name, (place) => fillGroup(place, row.name)) },
      { name: "Topics", sort: "topics", cell: topicsOf },
      { name: "Lag", sort: "lag", number: true, cell: (row) => lagCell(row.lag) },
    ],
  });
  document.addEventListener("input", ({ target }) => {
    if (target.getAttribute?.("list") !== "topic-names") return;
    clearTimeout(typing);
    typing = setTimeout(() => offerTopics(target.value.trim()), SEARCH_MS);
  });
  setInterval(refreshOpen, REFRESH_MS);
}

/** Why there is no list yet, if nobody could tell it. */
const silent = () => (state.nodes.length > 0 && state.nodes.every((node) => node.state === "unreachable") ? "No node responds." : "");

/** The console says something new of its lists. */
export function render() {
  for (const list of Object.values(lists)) list.renew(state.catalog);
  if (state.catalog.loaded && state.catalog.totals.topics !== offered) {
    offered = state.catalog.totals.topics;
    offerTopics("");
  }
}

export const showTopics = () => lists.topics.show();
export const showGroups = () => lists.groups.show();

/** Fields for a topic's name offer those that have what is typed in theirs. */
async function offerTopics(search) {
  let found;
  try {
    found = await ask("/api/topics", { search });
  } catch {
    return; // it is a help only
  }
  offer(found.rows.map((row) => row.name));
}

function topicCell(row) {
  kinds.set(row.name, { message_type: row.message_type, retention: row.retention });
  return lists.topics.table.expander(row.name, row.name, (place) => fillTopic(place, row.name));
}

function topicsOf({ topics, all_topics: all }) {
  if (topics === null) return "–";
  return all > topics.length ? `${topics.join(", ")} and ${format.count(all - topics.length)} more` : format.names(topics);
}

function lagCell(lag) {
  return h("span", { class: lag > 0 ? "lagging" : null }, format.count(lag));
}

/** Look again at what is open, while it can be seen. */
function refreshOpen() {
  if (document.hidden || state.connection !== "live" || document.querySelector("dialog[open]") !== null) return;
  if (!$("panel-topics").hidden) for (const [name, place] of lists.topics.table.open) fillTopic(place, name);
  if (!$("panel-groups").hidden) for (const [name, place] of lists.groups.table.open) fillGroup(place, name);
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
  const left = [
    found.all_queues > found.queues.length ? `The first ${found.queues.length} of ${found.all_queues} queues.` : "",
    found.all_groups > groups.length ? `The first ${groups.length} of ${found.all_groups} groups that consume it.` : "",
  ];
  table.append(...left.filter(Boolean).map((words) => h("p", { class: "quiet" }, words)));
  return h("div", {}, changes.topicTools({ ...found, ...kinds.get(name) }, lists.topics), table);
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
  if (found.all_rows > found.rows.length) table.append(h("p", { class: "quiet" }, `The first ${found.rows.length} of ${format.count(found.all_rows)} queues.`));
  return h("div", {}, changes.groupTools(found, lists.groups), table);
});
