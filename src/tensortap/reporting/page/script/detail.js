// One layer in full: why, hints, causes, and each port and leaf with every number there is.
const PERCENTS = [50, 90, 95, 99];
const moment = (when) => `epoch ${when[0]}, batch ${when[1]}, call ${when[2]}`;

function pairs(title, entries) {
  const list = el("dl", { class: "metrics" });
  for (const [name, shown] of entries) list.append(el("dt", null, name), el("dd", null, shown));
  return el("div", null, el("h4", null, title), list);
}

function metricCards(part) {
  const show = (name, digits = 5) => text(metric(part, name), digits);
  const count = metric(part, "count"), mismatched = metric(part, "mismatched");
  const share = count ? ` (${text((100 * mismatched) / count, 3)} %)` : "";
  const greatest = part.at ? `(${part.at.join(", ")})` : "";
  const size = [
    ["MSE", show("mse")], ["RMSE", show("rmse")], ["MAE", show("mae")], ["max abs", show("max_abs")], ["at index", greatest || "-"],
    ["reference there", part.pair ? text(value(part.pair[0]), 6) : "-"], ["candidate there", part.pair ? text(value(part.pair[1]), 6) : "-"],
    ["mean", show("mean")], ["std", show("std")], ["grade by MSE", part.grade || "-"],
  ];
  const relative = [
    ["relative L2 error", text(value(part.error), 5)],
    ["floor", text(value(part.floor), 5)], ["error × floor", text(value(part.ratio), 4)],
    ["relative MSE", show("relative_mse")], ["relative MAE", show("relative_mae")],
    ["max relative", show("max_relative")], ["mean relative", show("mean_relative")], ["SQNR", show("sqnr_db") + (defined(metric(part, "sqnr_db")) ? " dB" : "")],
  ];
  const likeness = [
    ["cosine", show("cosine", 8)], ["1 − cosine", show("cosine_distance")], ["correlation", show("correlation", 8)],
    ["grade by correlation", part.correlation_grade || "-"], ["rel", show("rel")],
    ["good across devices", part.device_good === undefined ? "-" : part.device_good ? "yes" : "no"],
  ];
  const limit = (raw) => text(value(raw), 3).replace(".0e", "e");
  const elements = [
    ["pairs", whole(count)], ["both finite", whole(metric(part, "finite"))],
    ["both the same NaN or Inf", whole(metric(part, "agreeing"))], ["disagreeing in kind", whole(metric(part, "disagreeing"))],
    ["mismatched", whole(mismatched) + share], ["rtol, atol", part.tolerance.map(limit).join(", ")], ["identical bits", part.identical ? "yes" : "no"],
  ];
  return [pairs("Difference, candidate − reference", size), pairs("Relative to the reference", relative), pairs("Likeness", likeness), pairs("Elements", elements)];
}

function statisticsCard(part) {
  const names = [["count", "count"], ["nan", "NaN"], ["posinf", "+Inf"], ["neginf", "−Inf"], ["zeros", "zeros"], ["subnormal", "subnormal"], ["saturated", "saturated"],
    ["mean", "mean"], ["std", "std"], ["min", "min"], ["max", "max"], ["absmax", "abs max"], ["l2", "L2"], ["rms", "RMS"]];
  const head = el("tr", null, el("th", { scope: "col" }, el("span", { class: "unseen" }, "statistic")), el("th", { scope: "col", class: "n" }, "reference"), el("th", { scope: "col", class: "n" }, "candidate"));
  const body = names.map(([name, title], at) => {
    const show = at < 7 ? whole : (number) => text(number, 6);
    const sides = [show(statistic(part.reference, name)), show(statistic(part.candidate, name))];
    const kind = "n" + (sides[0] !== sides[1] && at < 7 ? " differs" : "");
    return el("tr", null, el("th", { scope: "row" }, title), ...sides.map((side) => el("td", { class: kind }, side)));
  });
  return el("div", null, el("h4", null, "Both sides"), el("table", { class: "stats" }, el("thead", null, head), el("tbody", null, ...body)));
}

function firstValues(part) {
  const line = (name, values) => [el("dt", null, name), el("dd", null, values.length ? values.map((one) => text(value(one), 6)).join("  ") : "-")];
  return el("div", { class: "wide" }, el("h4", null, "First values"), el("dl", { class: "metrics values" }, ...line("reference", part.first[0]), ...line("candidate", part.first[1])));
}

function percentilesCard(part) {
  if (!part.percentiles) return pairs("Percentiles of |difference|", [["", "not computed"]]);
  const entries = PERCENTS.map((percent, at) => [percent + " %", text(value(part.percentiles[at]), 5)]);
  return pairs("Percentiles of |difference|" + (part.exact ? "" : ", to within a bucket"), entries);
}

// Bars over [0, 1] of the width; the caller says what stands under them.
function bars(counts, kind, width, height) {
  const most = Math.max(...counts, 1), step = width / counts.length;
  return counts.map((count, at) => {
    const tall = count ? Math.max((count / most) * height, 1) : 0;
    return draw("rect", { class: kind, x: (at * step).toFixed(2), width: Math.max(step - 0.6, 0.6).toFixed(2), y: (height - tall).toFixed(2), height: tall.toFixed(2) });
  });
}

function under(labels, width, at) {
  return labels.map(([share, label]) =>
    draw("text", { class: "label", x: share * width, y: at, "text-anchor": share < 0.08 ? "start" : share > 0.92 ? "end" : "middle" }, label));
}

function picture(title, note, label, parts) {
  const image = draw("svg", { viewBox: "0 0 300 124", role: "img", "aria-label": label }, ...parts);
  return el("figure", null, el("h4", null, title), image, el("figcaption", null, ...note));
}

function differenceHistogram(part) {
  const found = part.histogram;
  if (!found || !(found.counts.length || found.zeros)) {
    return el("figure", null, el("h4", null, "Distribution of |difference|"), el("figcaption", null, "not computed"));
  }
  const total = found.zeros + found.counts.reduce((sum, count) => sum + count, 0);
  const columns = found.zeros ? [found.zeros, 0, ...found.counts] : found.counts;
  const shown = bars(columns, "bar", 300, 104);
  const last = found.low + found.counts.length, step = 1 / columns.length, skip = columns.length - found.counts.length;
  const labels = [];
  if (found.zeros) labels.push([step / 2, "0"]);
  if (found.counts.length) {
    const each = Math.max(1, Math.ceil(found.counts.length / 4));
    for (let power = found.low; power <= last; power += each) labels.push([(skip + power - found.low) * step, text(2 ** power, 3)]);
  }
  const say = `${whole(total)} values of the absolute difference in steps of a factor of two` + (found.zeros ? `; ${whole(found.zeros)} are zero` : "");
  return picture("Distribution of |difference|", [say + (found.sampled ? "; counted on a sample" : "")], say, [...shown, draw("line", { class: "grid", x1: 0, x2: 300, y1: 104.5, y2: 104.5 }), ...under(labels, 300, 118)]);
}

function sidesHistogram(part) {
  const found = part.bars;
  if (!found) return el("figure", null, el("h4", null, "Distribution of both sides"), el("figcaption", null, "not computed: it needs recordings with histograms"));
  const most = Math.max(...found.reference, ...found.candidate, 1), step = 300 / found.reference.length, tall = (count) => (104 - (count / most) * 100).toFixed(2);
  const outline = (counts) => "M0 104" + counts.map((count, at) => `V${tall(count)}H${((at + 1) * step).toFixed(2)}`).join("") + "V104";
  const labels = [[0, text(found.low, 3)], [1, text(found.high, 3)]];
  if (found.low < 0 && found.high > 0) labels.push([-found.low / (found.high - found.low), "0"]);
  const note = [el("span", { class: "swatch r" }), "reference ", el("span", { class: "swatch c" }), "candidate"];
  if (found.beyond) note.push(`; ${whole(found.beyond)} values lie beyond`);
  return picture("Distribution of both sides", note, "Values of the reference and of the candidate", [
    draw("path", { class: "side-r", d: outline(found.reference) }), draw("path", { class: "side-c", d: outline(found.candidate) }),
    draw("line", { class: "grid", x1: 0, x2: 300, y1: 104.5, y2: 104.5 }), ...under(labels, 300, 118)]);
}

function partOf(row, part, open, told) {
  const name = part.port + (part.leaf || "");
  const same = (one, other) => (!other || one === other ? one : `${one} against ${other}`);
  const facts = [same(shape(part.shape), part.candidate_shape && shape(part.candidate_shape)), same(part.dtype, part.candidate_dtype), part.transform,
    part.moments > 1 && `${whole(part.moments)} moments`, part.worst && part.moments > 1 && `worst at ${moment(part.worst)}`, defined(value(part.reference_error)) && `nearer to the truth: ${part.nearer || "neither"} (reference ${text(value(part.reference_error), 3)} off, candidate ${text(value(part.candidate_error), 3)})`];
  const title = [el("h3", null, name), badge(part.verdict), el("span", { class: "facts" }, facts.filter(Boolean).join(" · "))];
  if (!open && defined(value(part.error))) title.push(el("span", { class: "facts" }, "error " + text(value(part.error))));
  const box = el("details", { class: "part", "data-part": name, open }, el("summary", null, ...title));
  const unfold = () => {
    if (box.querySelector(".cards")) return;
    const cards = el("div", { class: "cards" });
    if (!told && part.why) cards.append(el("p", { class: "why wide" }, part.why));
    const sides = part.reference || part.candidate;
    const shown = [
      ...(part.metrics ? [...metricCards(part), percentilesCard(part), differenceHistogram(part)] : []),
      ...(sides ? [statisticsCard(part), sidesHistogram(part), firstValues(part)] : []),
    ];
    cards.append(...shown);
    if (!cards.children.length) cards.append(el("p", { class: "soft wide" }, "There are no numbers for this part."));
    box.append(cards);
  };
  if (open) unfold();
  else box.addEventListener("toggle", unfold);
  return box;
}

function detailOf(row) {
  const inside = el("div", { class: "inside" });
  const why = main(row)?.why || row.note;
  if (why) inside.append(el("p", { class: "why" }, why));
  if (row.note && row.note !== why) inside.append(el("p", { class: "why soft" }, row.note));
  const hints = [...new Set(row.parts.flatMap((part) => part.hints || []))];
  if (hints.length) inside.append(el("ul", { class: "hints" }, ...hints.map((hint) => el("li", null, hint))));
  if (row.causes) inside.append(el("ul", { class: "causes", "aria-label": "What kind of error it is" }, ...row.causes.map((cause) => el("li", null, cause))));
  const facts = [typeOf(row) && "type " + typeOf(row) + (row.type && row.candidate_type && row.candidate_type !== row.type ? ` against ${row.candidate_type}` : ""),
    row.candidate && `paired with ${row.candidate}`, row.matched && `matched by ${row.matched}`, row.known_words];
  if (facts.some(Boolean)) inside.append(el("p", { class: "soft" }, facts.filter(Boolean).join(" · ")));
  if (!row.parts.length) inside.append(el("p", { class: "soft" }, "Nothing of this layer could be compared."));
  row.parts.forEach((part, at) => inside.append(partOf(row, part, at === row.main, at === row.main && part.why === why)));
  return inside;
}
