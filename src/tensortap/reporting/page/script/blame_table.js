// The table stands in the page without us; we make it sortable, and let it be filtered.
const lines = [...document.querySelectorAll("tr.row")];
const table = document.querySelector("table.blamed");
const state = { sort: "order", direction: "ascending", words: [] };
const keys = { order: (row) => row.at, layer: (row) => row.layer, type: (row) => row.type || null, note: (row) => row.note || null };
const key = (name) => keys[name] || ((row) => value(row[name]));

function before(a, b, get) {
  const left = get(rows[a]), right = get(rows[b]), lost = left === null || !defined(left), gone = right === null || !defined(right);
  if (lost || gone) return lost === gone ? a - b : lost ? 1 : -1; // undefined last, whichever way
  const sign = state.direction === "ascending" ? 1 : -1;
  if (typeof left === "string") return sign * left.localeCompare(right, "en", { numeric: true }) || a - b;
  return left === right ? a - b : left < right ? -sign : sign;
}

function refresh() {
  const order = rows.map((_, at) => at).sort((a, b) => before(a, b, key(state.sort)));
  table.tBodies[0].append(...order.map((at) => lines[at]));
  table.classList.toggle("flat", state.sort !== "order" || state.words.length > 0); // indented in order of execution alone
  let count = 0;
  rows.forEach((row, at) => {
    row.text ??= [row.layer, row.type, row.note].filter(Boolean).join("\n").toLowerCase();
    lines[at].hidden = !state.words.every((word) => row.text.includes(word));
    count += !lines[at].hidden;
  });
  const all = whole(rows.length) + (rows.length === 1 ? " row" : " rows");
  $("shown").textContent = count === rows.length ? all : whole(count) + " of " + all;
  $("nothing").hidden = count > 0;
}

function sortBy(name) {
  const other = { ascending: "descending", descending: "ascending" }, first = name in keys ? "ascending" : "descending";
  state.direction = state.sort === name ? other[state.direction] : first;
  state.sort = name;
  for (const head of table.tHead.rows[0].cells) head.setAttribute("aria-sort", head.dataset.column === name ? state.direction : "none");
  refresh();
}

function clear() {
  state.words = [];
  $("filter").value = "";
  refresh();
}

// Bring a layer's row into view, whatever is filtered away.
function reveal(at) {
  if (lines[at].hidden) clear();
  const scroller = $("scroller"), line = lines[at];
  $("layers").scrollIntoView({ block: "nearest" });
  scroller.scrollTop += line.getBoundingClientRect().top - scroller.getBoundingClientRect().top - table.tHead.offsetHeight - 4;
  line.setAttribute("tabindex", "-1");
  line.focus({ preventScroll: true });
}

function buildTable() {
  for (const head of table.tHead.rows[0].cells) {
    const name = head.dataset.column, button = el("button", { type: "button", title: head.title, onclick: () => sortBy(name) }, head.textContent);
    head.removeAttribute("title");
    head.classList.remove("static");
    head.setAttribute("aria-sort", name === "order" ? "ascending" : "none");
    head.replaceChildren(button);
  }
  $("filter").addEventListener("input", () => {
    state.words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    refresh();
  });
  $("clear").addEventListener("click", () => { clear(); $("filter").focus(); });
}
