// The topics of all groups: in which groups each is, and when a row is opened, every queue there.

import { h } from "./dom.js";
import { fleet, groupUrl, isRegistered } from "./fleet.js";
import * as format from "./format.js";
import { List } from "./list.js";
import { ask } from "./stream.js";
import { state } from "./store.js";
import { plain } from "./table.js";

const REFRESH_MS = 3000;
const PLACES_SHOWN = 6;
const PERMISSIONS = { 6: "read, write", 4: "read", 2: "write", 0: "none" };

let list;

export function start() {
  list = new List({
    panel: "topics", path: "/api/topics", things: "topics", order: { sort: "name", descending: false },
    internal: "Show internal topics", none, command: "dledger topic list",
    columns: [
      { name: "Topic", sort: "name", cell: (row) => list.table.expander(row.name, row.name, (place) => fill(place, row.name)) },
      { name: "Groups", sort: "groups", number: true, cell: (row) => format.count(row.shares?.length) },
      { name: "Queues", sort: "queues", number: true, cell: (row) => format.count(queuesOf(row)) },
      { name: "Where", kind: "places", cell: placesOf },
    ],
  });
  setInterval(() => {
    if (document.hidden || state.connection !== "live") return;
    for (const [name, place] of list.table.open) fill(place, name);
  }, REFRESH_MS);
}

/** Without a registered broker, name servers know no topic, although the brokers may have many. */
const none = () =>
  fleet.groups.size > 0 && ![...fleet.groups.values()].some(isRegistered)
    ? "No broker is registered, so no topic is known."
    : "No topics yet. Create one: dledger topic create orders";

export function render() {
  list.renew(fleet.topics);
}

const queuesOf = (row) => row.shares?.reduce((sum, [, , write]) => sum + write, 0) ?? null;
const countOf = (read, write) => (read === write ? String(write) : `${write} w, ${read} r`);

function placesOf(row) {
  if (row.shares === null) return "…";
  const places = row.shares.slice(0, PLACES_SHOWN).map(([name, read, write, permission]) =>
    `${name} (${countOf(read, write)}${(permission & 6) === 6 ? "" : `, ${PERMISSIONS[permission & 6]}`})`);
  const more = row.shares.length - places.length;
  return more > 0 ? `${places.join(", ")} and ${more} more` : places.join(", ") || "nowhere";
}

async function fill(place, name) {
  if (place.dataset.asking || place.contains(document.activeElement)) return;
  place.dataset.asking = "yes";
  try {
    const found = await ask("/api/topic", { name });
    place.replaceChildren(...found.groups.flatMap(groupOf));
  } catch (error) {
    place.replaceChildren(h("p", { class: "empty bad" }, error.message));
  } finally {
    delete place.dataset.asking;
  }
}

function groupOf(group) {
  const isForeign = fleet.groups.get(group.name)?.kind === "rocketmq";
  const name = fleet.groups.get(group.name)?.title ?? group.name;
  const head = h("h4", {}, isForeign ? name : h("a", { class: "linklike", href: groupUrl(group.name) }, name),
    h("span", { class: "quiet" }, ` ${countOf(group.read_queues, group.write_queues)} queues, ${PERMISSIONS[group.permission & 6]}`));
  if (group.error) return [head, h("p", { class: "lane-note bad" }, group.error)];
  const table = plain(
    [["Queue", true], ["First", true], ["End", true], ["Messages", true], ["Newest", false, "time"]],
    group.queues.map((one) => [
      String(one.queue), format.count(one.min_offset), format.count(one.max_offset),
      format.count(Math.max(0, one.max_offset - one.min_offset)), format.moment(one.newest_ms),
    ]),
  );
  if (group.all_queues > group.queues.length) table.append(h("p", { class: "quiet" }, `The first ${group.queues.length} of ${group.all_queues} queues.`));
  return [head, table];
}
