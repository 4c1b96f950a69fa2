// Puts the page together: one connection, one store, parts that draw what is in it.

import * as actions from "./actions.js";
import * as browser from "./browser.js";
import * as catalog from "./catalog.js";
import * as changes from "./changes.js";
import { Chart } from "./chart.js";
import * as clients from "./clients.js";
import { $, text } from "./dom.js";
import * as events from "./events.js";
import * as format from "./format.js";
import * as hero from "./hero.js";
import * as lanes from "./lanes.js";
import * as letters from "./letters.js";
import { state, takeSnapshot, takeUpdate } from "./store.js";
import { connect } from "./stream.js";
import * as tabs from "./tabs.js";
import * as theme from "./theme.js";
import * as timed from "./timed.js";

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [1, 3], [12, 5]];
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const DESCRIBE_MS = 5000;

function rateSeries() {
  const entries = { name: "entries/s", color: "series-1", dash: DASHES[0], filled: true, value: (point) => point.entries_per_s };
  if (state.group?.kind === "log" || state.group === null || state.group.kind === "unknown") return [entries];
  const puts = { name: "puts/s", color: "series-2", dash: DASHES[1], value: (point) => point.puts_per_s };
  const gets = { name: "gets/s", color: "series-3", dash: DASHES[2], value: (point) => point.gets_per_s };
  return state.group.kind === "broker" ? [puts, gets] : [entries, puts, gets];
}

function latencySeries() {
  return state.nodes
    .filter((node) => node.facts !== null)
    .map((node, place) => ({
      name: node.node,
      color: `series-${(place % 7) + 1}`,
      dash: DASHES[place % 7],
      value: (point) => point.latency_ms[node.node],
    }));
}

const rates = new Chart($("rate-plot"), $("rate-series"), rateSeries, lanes.shownMs, format.rate, 10);
const latencies = new Chart($("latency-plot"), $("latency-series"), latencySeries, lanes.shownMs, format.milliseconds, 2);

function renderKind() {
  const kind = state.group.kind;
  if (kind === "unknown") return;
  const offered = kind === "log" ? ["tab-entries"] : ["tab-topics", "tab-groups", "tab-messages", "tab-clients", "tab-delayed"];
  if (renderKind.last !== kind) {
    renderKind.last = kind;
    tabs.offer(offered);
    text($("rate-note"), kind === "log"
      ? "Growth of the committed index."
      : "Entries: growth of the committed index; one entry may hold several messages. Puts and gets: as counted by the broker.");
  }
}

function render() {
  if (!state.loaded) return;
  hero.render();
  lanes.render();
  renderKind();
  changes.render();
  if (!state.catalog.loaded) catalog.render(); // why not may have changed
  $("main").setAttribute("aria-busy", "false");
}

function draw() {
  if (!state.loaded || document.hidden) return;
  lanes.drawStrips();
}

function drawAll() {
  if (!state.loaded) return;
  draw();
  rates.render();
  latencies.render();
}

$("all-groups").hidden = location.pathname !== "/group";
lanes.start((action, node, button) => actions.perform(action, node, button));
catalog.start((topic, queue) => {
  tabs.show("tab-messages");
  browser.browse(topic, queue);
}, browser.offerTopics);
browser.start();
changes.start();
clients.start();
timed.start();
letters.start();
const shown = { "tab-topics": catalog.showTopics, "tab-groups": catalog.showGroups, "tab-messages": browser.firstMessages, "tab-entries": browser.firstEntries, "tab-clients": clients.show, "tab-delayed": () => { timed.show(); letters.show(); } };
tabs.start((id) => shown[id]?.());
theme.start(drawAll);
for (const radio of document.querySelectorAll('input[name="span"]')) radio.addEventListener("change", drawAll);

connect({
  snapshot: takeSnapshot,
  update: takeUpdate,
  state: (connection, words, why) => {
    hero.renderConnection(connection, words);
    if (why) hero.renderRefusal(why);
    render();
  },
  data: (fresh, isSnapshot) => {
    render();
    if (isSnapshot) events.renderAll();
    else events.add(fresh);
    drawAll();
    text($("foot"), `dledger ${state.session.version} · roles' times are the nodes' own, others this console's, to within a second · ${state.nodes.length} nodes`);
  },
  catalog: (message) => {
    state.catalog = message;
    catalog.render();
  },
});

// Between two messages the strips go on scrolling, gently.
let odd = false;
setInterval(() => {
  odd = !odd;
  if (odd || !calm.matches) draw();
}, 250);
setInterval(() => {
  rates.describe("Throughput");
  latencies.describe("Latency");
}, DESCRIBE_MS);
new ResizeObserver(drawAll).observe($("main"));
