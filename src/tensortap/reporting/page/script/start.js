// Put it together: chips, filter, chart, table.
function buildTools() {
  for (const verdict of [...VERDICTS].reverse()) {
    const count = rows.filter((row) => row.verdict === verdict).length;
    if (!count) continue;
    const press = (event) => {
      const on = !state.verdicts.delete(verdict);
      if (on) state.verdicts.add(verdict);
      event.currentTarget.setAttribute("aria-pressed", String(on));
      refresh();
    };
    $("chips").append(el("button", { type: "button", class: "chip " + verdict, "aria-pressed": "false", "data-verdict": verdict, onclick: press }, mark(verdict), el("b", null, whole(count)), verdict));
  }
  $("filter").addEventListener("input", () => {
    state.words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    refresh();
  });
  $("clear").addEventListener("click", () => { clear(); $("filter").focus(); });
}

if (rows.length) {
  for (const id of ["tools", "chart", "layers"]) $(id).hidden = false;
  buildTools();
  buildTable();
  buildChart();
  drawChart();
  refresh();
  openAtFirst();
}
