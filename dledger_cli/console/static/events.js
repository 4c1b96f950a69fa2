// Events: a visible list, and short announcements for screen readers.

import { $, h, shape, text } from "./dom.js";
import * as format from "./format.js";
import { state } from "./store.js";

const SHOWN_MAX = 100;
const SHAPES = new Set(["leader", "follower", "candidate", "unreachable", "plain"]);
const ANNOUNCED = new Set(["leader", "unreachable", "condition"]);

/** All anew. */
export function renderAll() {
  const newestFirst = state.events.slice(-SHOWN_MAX).sort((one, other) => other.at_ms - one.at_ms || other.number - one.number);
  $("events").replaceChildren(...newestFirst.map(item));
  renderEmpty();
}

/** Put new ones where they belong, which is on top or (an election is told a little later) just below; tell those who listen. */
export function add(fresh) {
  if (fresh.length === 0) return;
  const list = $("events");
  for (const event of fresh) {
    const older = [...list.children].find((one) => Number(one.dataset.at) <= event.at_ms);
    list.insertBefore(item(event), older ?? null);
  }
  while (list.children.length > SHOWN_MAX) list.lastChild.remove();
  renderEmpty();
  const told = fresh.filter((event) => ANNOUNCED.has(event.kind)).map((event) => event.text);
  if (told.length) text($("announcer"), `${told.join(". ")}.`);
}

function renderEmpty() {
  $("events-empty").hidden = state.events.length > 0;
  $("events").hidden = state.events.length === 0;
}

function item(event) {
  const icon = shape(SHAPES.has(event.kind) ? event.kind : "action");
  const words = [h("p", {}, event.text)];
  if (event.gap_ms >= 0) {
    words.push(h("p", { class: "more" }, `No leader was seen for the previous ${format.span(event.gap_ms)}.`));
  }
  return h("li", { "data-kind": event.kind, "data-node": event.node, "data-at": event.at_ms },
    h("time", { datetime: new Date(event.at_ms).toISOString(), title: format.moment(event.at_ms) }, format.clock(event.at_ms)), icon, h("div", {}, words));
}
