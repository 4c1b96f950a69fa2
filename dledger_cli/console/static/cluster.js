// Puts the page of all groups together: one connection, one store, parts that draw what is in it.

import * as cards from "./cards.js";
import { $, attribute, classes, text } from "./dom.js";
import * as events from "./events.js";
import { clusters, fleet, takeCatalog, takeSnapshot, takeUpdate } from "./fleet.js";
import * as topics from "./topics.js";
import * as format from "./format.js";
import { lost, renderConnection, renderRefusal } from "./hero.js";
import { state } from "./store.js";
import { connect } from "./stream.js";
import * as theme from "./theme.js";

const LEVELS = { unknown: "? unknown", good: "✓ healthy", warn: "! degraded", bad: "✕ failing", none: "… connecting" };

function renderHero() {
  const { overall } = fleet;
  const told = [overall.level, overall.title, overall.more];
  const [level, title, more] = state.connection === "lost" ? lost(told) : told;
  text($("verdict"), title);
  text($("verdict-level"), LEVELS[level]);
  classes($("verdict-level"), `level ${level}`);
  const silent = fleet.servers.length > 0 && fleet.servers.every((one) => one.state === "silent");
  text($("verdict-more"), silent && fleet.registeredMs > 0 ? `${more} Last heard at ${format.clock(fleet.registeredMs)}.` : more);
  document.title = `${title} · dledger`;
  const names = clusters();
  text($("cluster-word"), names.length > 1 ? `${names.length} clusters` : "cluster");
  text($("cluster-names"), names.length ? names.join(", ") : "–");
  const members = [...fleet.groups.values()].flatMap((group) => group.members);
  const answering = members.filter((one) => ["master", "slave", "candidate"].includes(one.state));
  text($("figure-groups"), format.count(fleet.groups.size));
  text($("figure-brokers"), members.length ? `${format.count(answering.length)} of ${format.count(members.length)}` : "–");
  text($("figure-puts"), format.rate(sum("puts")));
  text($("figure-gets"), format.rate(sum("gets")));
  attribute($("main"), "aria-busy", "false");
  $("main").classList.remove("bare");
}

/** Of the groups that tell; null if none does. */
function sum(figure) {
  const told = [...fleet.groups.values()].map((group) => group[figure]).filter((value) => value !== null);
  return told.length ? told.reduce((one, other) => one + other, 0) : null;
}

cards.start();
topics.start();
theme.start(() => {});

connect({
  snapshot: takeSnapshot,
  update: takeUpdate,
  state: (connection, words, why) => {
    renderConnection(connection, words);
    if (state.loaded) renderHero();
    if (why) renderRefusal(why);
  },
  data: (fresh, isSnapshot) => {
    renderHero();
    cards.renderServers();
    if (isSnapshot || fleet.changed.size > 0 || $("groups-say").hidden === false) cards.render(isSnapshot);
    if (isSnapshot) events.renderAll();
    else events.add(fresh);
    text($("foot"), `dledger ${state.session.version} · rates are the brokers' own, over ten seconds`);
  },
  catalog: (message) => {
    takeCatalog(message);
    topics.render();
    cards.renderTopicCounts();
  },
});
