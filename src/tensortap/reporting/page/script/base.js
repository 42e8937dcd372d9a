// What all parts share: the data, elements made from text alone, numbers as people read them.
// Nothing from the data ever becomes markup: it enters the page as text or as an attribute.
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const rows = data.layers.map((row, at) => ({ parts: [], ...row, at }));
const SVG = $("drawing").namespaceURI;
const VERDICTS = ["diverged", "incomparable", "missing", "within", "identical"]; // from bad to good
const SHAPES = { // around (0, 0); told apart by form as well as by colour
  identical: "M3.4 0A3.4 3.4 0 1 1-3.4 0A3.4 3.4 0 1 1 3.4 0Z",
  within: "M3.4 0A3.4 3.4 0 1 1-3.4 0A3.4 3.4 0 1 1 3.4 0Z",
  missing: "M-3.2-3.2L3.2 3.2M3.2-3.2L-3.2 3.2",
  incomparable: "M-3.2-3.2H3.2V3.2H-3.2Z",
  diverged: "M0-5L5 0L0 5L-5 0Z",
};

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function mark(verdict) {
  const shape = draw("path", { class: "mark " + verdict, d: SHAPES[verdict] });
  return draw("svg", { class: "mark", width: 12, height: 12, viewBox: "-6 -6 12 12", "aria-hidden": "true" }, shape);
}
const badge = (verdict) => el("span", { class: "verdict " + verdict }, mark(verdict), verdict);

// A number from the data: null is undefined, infinities are words.
function value(raw) {
  if (raw === null || raw === undefined) return NaN;
  if (raw === "inf") return Infinity;
  return raw === "-inf" ? -Infinity : raw;
}
const defined = (number) => !Number.isNaN(number);

function text(number, digits = 4) {
  if (!defined(number)) return "-";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e-4 && size < 1e6) {
    if (size >= 10 ** digits) return number.toFixed(0);
    const plain = number.toPrecision(digits);
    return plain.includes("e") ? number.toFixed(0) : plain.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  }
  return number.toExponential(Math.max(digits - 2, 1)).replace(/e([+-])(\d)$/, "e$10$2");
}
const whole = (number) => (defined(number) ? Math.round(number).toLocaleString("en-US") : "-");
// A dotted name that may break behind its dots.
function dotted(name) {
  return name.split(/(?<=\.)/).flatMap((part, at) => (at ? [el("wbr"), part] : [part]));
}
const shape = (extents) => "[" + (extents || []).join(", ") + "]";

// The columns of a part's metrics and of a side's statistics stand once, at the top of the data.
const METRIC = Object.fromEntries(data.metrics.map((name, at) => [name, at]));
const STATISTIC = Object.fromEntries(data.statistics.map((name, at) => [name, at]));
const metric = (part, name) => (part && part.metrics ? value(part.metrics[METRIC[name]]) : NaN);
const statistic = (side, name) => (side ? value(side[STATISTIC[name]]) : NaN);
const main = (row) => (row.main === undefined ? null : row.parts[row.main]);
const error = (row) => (main(row) ? value(main(row).error) : NaN);
