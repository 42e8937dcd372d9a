// Put it together.
if (rows.length) {
  $("tools").hidden = false;
  buildTable();
  refresh();
  if (slots.length) {
    $("charts").hidden = false;
    $("shares").hidden = !known.length;
    buildCharts();
    drawShares();
    drawErrors();
  }
}
