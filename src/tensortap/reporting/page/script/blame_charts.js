// Two charts over the same layers: who makes the final error, and what is made or handed on.
const LEFT = 58, RIGHT = 18, TOP = 26, BOTTOM = 30, BAND = 20;
const slots = rows.filter((row) => !row.depth);
const charts = { focus: Math.max(0, slots.findIndex((row) => row.path)), marks: [] };
const share = (row) => value(row.share);
const percent = (number) => (defined(number) ? (Math.abs(number) >= 10 ? (number < 0 ? "<−" : ">") + "1000" : text(100 * number, 3)) + " %" : "-");

// From where to where shares are drawn: nearer where all are small, and beyond 100 % up to a point.
const known = slots.map(share).filter(defined), largest = known.reduce((a, b) => Math.max(a, b), 0);
const HIGH = [0.1, 0.2, 0.4, 1, 1.25].find((top) => largest <= top) || 1.5;
const LOW = Math.max(-HIGH / 2, known.reduce((a, b) => Math.min(a, b), 0)), STEP = HIGH > 0.4 ? 0.25 : HIGH / 4;

function words(row) {
  const said = [`share ${percent(share(row))}`];
  for (const [name, title] of [["made", "made here"], ["accumulated", "accumulated"], ["handed", "handed"]]) {
    if (defined(value(row[name]))) said.push(`${title} ${text(value(row[name]), 3)}`);
  }
  if (defined(value(row.amplification))) said.push(`amplification ${text(value(row.amplification), 3)} ×`);
  return said.join(", ");
}

// Whole names where there is room for all, else what tells them apart, as many as fit.
function namesOf(wide) {
  const parts = slots.map((row) => row.layer.split(".")), least = parts.reduce((few, each) => Math.min(few, each.length), Infinity);
  let same = 0;
  while (same < least - 1 && parts.every((each) => each[same] === parts[0][same])) same += 1;
  const full = slots.map((row) => row.layer), brief = parts.map((each) => each.slice(same).join("."));
  const fits = (names) => names.every((name) => room(name) <= wide);
  return fits(full) ? full : fits(brief) ? brief : parts.map((each) => each[each.length - 1]);
}
const room = (name) => [...name].reduce((sum, letter) => sum + (letter > "\u2e80" ? 12 : 6.8), 8);

function frame(svg, height) {
  const width = svg.clientWidth || 900, tall = svg.clientHeight || height, wide = (width - LEFT - RIGHT) / slots.length;
  svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
  const x = (at) => LEFT + wide * (at + 0.5), axis = draw("g", { class: "axis", "aria-hidden": "true" });
  let taken = 0; // from left to right, what is not in the way of the one before
  namesOf(wide).forEach((name, at) => {
    const half = room(name) / 2, left = x(at) - half;
    if (left < taken || x(at) + half > width) return;
    taken = x(at) + half;
    axis.append(draw("text", { x: x(at), y: tall - BOTTOM + 18, "text-anchor": "middle" }, name));
  });
  return { width, tall, wide, x, axis };
}
const rule = (at, width, title) => [draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }), draw("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, title)];
const column = (at, x, wide, tall) => draw("rect", { class: "hit", x: (x(at) - wide / 2).toFixed(1), width: wide.toFixed(1), y: 4, height: tall - BOTTOM - 4, rx: 2, "data-slot": at });

function drawShares() {
  const svg = $("drawing"), { width, tall, wide, x, axis } = frame(svg, 250), foot = tall - BOTTOM;
  const y = (number) => foot - ((Math.min(Math.max(number, LOW), HIGH) - LOW) / (HIGH - LOW)) * (foot - TOP);
  for (let tick = Math.ceil(LOW / STEP - 1e-9); tick <= HIGH / STEP + 1e-9; tick += 1) axis.append(...rule(Math.round(y(tick * STEP)) + 0.5, width, `${text(100 * tick * STEP, 3)} %`));
  const half = Math.round(y(0.5)) + 0.5, lines = draw("g", { "aria-hidden": "true" });
  if (HIGH > 0.5) lines.append(draw("line", { class: "half", x1: LEFT, x2: width - RIGHT, y1: half, y2: half }));
  const thick = Math.max(Math.min(wide * 0.7, 46), 1), most = known.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
  const bars = slots.map((row, at) => {
    const size = share(row), kind = row.path ? " path" : "", inside = [column(at, x, wide, tall)];
    if (!defined(size)) inside.push(draw("text", { class: "unknown", x: x(at), y: y(0) - 5, "text-anchor": "middle" }, wide > 10 ? "?" : ""));
    else {
      const top = Math.min(y(size), y(0)), high = Math.max(Math.abs(y(size) - y(0)), size ? 1.5 : 0);
      inside.push(draw("rect", { class: "share" + kind, x: (x(at) - thick / 2).toFixed(1), width: thick.toFixed(1), y: top.toFixed(1), height: high.toFixed(1) }));
      if (size > HIGH || size < LOW) { // it goes on beyond the edge
        const cut = size > HIGH ? y(HIGH) + 9 : y(LOW) - 9, step = thick / 4;
        inside.push(draw("path", { class: "cut", d: `M${x(at) - thick / 2} ${cut}l${step} -5l${step} 5l${step} -5l${step} 5` }));
      }
      const told = wide >= 46 ? Math.abs(size) >= 0.005 : Math.abs(size) === most && at === slots.findIndex((one) => Math.abs(share(one)) === most);
      if (told) inside.push(draw("text", { class: "label" + (row.path ? " path" : ""), x: x(at), y: y(Math.max(size, 0)) - 5, "text-anchor": x(at) < LEFT + 24 ? "start" : "middle" }, percent(size)));
    }
    return draw("g", { class: "slot", role: "button", tabindex: at === charts.focus ? "0" : "-1", "aria-label": `${row.layer}: ${words(row)}`, "data-slot": at }, ...inside);
  });
  charts.marks = bars;
  lines.append(draw("line", { class: "zero", x1: LEFT, x2: width - RIGHT, y1: Math.round(y(0)) + 0.5, y2: Math.round(y(0)) + 0.5 }));
  svg.replaceChildren(axis, lines, draw("g", null, ...bars));
}

function drawErrors() {
  const svg = $("errors"), made = slots.map((row) => value(row.made)), accumulated = slots.map((row) => value(row.accumulated)), floors = slots.map((row) => value(row.floor));
  const errors = [...made, ...accumulated], ticks = ticksOf(errors.some(placed) ? [...errors, ...floors.filter((floor, at) => placed(made[at]))] : []);
  svg.classList.toggle("flat", !ticks);
  const { width, tall, wide, x, axis } = frame(svg, 230);
  const zero = errors.some((number) => number === 0), foot = tall - BOTTOM - (zero ? BAND + 8 : 0), band = foot + 8 + BAND / 2;
  const y = (number) => (number === 0 ? band : number === Infinity ? 12 : foot - ((Math.log10(number) - ticks[0]) / (ticks[ticks.length - 1] - ticks[0])) * (foot - TOP));
  for (const tick of ticks || []) axis.append(...rule(Math.round(y(10 ** tick)) + 0.5, width, tickText(tick)));
  if (zero) axis.append(draw("rect", { class: "band", x: LEFT, y: foot + 9, width: width - LEFT - RIGHT, height: BAND - 2 }), draw("text", { x: LEFT - 8, y: band + 4, "text-anchor": "end" }, "0"));
  if (!ticks && !zero) axis.append(draw("text", { x: width / 2, y: tall / 2, "text-anchor": "middle" }, "No error is known."));
  const line = (numbers) => {
    let path = "", last = null;
    numbers.forEach((number, at) => {
      if (!placed(number)) return;
      path += `${last === at - 1 ? "L" : "M"}${x(at).toFixed(1)} ${y(number).toFixed(1)}`;
      last = at;
    });
    return path;
  };
  const lines = draw("g", null, draw("path", { class: "trail", d: line(accumulated) }));
  floors.forEach((floor, at) => {
    if (placed(floor) && placed(made[at])) lines.append(draw("line", { class: "rounding", x1: x(at) - wide * 0.35, x2: x(at) + wide * 0.35, y1: y(floor), y2: y(floor) }));
  });
  const small = wide < 9 ? " scale(.6)" : "", put = (at, number) => `translate(${x(at).toFixed(1)} ${y(number).toFixed(1)})${small}`;
  const shown = (number) => defined(number) && (number === 0 || number === Infinity || placed(number));
  const marks = slots.map((row, at) => draw("g", null, column(at, x, wide, tall),
    shown(accumulated[at]) ? draw("circle", { class: "accumulated", r: 4.5, transform: put(at, accumulated[at]) }) : null,
    shown(made[at]) ? draw("path", { class: "made" + (row.path ? " path" : ""), d: "M0-5L5 0L0 5L-5 0Z", transform: put(at, made[at]) }) : null));
  svg.replaceChildren(axis, lines, draw("g", null, ...marks));
}

// The layer under the pointer is lit in both charts; each has its own tip.
function light(at, here = null) {
  for (const hit of document.querySelectorAll(".hit.lit")) hit.classList.remove("lit");
  $("tip").hidden = $("tip2").hidden = true;
  if (at === null) return;
  for (const hit of document.querySelectorAll(`.hit[data-slot="${at}"]`)) hit.classList.add("lit");
  const tip = here === $("errors") ? $("tip2") : $("tip"), plot = tip.parentElement, hit = plot.querySelector(`.hit[data-slot="${at}"]`).getBoundingClientRect();
  tip.replaceChildren(el("b", null, slots[at].layer), words(slots[at]));
  tip.hidden = false;
  const middle = hit.x + hit.width / 2 - plot.getBoundingClientRect().x, beside = hit.width / 2 + 8;
  const left = middle + beside + tip.offsetWidth < plot.clientWidth ? middle + beside : middle - beside - tip.offsetWidth;
  tip.style.left = Math.max(4, Math.min(left, plot.clientWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = "8px";
}

function buildCharts() {
  const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
  const slotAt = (event) => (event.target.dataset && event.target.dataset.slot !== undefined ? Number(event.target.dataset.slot) : event.target.closest("g.slot") ? Number(event.target.closest("g.slot").dataset.slot) : null);
  for (const svg of [$("drawing"), $("errors")]) {
    svg.addEventListener("pointermove", (event) => { const at = slotAt(event); if (at !== null) light(at, svg); });
    svg.addEventListener("pointerleave", () => light(null));
    svg.addEventListener("click", (event) => { const at = slotAt(event); if (at !== null) reveal(slots[at].at); });
  }
  $("drawing").addEventListener("focusin", (event) => light(slotAt(event), $("drawing")));
  $("drawing").addEventListener("focusout", () => light(null));
  $("drawing").addEventListener("keydown", (event) => {
    const at = slotAt(event);
    if (at === null) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); reveal(slots[at].at); }
    if (!(event.key in step)) return;
    event.preventDefault();
    charts.marks[at].setAttribute("tabindex", "-1");
    charts.focus = Math.max(0, Math.min(slots.length - 1, at + step[event.key]));
    charts.marks[charts.focus].setAttribute("tabindex", "0");
    charts.marks[charts.focus].focus();
  });
  const said = [HIGH > 0.5 ? "Dashed: half of the error, what a culprit makes at least." : `The axis ends at ${percent(HIGH)}: a culprit would make at least half of the error.`], unknown = slots.length - known.length;
  if (known.some((size) => size < LOW || size > HIGH)) said.push("A bar with a cut goes on beyond the edge.");
  if (unknown) said.push(`No bar, or a “?”: of ${whole(unknown)} ${unknown === 1 ? "layer" : "layers"} it is not known what part of the error ${unknown === 1 ? "it makes" : "they make"}.`);
  if (data.outside) said.push(data.outside);
  $("key").textContent = said.join(" ");
  if (slots.some((row) => placed(value(row.floor)) && placed(value(row.made)))) $("floor_key").textContent = "; dashed: what rounding explains of what is made here";
  let last = 0;
  new ResizeObserver(() => { if ($("errors").clientWidth !== last) { last = $("errors").clientWidth; drawShares(); drawErrors(); } }).observe($("plot2"));
}
