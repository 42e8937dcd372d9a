// Error against depth: a log axis, a band below it for what has no place on one.
const chart = { places: [], marks: [], focus: 0 };
const SMALL = { left: 58, right: 18, top: 26, bottom: 30, band: 20 };

function label(row) {
  const size = error(row), ratio = value(main(row)?.ratio);
  const words = [row.verdict, defined(size) ? `error ${text(size)}` : "no error to measure"];
  if (defined(ratio)) words.push(`${text(ratio, 3)} × floor`);
  if (row.origin) words.push(row.origin === "unknown" ? "unknown whether made here" : row.origin);
  return words.join(", ");
}

// The word stands where the floor is farthest from the errors.
function floorLabel(floors, errors, x, y, foot) {
  let best = 0, most = -Infinity, above = false;
  floors.forEach((floor, at) => {
    if (!placed(floor) || !placed(errors[at])) return;
    const gap = y(floor) - y(errors[at]), crowded = Math.min(at, rows.length - 1 - at, Math.abs(at - (data.first ?? -rows.length))) < rows.length / 25;
    const room = Math.abs(gap) - (crowded ? 12 : 0);
    if (room > most) [best, most, above] = [at, room, gap < 0 || y(floor) + 14 > foot];
  });
  if (most < 22) return null; // too close to tell; the line below the chart says it
  const anchor = best < rows.length / 8 ? "start" : best > (rows.length * 7) / 8 ? "end" : "middle";
  return draw("text", { class: "label", x: x(best), y: y(floors[best]) + (above ? -6 : 14), "text-anchor": anchor }, "floor");
}

function drawChart() {
  const errors = rows.map(error), floors = rows.map((row) => value(main(row)?.floor));
  const ticks = ticksOf([...errors, ...floors]), range = ticks && [ticks[0], ticks[ticks.length - 1]];
  const svg = $("drawing");
  svg.classList.toggle("flat", !range);
  const width = svg.clientWidth || 900, height = svg.clientHeight || 290;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const bands = [["identical", errors.some((number) => number === 0), "0"], ["none", errors.some((number) => number !== 0 && !placed(number)), "none"]].filter((band) => band[1]);
  const { left, right, top, bottom, band } = SMALL;
  const foot = height - bottom - (bands.length ? bands.length * band + 8 : 0); // where the log axis ends
  const x = (at) => left + 8 + ((width - left - right - 16) * (rows.length > 1 ? at / (rows.length - 1) : 0.5));
  const y = range && ((number) => foot - ((Math.log10(number) - range[0]) / (range[1] - range[0])) * (foot - top));
  const axis = draw("g", { class: "axis", "aria-hidden": "true" });
  for (const tick of ticks || []) {
    const at = Math.round(y(10 ** tick)) + 0.5;
    axis.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }),
      draw("text", { x: left - 8, y: at + 4, "text-anchor": "end" }, tickText(tick)));
  }
  const bandAt = {};
  bands.forEach(([name, , title], at) => {
    bandAt[name] = foot + 8 + at * band + band / 2;
    axis.append(draw("rect", { class: "band", x: left, y: foot + 9 + at * band, width: width - left - right, height: band - 2 }),
      draw("text", { x: left - 8, y: bandAt[name] + 4, "text-anchor": "end" }, title));
  });
  const every = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000].find((step) => (rows.length - 1) / step <= Math.max(width / 90, 2)) || 20000;
  for (let at = every - 1; at < rows.length; at += every) {
    axis.append(draw("text", { x: x(at), y: height - bottom + 18, "text-anchor": "middle" }, String(at + 1)));
  }
  chart.places = rows.map((row, at) => [x(at), placed(errors[at]) ? y(errors[at]) : bandAt[errors[at] === 0 ? "identical" : "none"]]);

  const lines = draw("g", { "aria-hidden": "true" });
  let trail = "", floor = "", end = null;
  rows.forEach((row, at) => {
    if (placed(errors[at])) trail += `${trail ? "L" : "M"}${x(at).toFixed(1)} ${y(errors[at]).toFixed(1)}`;
    if (placed(floors[at])) {
      floor += `${end === at - 1 ? "L" : "M"}${x(at).toFixed(1)} ${y(floors[at]).toFixed(1)}`;
      end = at;
    }
  });
  if (trail) lines.append(draw("path", { class: "trail", d: trail }));
  if (floor) {
    lines.append(draw("path", { class: "floor", d: floor }));
    fill(lines, null, [floorLabel(floors, errors, x, y, foot)]);
  }
  if (data.first !== null) {
    const [at] = chart.places[data.first], wide = width < 560 ? 26 : 64, name = rows[data.first].layer;
    const short = name.length > wide ? "…" + name.slice(1 - wide) : name;
    const anchor = at < width / 3 ? "start" : at > (width * 2) / 3 ? "end" : "middle";
    lines.append(draw("line", { class: "first", x1: at, x2: at, y1: top - 8, y2: height - bottom }),
      draw("text", { class: "label bad", x: at, y: top - 12, "text-anchor": anchor }, short));
  }

  const dense = rows.length > width / 6, points = draw("g", { class: "points" });
  chart.marks = rows.map((row, at) => {
    const [px, py] = chart.places[at], scale = dense && at !== data.first ? " scale(.7)" : "";
    return draw("path", { class: "mark " + row.verdict, d: SHAPES[row.verdict], transform: `translate(${px.toFixed(1)} ${py.toFixed(1)})${scale}`,
      role: "button", tabindex: at === chart.focus ? "0" : "-1", "aria-label": `${row.layer}: ${label(row)}`, "data-point": at });
  });
  const worstLast = rows.map((_, at) => at).sort((a, b) => VERDICTS.indexOf(rows[b].verdict) - VERDICTS.indexOf(rows[a].verdict) || a - b);
  points.append(...worstLast.map((at) => chart.marks[at]));
  svg.replaceChildren(axis, lines, points);
  dim(new Set(state.view));
}

function dim(shown) {
  chart.marks.forEach((point, at) => point.classList.toggle("out", !shown.has(at)));
}

function nearest(event) {
  const box = $("drawing").getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  let best = null, least = 28 * 28;
  chart.places.forEach(([x, y], at) => {
    if (chart.marks[at].classList.contains("out")) return;
    const far = (x - px) ** 2 + (y - py) ** 2;
    if (far < least) [best, least] = [at, far];
  });
  return best;
}

function light(at) {
  for (const point of $("drawing").querySelectorAll(".lit")) point.classList.remove("lit");
  $("tip").hidden = at === null;
  if (at === null) return;
  chart.marks[at].classList.add("lit");
  $("tip").replaceChildren(el("b", null, rows[at].layer), label(rows[at]));
  const [x, y] = chart.places[at], tip = $("tip"), room = $("plot").clientWidth;
  tip.style.left = Math.max(4, Math.min(x - tip.offsetWidth / 2, room - tip.offsetWidth - 4)) + "px";
  tip.style.top = (y - tip.offsetHeight - 12 > 0 ? y - tip.offsetHeight - 12 : y + 14) + "px";
}

function buildChart() {
  const svg = $("drawing"), step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
  chart.focus = data.first ?? 0;
  const open = (event) => { const at = nearest(event); if (at !== null) reveal(at); };
  svg.addEventListener("pointermove", (event) => light(nearest(event)));
  svg.addEventListener("pointerleave", () => light(null));
  svg.addEventListener("click", open);
  svg.addEventListener("focusin", (event) => { if (event.target.dataset.point) light(Number(event.target.dataset.point)); });
  svg.addEventListener("focusout", () => light(null));
  svg.addEventListener("keydown", (event) => {
    const at = event.target.dataset.point === undefined ? null : Number(event.target.dataset.point);
    if (at === null) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); reveal(at); }
    if (!(event.key in step)) return;
    event.preventDefault();
    chart.marks[at].setAttribute("tabindex", "-1");
    chart.focus = Math.max(0, Math.min(rows.length - 1, at + step[event.key]));
    chart.marks[chart.focus].setAttribute("tabindex", "0");
    chart.marks[chart.focus].focus();
  });
  const words = [data.floor_words];
  if (!rows.some((row) => placed(error(row)))) {
    const known = rows.some((row) => error(row) === 0);
    words.push(known ? "No layer has a relative error above zero." : "No relative error is known: it needs the tensors of both sides.");
  }
  if (rows.some((row) => !Number.isFinite(error(row)))) words.push("Layers without a relative error stand in the band “none”.");
  $("key").textContent = words.join(" ");
  let last = 0;
  new ResizeObserver(() => { if (svg.clientWidth !== last) { last = svg.clientWidth; drawChart(); } }).observe($("plot"));
}
