// A card for each group of brokers, by cluster: how it does, its members, its rates. Elements stay, so that focus does.

import { $, attribute, classes, h, reshape, shape, text } from "./dom.js";
import { clusters, fleet, groupUrl, isRegistered } from "./fleet.js";
import * as format from "./format.js";
import { now } from "./store.js";

const SIGNS = { good: "✓", warn: "!", bad: "✕", none: "…" };
const SHAPES = { master: "leader", slave: "follower", candidate: "candidate", silent: "unreachable", missing: "unreachable", unknown: "unknown" };
const WORDS = { silent: "no answer", missing: "missing", unknown: "asking…" };

const cards = new Map(); // group → its elements
const sections = new Map(); // cluster → its elements

export function start() {
  $("filter").addEventListener("input", filter);
  for (const radio of document.querySelectorAll('input[name="which"]')) radio.addEventListener("change", filter);
}

/** Bring the cards of changed groups up to date; `everything`: of all. */
export function render(everything) {
  for (const [name, card] of cards) {
    if (!fleet.groups.has(name)) {
      card.item.remove();
      cards.delete(name);
    }
  }
  const names = new Map(clusters().map((name) => [name, []]));
  for (const group of fleet.groups.values()) names.get(group.cluster).push(group);
  for (const [name, section] of sections) {
    if (!names.has(name)) {
      section.element.remove();
      sections.delete(name);
    }
  }
  [...names].forEach(([name, groups], place) => {
    const section = sectionOf(name);
    keepAt($("clusters"), section.element, place);
    groups.forEach((group, at) => {
      const card = cardOf(group.name);
      keepAt(section.list, card.item, at);
      if (everything || fleet.changed.has(group.name)) renderCard(card, group);
    });
    text(section.count, groups.length === 1 ? "1 group" : `${groups.length} groups`);
  });
  fleet.changed.clear();
  filter();
}

/** How many topics each group has, as far as they have been looked at. */
export function renderTopicCounts() {
  for (const [name, card] of cards) text(card.topics, topicsOf(name));
}

function topicsOf(name) {
  const { loaded, counts, unseen } = fleet.topics;
  const group = fleet.groups.get(name);
  return loaded && group && isRegistered(group) ? `${format.count(counts[name] ?? 0)}${unseen ? " or more" : ""}` : "–";
}

function keepAt(list, element, place) {
  if (list.children[place] !== element) list.insertBefore(element, list.children[place] ?? null);
}

function sectionOf(name) {
  let section = sections.get(name);
  if (section === undefined) {
    section = { count: h("span", { class: "quiet" }), list: h("ul", { class: "cards", "aria-label": `Groups of ${name}` }) };
    section.element = h("section", { class: "cluster" }, h("h3", {}, `${name} `, section.count), section.list);
    sections.set(name, section);
  }
  return section;
}

function cardOf(name) {
  let card = cards.get(name);
  if (card === undefined) {
    card = { title: h("h4"), level: h("span", { class: "level none" }), more: h("p", { class: "group-more" }), members: h("ul", { class: "members" }) };
    for (const figure of ["term", "puts", "gets", "topics"]) card[figure] = h("dd", {}, "–");
    card.about = h("span", { class: "quiet" });
    card.link = h("a", { class: "ghost", href: groupUrl(name) }, "Look inside");
    const figures = [["Term", card.term], ["Puts/s", card.puts], ["Gets/s", card.gets], ["Topics", card.topics]];
    card.item = h("li", { class: "group", "data-group": name },
      h("div", { class: "group-head" }, card.title, card.level), card.more, card.members,
      h("dl", { class: "group-figures" }, figures.map(([words, value]) => h("div", {}, h("dt", {}, words), value))),
      h("div", { class: "group-foot" }, card.about, card.link));
    cards.set(name, card);
  }
  return card;
}

function renderCard(card, group) {
  attribute(card.item, "data-level", group.level);
  text(card.title, group.title);
  text(card.level, `${SIGNS[group.level]} ${group.verdict}`);
  classes(card.level, `level ${group.level}`);
  text(card.more, group.more);
  renderMembers(card, group.members);
  text(card.term, group.term > 0 ? format.count(group.term) : "–");
  text(card.puts, format.rate(group.puts));
  text(card.gets, format.rate(group.gets));
  text(card.topics, topicsOf(group.name));
  const versions = format.names([...new Set(group.members.map((one) => one.version).filter(Boolean))].sort());
  text(card.about, group.kind === "rocketmq" ? `RocketMQ ${versions}` : versions ? `dledger ${versions}` : "");
  card.link.hidden = group.kind === "rocketmq";
  attribute(card.link, "aria-label", `Look inside ${group.title}`);
}

function renderMembers(card, members) {
  const key = JSON.stringify(members);
  if (card.members.dataset.key === key) return;
  card.members.dataset.key = key;
  card.members.replaceChildren(...members.map((one) => {
    const icon = shape("unknown");
    reshape(icon, SHAPES[one.state]);
    const isBad = one.state === "silent" || one.state === "missing";
    const since = isBad && one.since_ms > 0 ? `, since ${format.clock(one.since_ms)}` : "";
    const note = isBad || one.note ? h("span", { class: "member-note", title: one.note }, `${one.note}${since}`) : null;
    return h("li", { "data-state": one.state, "data-address": one.address },
      icon, h("span", { class: "member-node" }, one.node && one.role ? one.node : one.id >= 0 ? `id ${one.id}` : one.node || "–"),
      h("span", { class: "member-address mono" }, one.address || "address unknown"),
      h("span", { class: "member-state" }, WORDS[one.state] ?? one.state), note);
  }));
}

/** Hide what nobody wants to see now. */
function filter() {
  const wanted = $("filter").value.trim().toLowerCase();
  const onlyProblems = document.querySelector('input[name="which"]:checked').value === "problems";
  let shown = 0;
  let problems = 0;
  for (const [name, card] of cards) {
    const group = fleet.groups.get(name);
    const isProblem = group.level === "bad" || group.level === "warn";
    problems += isProblem ? 1 : 0;
    const words = [group.title, group.cluster, ...group.members.map((one) => one.address)].join(" ").toLowerCase();
    card.item.hidden = (onlyProblems && !isProblem) || !words.includes(wanted);
    shown += card.item.hidden ? 0 : 1;
  }
  for (const section of sections.values()) section.element.hidden = ![...section.list.children].some((one) => !one.hidden);
  text($("problems"), problems ? `Problems (${problems})` : "Problems");
  const say = $("groups-say");
  say.hidden = shown > 0 && fleet.leftOut === 0;
  if (shown > 0) text(say, `${format.count(fleet.leftOut)} more brokers have registered than this page shows.`);
  else if (fleet.groups.size > 0) text(say, onlyProblems && problems === 0 ? "No group has a problem." : "No group matches.");
  else text(say, fleet.overall.level === "none" ? "Asking the name servers…" : "No groups to show.");
}

/** How the name servers do. */
export function renderServers() {
  $("servers").replaceChildren(...fleet.servers.map((one) => {
    const icon = shape({ answers: "plain", silent: "unreachable", unknown: "unknown" }[one.state]);
    const words = {
      answers: `knows ${one.brokers === 1 ? "1 broker" : `${format.count(one.brokers)} brokers`}`,
      silent: `no answer for ${format.span(now() - one.since_ms)}: ${one.error}`,
      unknown: "asking…",
    }[one.state];
    return h("li", { "data-state": one.state }, icon, h("span", {}, "name server ", h("span", { class: "mono" }, one.address), " ", h("span", { class: "quiet" }, words)));
  }));
}
