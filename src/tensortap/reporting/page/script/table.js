// The table: one row per layer. Rows are made when they are about to be seen, so that thousands of
// layers cost no more than a screenful.
const CHUNK = 150;
const GRADES = ["very close", "good", "fair", "large"];
const typeOf = (row) => row.type || row.candidate_type;
const rank = (order, word) => (order.includes(word) ? order.indexOf(word) : NaN);
const numbered = (name, title, say, worst, key = name) => ({
  name, title, say, worst, right: true, key: (row) => metric(main(row), key), show: (row) => text(metric(main(row), key)),
});
const judged = (name, title, say, get) => ({
  name, title, say, worst: "ascending", key: (row) => rank(VERDICTS, get(row)), show: (row) => (get(row) ? badge(get(row)) : ""),
});
const worded = (name, title, say, get) => ({
  name, title, say, worst: "ascending", key: (row) => get(row) || null, show: (row) => get(row) || "",
});

const ALL_COLUMNS = [
  { name: "order", title: "#", say: "order of execution", worst: "ascending", right: true, key: (row) => row.at, show: (row) => String(row.at + 1) },
  { ...worded("layer", "layer", "layer", (row) => row.layer), always: true },
  judged("verdict", "verdict", "verdict on the layer", (row) => row.verdict),
  { name: "error", title: "error", say: "relative L2 error", worst: "descending", right: true, key: error, show: (row) => text(error(row)) },
  { name: "ratio", title: "× floor", say: "error as a multiple of the floor", worst: "descending", right: true, key: (row) => value(main(row)?.ratio), show: (row) => text(value(main(row)?.ratio), 3) },
  worded("origin", "origin", "where a divergence was made", (row) => row.origin),
  judged("input", "input", "verdict on the layer's inputs", (row) => row.input),
  worded("nearer", "nearer to truth", "side that is nearer to the truth", (row) => main(row)?.nearer || (defined(value(main(row)?.reference_error)) && "even")),
  { name: "reference_error", title: "ref. off", say: "relative L2 error of the reference against the truth", worst: "descending", right: true, key: (row) => value(main(row)?.reference_error), show: (row) => text(value(main(row)?.reference_error), 3) },
  { name: "candidate_error", title: "cand. off", say: "relative L2 error of the candidate against the truth", worst: "descending", right: true, key: (row) => value(main(row)?.candidate_error), show: (row) => text(value(main(row)?.candidate_error), 3) },
  numbered("mse", "MSE", "mean squared error", "descending"),
  numbered("mae", "MAE", "mean absolute error", "descending"),
  numbered("max_abs", "max abs", "greatest absolute difference", "descending"),
  numbered("cosine", "1 − cos", "one minus the cosine", "descending", "cosine_distance"),
  { ...numbered("correlation", "corr", "Pearson correlation", "ascending"), show: (row) => text(metric(main(row), "correlation"), 6) },
  numbered("sqnr", "SQNR dB", "signal to noise, in decibels", "ascending", "sqnr_db"),
  { name: "grade", title: "grade", say: "the documents' grade of the MSE alone; the verdict goes by what rounding explains", worst: "descending", key: (row) => rank(GRADES, main(row)?.grade), show: (row) => main(row)?.grade || "" },
  { ...worded("type", "type", "type of the layer", typeOf), wrap: true },
  { ...worded("candidate", "candidate layer", "the candidate's layer, where its name differs", (row) => row.candidate), mono: true },
  worded("matched", "matched by", "how the two layers were paired", (row) => row.matched),
  worded("known", "name by", "how the layer's name is known, where it is not the module's own on both sides", (row) => row.known),
  { ...worded("transform", "transform", "what was done to make the shapes equal", (row) => main(row)?.transform), wrap: true },
  { ...worded("note", "note", "what else there is to say", (row) => row.note), wrap: true },
];
const filled = (column) => rows.some((row) => { const key = column.key(row); return key !== null && defined(key); });
const dull = (column) => column.name === "matched" && rows.every((row) => !row.matched || row.matched === "name");
const COLUMNS = ALL_COLUMNS.filter((column) => column.always || (filled(column) && !dull(column)));

const state = { sort: "order", direction: "ascending", words: [], verdicts: new Set(), view: rows.map((_, at) => at), from: 0, to: 0 };
const made = new Map(); // index -> the row's element, made once
const opened = new Map(); // index -> the detail's element

function before(a, b, column, direction) {
  const left = column.key(rows[a]), right = column.key(rows[b]);
  const lost = left === null || !defined(left), found = !(right === null || !defined(right));
  if (lost || !found) return lost === !found ? a - b : lost ? 1 : -1; // undefined last, whichever way
  const sign = direction === "ascending" ? 1 : -1;
  if (typeof left === "string") return sign * left.localeCompare(right, "en", { numeric: true }) || a - b;
  return left === right ? a - b : left < right ? -sign : sign;
}

function cell(row, column, at) {
  if (column.name === "layer") {
    const button = el("button", { type: "button", "aria-expanded": "false", "aria-controls": `detail-${at}`, "data-open": at }, el("span", null, ...dotted(row.layer)));
    return el("th", { scope: "row", class: "name" }, button);
  }
  const kind = [column.right && "n", column.wrap && "wrap", column.mono && "name other"].filter(Boolean).join(" ");
  return el("td", { class: kind || null, "data-column": column.name }, ...(column.mono ? dotted(column.show(row)) : [column.show(row)]));
}

function rowOf(at) {
  if (!made.has(at)) {
    const row = rows[at];
    const first = at === data.first ? " first" : "";
    made.set(at, el("tr", { class: "row" + first, "data-row": at }, ...COLUMNS.map((column) => cell(row, column, at))));
  }
  return made.get(at);
}

// What is drawn is state.view from state.from to state.to; it grows at either end.
function piece(from, to) {
  const fragment = document.createDocumentFragment();
  for (const at of state.view.slice(from, to)) {
    fragment.append(rowOf(at));
    if (opened.has(at)) fragment.append(opened.get(at));
  }
  $("more").hidden = state.to >= state.view.length;
  $("earlier").hidden = state.from <= 0;
  return fragment;
}

function drawFrom(from) {
  [state.from, state.to] = [from, Math.min(from + CHUNK, state.view.length)];
  $("body").replaceChildren(piece(state.from, state.to));
}

function later(count = CHUNK) {
  const from = state.to;
  state.to = Math.min(from + count, state.view.length);
  $("body").append(piece(from, state.to));
}

function earlier(count = CHUNK) {
  const to = state.from, scroller = $("scroller"), below = scroller.scrollHeight - scroller.scrollTop;
  state.from = Math.max(to - count, 0);
  $("body").prepend(piece(state.from, to));
  scroller.scrollTop = scroller.scrollHeight - below; // what was in sight stays there
}

function passes(row) {
  if (state.verdicts.size && !state.verdicts.has(row.verdict)) return false;
  if (!state.words.length) return true;
  row.text ??= [row.layer, row.candidate, row.type, row.candidate_type, row.verdict, row.origin, row.matched, row.known, row.note, main(row)?.grade, main(row)?.transform]
    .filter(Boolean).join("\n").toLowerCase();
  return state.words.every((word) => row.text.includes(word));
}

function refresh() {
  const column = COLUMNS.find((each) => each.name === state.sort);
  const passing = rows.map((row, at) => at).filter((at) => passes(rows[at]));
  state.view = column.name === "order" && state.direction === "ascending" ? passing : passing.sort((a, b) => before(a, b, column, state.direction));
  drawFrom(0);
  $("scroller").scrollTop = 0;
  $("nothing").hidden = state.view.length > 0;
  const all = whole(rows.length) + (rows.length === 1 ? " layer" : " layers");
  $("shown").textContent = state.view.length === rows.length ? all : whole(state.view.length) + " of " + all;
  dim(new Set(state.view));
}

function sortBy(column) {
  const other = { ascending: "descending", descending: "ascending" };
  state.direction = state.sort === column.name ? other[state.direction] : column.worst;
  state.sort = column.name;
  for (const head of $("head").children) {
    head.setAttribute("aria-sort", head.dataset.column === column.name ? state.direction : "none");
  }
  refresh();
}

function toggle(at, open = !opened.has(at)) {
  const row = rowOf(at);
  if (open && !opened.has(at)) {
    const detail = el("tr", { id: `detail-${at}`, "data-detail": at }, el("td", { class: "detail", colspan: COLUMNS.length }, detailOf(rows[at])));
    opened.set(at, detail);
    if (row.isConnected) row.after(detail);
  } else if (!open && opened.has(at)) {
    opened.get(at).remove();
    opened.delete(at);
  }
  row.classList.toggle("open", open);
  row.querySelector("button").setAttribute("aria-expanded", String(open));
}

// Scroll the table, not the page, until a layer is below the head with so many pixels between.
function scrollToRow(at, room) {
  if (!rowOf(at).isConnected) drawFrom(Math.max(state.view.indexOf(at) - 20, 0));
  const scroller = $("scroller"), row = rowOf(at);
  scroller.scrollTop += row.getBoundingClientRect().top - scroller.getBoundingClientRect().top - $("head").offsetHeight - room;
}

// Bring a layer into view with its detail open, whatever is filtered away.
function reveal(at) {
  if (!passes(rows[at])) clear();
  toggle(at, true);
  $("layers").scrollIntoView({ block: "nearest" });
  scrollToRow(at, 4);
  rowOf(at).querySelector("button").focus({ preventScroll: true });
}

// A table that is longer than its window opens at the first divergence, a few rows before it.
function openAtFirst() {
  const scroller = $("scroller"), first = data.first;
  if (!(first >= 0)) return;
  const drawn = rowOf(first).isConnected;
  const bottom = drawn && rowOf(first).getBoundingClientRect().bottom - scroller.getBoundingClientRect().top;
  if (!drawn || bottom > scroller.clientHeight) scrollToRow(first, 4 * rowOf(state.view[0]).offsetHeight);
}

function clear() {
  state.words = [];
  state.verdicts.clear();
  $("filter").value = "";
  for (const chip of $("chips").children) chip.setAttribute("aria-pressed", "false");
  refresh();
}

function buildTable() {
  const widest = (name) => rows.reduce((most, row) => Math.max(most, (row[name] || "").length), 8);
  $("scroller").style.setProperty("--name", Math.min(widest("layer") * 7.3 + 34, 400) + "px");
  $("scroller").style.setProperty("--other", Math.min(widest("candidate") * 7.3 + 20, 360) + "px");
  for (const column of COLUMNS) {
    const button = el("button", { type: "button", title: column.say, onclick: () => sortBy(column) }, column.title);
    const kind = [column.right && "n", column.name === "layer" && "name"].filter(Boolean).join(" ");
    $("head").append(el("th", { scope: "col", class: kind || null, "data-column": column.name, "aria-sort": column.name === "order" ? "ascending" : "none" }, button));
  }
  $("body").addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-row]");
    if (!row || (!event.target.closest("button") && String(getSelection()))) return;
    toggle(Number(row.dataset.row));
  });
  const watch = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      if (!isIntersecting || target.hidden) continue;
      (target.id === "more" ? later : earlier)();
      watch.unobserve(target); // and look again: a tall window may want more at once
      watch.observe(target);
    }
  }, { root: $("scroller"), rootMargin: "800px" });
  watch.observe($("more"));
  watch.observe($("earlier"));
  addEventListener("beforeprint", () => { earlier(rows.length); later(rows.length); });
}
