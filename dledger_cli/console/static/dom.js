// Making and changing elements. Text only ever becomes text: nothing here (or anywhere) parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** An element with attributes (`on…` are listeners, false and null are left out) and children (strings become text). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Set an element's text, touching the document only if it differs (screen readers and layout like that). */
export function text(element, value) {
  const string = String(value);
  if (element.textContent !== string) element.textContent = string;
}

export function attribute(element, name, value) {
  const string = String(value);
  if (element.getAttribute(name) !== string) element.setAttribute(name, string);
}

export function classes(element, value) {
  if (element.className !== value) element.className = value;
}

/** One of the shapes that index.html defines. */
export function shape(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", `shape ${name}`);
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#shape-${name}`);
  svg.append(use);
  return svg;
}

export function reshape(svg, name) {
  attribute(svg, "class", `shape ${name}`);
  attribute(svg.firstChild, "href", `#shape-${name}`);
}

/** A short line in a series' colour and dashes, for legends. */
export function sample(dash) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 22 8");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", "M0 4h22");
  line.setAttribute("stroke", "currentColor");
  line.setAttribute("stroke-width", "2.5");
  line.setAttribute("stroke-dasharray", dash.join(" "));
  svg.append(line);
  return svg;
}

/** Colours as the page has them now: canvases cannot use CSS variables. */
const resolved = new Map();
export function color(name) {
  let found = resolved.get(name);
  if (found === undefined) {
    const probe = h("span", { hidden: true });
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    found = getComputedStyle(probe).color;
    probe.remove();
    resolved.set(name, found);
  }
  return found;
}
export function forgetColors() {
  resolved.clear();
}

/** A canvas' context, sized to its box in device pixels; null while it has no box. */
export function context(canvas) {
  const box = canvas.getBoundingClientRect();
  if (box.width < 2 || box.height < 2) return null;
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const width = Math.round(box.width * ratio);
  const height = Math.round(box.height * ratio);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const drawing = canvas.getContext("2d");
  drawing.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawing.clearRect(0, 0, box.width, box.height);
  return { drawing, width: box.width, height: box.height };
}
