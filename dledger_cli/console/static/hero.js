// The headline: who leads, the group's health, and four figures.

import { $, attribute, classes, text } from "./dom.js";
import * as format from "./format.js";
import { isAlive, now, state } from "./store.js";
import { chosen } from "./stream.js";

const LEVELS = { unknown: "? unknown", good: "✓ healthy", warn: "! degraded", bad: "✕ not serving", none: "… connecting" };

export function render() {
  const [level, title, more] = state.connection === "lost" ? lost(verdict()) : verdict();
  text($("verdict"), title);
  text($("verdict-level"), LEVELS[level]);
  classes($("verdict-level"), `level ${level}`);
  text($("verdict-more"), more);
  const group = state.group;
  text($("group-name"), group.name || chosen || "…");
  $("main").classList.remove("bare");
  document.title = `${title} · dledger`;
  const last = state.points[state.points.length - 1];
  const leader = state.nodes.find((node) => node.node === group.leader) ?? state.nodes.find((node) => node.state === "plain");
  const isPlain = group.kind === "broker";
  text($("figure-term"), isPlain || group.term === 0 ? "–" : format.count(group.term));
  const committed = state.nodes.some(isAlive) ? group.committed : Math.max(-2, ...state.nodes.map((node) => node.facts?.committed ?? -2));
  text($("figure-committed"), committed === -2 ? "–" : isPlain ? format.bytes(committed) : format.index(committed));
  const isLog = group.kind === "log" || group.kind === "unknown";
  text($("figure-rate-name"), isLog ? "Entries per second" : "Puts per second");
  const rate = isLog ? last?.entries_per_s : last?.puts_per_s;
  text($("figure-rate"), format.rate(rate));
  text($("figure-latency"), format.milliseconds(leader && isAlive(leader) ? leader.latency_ms : -1));
}

function verdict() {
  const { group } = state;
  const nodes = state.nodes.filter((node) => !node.removed);
  const alive = nodes.filter(isAlive);
  const asking = nodes.filter((node) => node.state === "unknown");
  const missing = nodes.filter((node) => node.state === "unreachable").map((node) => node.node);
  if (alive.length === 0) {
    if (asking.length === nodes.length) return ["none", "Contacting the nodes…", "No response yet."];
    const seen = Math.max(...nodes.map((node) => node.answered_ms));
    const last = seen > 0 ? ` The last response was at ${format.clock(seen)}; figures are those of that time.` : "";
    return ["bad", "No node responds", `Tried ${format.names(nodes.map((node) => node.address || node.node))}, every second.${last}`];
  }
  if (group.kind === "broker") {
    return ["good", `${alive[0].node} is running`, "A standalone broker: no group, no failover."];
  }
  const voters = group.voters.length ? nodes.filter((node) => group.voters.includes(node.node)) : nodes;
  const voting = voters.filter(isAlive).length;
  const quorum = Math.floor(voters.length / 2) + 1;
  if (group.leader === "") {
    const since = group.lost_ms ? ` for ${format.span(now() - group.lost_ms)}` : "";
    if (voting < quorum) {
      return ["bad", "No leader", `${voting} of ${voters.length} nodes respond${voting === 1 ? "s" : ""}; ${quorum} are needed${since && `. No leader${since}`}. Appends wait; nothing is lost.`];
    }
    return ["bad", "No leader", `An election has been under way${since}. Appends wait until it ends.`];
  }
  const since = `${group.leader_began ? "" : "at least "}since ${format.clock(group.leader_since_ms)}`;
  const title = `${group.leader} leads`;
  const full = nodes.filter((node) => node.facts?.disk_full).map((node) => node.node);
  if (full.length) return ["warn", title, `${format.names(full)}: disk full. In term ${group.term} ${since}.`];
  const spare = voting - quorum;
  const may = spare <= 0 ? "No more may fail." : `${spare} more may fail.`;
  if (missing.length) {
    return ["warn", title, `${format.names(missing)} ${missing.length === 1 ? "does" : "do"} not respond. ${may} In term ${group.term} ${since}.`];
  }
  const words = voters.length === 1 ? "Single node: no failover." : `All ${nodes.length} nodes respond. ${spare <= 0 ? "None may fail." : `Up to ${spare} may fail.`}`;
  return ["good", title, `${words} In term ${group.term} ${since}.`];
}

/** What was true when the console was heard last: nobody knows what is true now. */
export function lost([, title, more]) {
  return ["unknown", "No connection to the console", `At ${format.clock(state.heardMs)}: ${title}. ${more}`];
}

/** The console does not show this group. */
export function renderRefusal(why) {
  text($("verdict"), "Nothing to show");
  text($("verdict-level"), "✕ not available");
  classes($("verdict-level"), "level bad");
  text($("verdict-more"), `${why}.`);
  $("main").classList.toggle("bare", !state.loaded);
}

export function renderConnection(connection, words) {
  attribute($("live"), "data-state", connection === "live" ? "live" : connection === "lost" ? "lost" : "connecting");
  text($("live-text"), words);
  $("main").classList.toggle("stale", connection === "lost");
}
