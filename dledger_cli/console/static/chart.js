// Lines over time on a canvas: an axis that does not jump, gaps where nothing is known, a readout for mouse and keys.

import { color, context, h, sample, text } from "./dom.js";
import { clock, nice } from "./format.js";
import { gridTimes } from "./lanes.js";
import { now, state } from "./store.js";

const GAP_MS = 6500;
const LEFT_MIN = 58;
const BOTTOM = 20;
const TOP = 8;

export class Chart {
  /** `series()` gives [{name, color, dash, value(point)}, …]; `span()` the time shown; `shown(value)` its words. */
  constructor(plot, legend, series, span, shown, floor) {
    Object.assign(this, { plot, legend, series, span, shown, floor });
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.tip = h("div", { class: "plot-tip", hidden: true, role: "status" });
    this.none = h("p", { class: "plot-empty" }, "No data yet");
    plot.append(this.canvas, this.tip, this.none);
    this.top = floor;
    this.cursor = null; // a time
    this.items = [];
    plot.addEventListener("pointermove", (event) => this.point(event.clientX - plot.getBoundingClientRect().left));
    plot.addEventListener("pointerleave", () => this.leave());
    plot.addEventListener("blur", () => this.leave());
    plot.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** The points shown. */
  points() {
    const from = now() - this.span();
    const all = state.points;
    let first = all.length;
    while (first > 0 && all[first - 1].at_ms >= from - GAP_MS) first -= 1;
    return all.slice(first);
  }

  render() {
    const series = this.series();
    const points = this.points();
    this.renderLegend(series, points);
    const latest = points[points.length - 1];
    const words = series.map((one) => `${one.name} ${latest ? this.shown(one.value(latest)) : "–"}`).join(", ");
    this.words = words;
    this.draw(series, points);
  }

  /** Say what the picture shows; seldom, for a screen reader may read it out. */
  describe(title) {
    if (this.words !== undefined) this.plot.setAttribute("aria-label", `${title} over time. Now: ${this.words}. Use the arrow keys to read earlier values.`);
  }

  renderLegend(series, points) {
    const key = series.map((one) => one.name).join("\n");
    if (key !== this.legendKey) {
      this.legendKey = key;
      this.items = series.map((one) => h("b", {}, "–"));
      this.legend.replaceChildren(
        ...series.map((one, place) => {
          const line = sample(one.dash);
          line.style.color = `var(--${one.color})`;
          return h("li", {}, line, one.name, this.items[place]);
        }),
      );
    }
    const latest = points[points.length - 1];
    series.forEach((one, place) => text(this.items[place], latest ? this.shown(one.value(latest)) : "–"));
  }

  draw(series, points) {
    const found = context(this.canvas);
    if (found === null) return;
    const { drawing, width, height } = found;
    const to = now();
    const from = to - this.span();
    this.scale(series, points);
    drawing.font = "12px system-ui, sans-serif";
    const words = [0, 0.5, 1].map((share) => this.shown(this.top * share).replace(/\.0(?= |$)/, ""));
    const left = Math.max(LEFT_MIN, 14 + Math.ceil(Math.max(...words.map((one) => drawing.measureText(one).width))));
    this.box = { from, to, width, left, right: width - 6 };
    const x = (at) => left + ((at - from) / (to - from)) * (width - 6 - left);
    const y = (value) => TOP + (1 - value / this.top) * (height - TOP - BOTTOM);
    this.drawGrid(drawing, x, y, words);
    let any = false;
    drawing.save();
    drawing.beginPath();
    drawing.rect(left, 0, width - 6 - left + 2, height - BOTTOM + 2);
    drawing.clip();
    series.forEach((one) => {
      drawing.strokeStyle = color(one.color);
      drawing.fillStyle = color(one.color);
      drawing.lineWidth = 2;
      drawing.lineJoin = "round";
      for (const run of runsOf(points, one)) {
        any = true;
        drawing.setLineDash(one.dash);
        drawing.beginPath();
        run.forEach(([at, value], step) => (step ? drawing.lineTo(x(at), y(value)) : drawing.moveTo(x(at), y(value))));
        drawing.stroke();
        drawing.setLineDash([]);
        if (run.length === 1) drawing.fillRect(x(run[0][0]) - 1.5, y(run[0][1]) - 1.5, 3, 3);
        if (one.filled) {
          drawing.globalAlpha = 0.1;
          drawing.lineTo(x(run[run.length - 1][0]), y(0));
          drawing.lineTo(x(run[0][0]), y(0));
          drawing.fill();
          drawing.globalAlpha = 1;
        }
      }
    });
    drawing.restore();
    if (this.none.hidden !== any) this.none.hidden = any;
    this.drawCursor(drawing, series, points, x, height);
  }

  /** The upper end: grows at once, shrinks when twice too high. */
  scale(series, points) {
    let highest = this.floor;
    for (const point of points) for (const one of series) highest = Math.max(highest, one.value(point) ?? 0);
    const wanted = nice(highest * 1.05);
    if (wanted > this.top || wanted * 2 < this.top) this.top = wanted;
  }

  drawGrid(drawing, x, y, words) {
    const { from, to, width, left } = this.box;
    drawing.lineWidth = 1;
    drawing.strokeStyle = color("line");
    drawing.fillStyle = color("ink-quiet");
    drawing.textAlign = "right";
    drawing.textBaseline = "middle";
    words.forEach((one, place) => {
      const at = Math.round(y((this.top * place) / (words.length - 1))) + 0.5;
      drawing.beginPath();
      drawing.moveTo(left, at);
      drawing.lineTo(width - 6, at);
      drawing.stroke();
      drawing.fillText(one, left - 8, at);
    });
    drawing.textAlign = "center";
    drawing.textBaseline = "top";
    const times = gridTimes(from, to);
    const every = Math.ceil((times.length * 70) / Math.max(width - left, 1));
    const step = times.length > 1 ? times[1] - times[0] : 1;
    for (const at of times) {
      if (Math.round(at / step) % every !== 0 || x(at) < left + 28 || x(at) > width - 34) continue;
      drawing.fillText(clock(at), x(at), y(0) + 5);
    }
  }

  drawCursor(drawing, series, points, x, height) {
    const near = this.cursor === null ? null : nearest(points, this.cursor);
    if (near === null) {
      this.tip.hidden = true;
      return;
    }
    const at = x(near.at_ms);
    drawing.strokeStyle = color("ink-quiet");
    drawing.beginPath();
    drawing.moveTo(Math.round(at) + 0.5, TOP);
    drawing.lineTo(Math.round(at) + 0.5, height - BOTTOM);
    drawing.stroke();
    const words = [clock(near.at_ms), ...series.map((one) => `${one.name} ${this.shown(one.value(near))}`)];
    text(this.tip, words.join("  ·  "));
    this.tip.hidden = false;
    const left = Math.max(0, Math.min(this.plot.clientWidth - this.tip.offsetWidth, at + 10));
    this.tip.style.left = `${left}px`;
  }

  point(x) {
    if (this.box === undefined) return;
    const { from, to, left, right } = this.box;
    this.cursor = from + ((x - left) / (right - left)) * (to - from);
    this.render();
  }

  leave() {
    this.cursor = null;
    this.render();
  }

  onKey(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const points = this.points();
    if (points.length === 0) return;
    const near = this.cursor === null ? points[points.length - 1] : nearest(points, this.cursor);
    const place = points.indexOf(near) + (this.cursor === null ? 0 : steps[event.key]);
    this.cursor = points[Math.max(0, Math.min(points.length - 1, place))].at_ms;
    this.render();
  }
}

/** Stretches without a gap. */
function runsOf(points, one) {
  const runs = [];
  let run = [];
  let last = 0;
  for (const point of points) {
    const value = one.value(point);
    if (value === null || value === undefined || (run.length && point.at_ms - last > GAP_MS)) {
      if (run.length) runs.push(run);
      run = [];
    }
    if (value !== null && value !== undefined) run.push([point.at_ms, value]);
    last = point.at_ms;
  }
  if (run.length) runs.push(run);
  return runs;
}

function nearest(points, at) {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point.at_ms - at) < Math.abs(best.at_ms - at)) best = point;
  return best;
}
